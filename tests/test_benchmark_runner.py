"""The benchmark command: one process or several, cuts and resumption, and servers."""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from conftest import ROOT, load_example
from tiny_checkpoints import save_pair

from dspine.integrations.evaluation import results
from dspine.integrations.evaluation.prompts import Prompt
from dspine.integrations.evaluation.serving import Server
from dspine.modeling_dspine import DSpineModel


# ---- servers --------------------------------------------------------------------------------------------------------------------


class FakeServer(BaseHTTPRequestHandler):
    """SGLang's answers: 9 tokens in 3 passes if it drafts."""

    drafts = True
    seen: list = []

    def log_message(self, *args):
        pass

    def _answer(self, value, status=200):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path == "/server_info":
            return self._answer({}, 404)
        if self.path == "/v1/models":
            return self._answer({"data": [{"id": "model"}]})
        draft = {"speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": 4} if self.drafts else {}
        self._answer({"version": "0.5.17", "port": 1, "speculative_eagle_topk": None} | draft)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((self.path, body))
        if self.path == "/flush_cache":
            return self._answer({})
        meta = {"completion_tokens": 9}
        if self.drafts:
            meta |= {"spec_verify_ct": 3, "spec_accept_histogram": [0, 1, 2, 0], "spec_accept_length": 3.0}
        if self.path == "/generate":
            if len(body["input_ids"]) > 50:
                return self._answer({"error": "too long"}, 400)
            return self._answer({"output_ids": list(range(9)), "meta_info": meta})
        self._answer({"choices": [{"text": "x", "meta_info": meta}], "usage": {"completion_tokens": 9}})


@pytest.fixture
def serve():
    servers = []

    def start(drafts=True):
        handler = type("Handler", (FakeServer,), {"drafts": drafts, "seen": []})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}", handler.seen

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_client_of_sglang(serve):
    url, seen = serve()
    server = Server(url + "/")
    assert server.info() == {"version": "0.5.17", "speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": 4}
    answer = server.generate([1, 2], 9, temperature=1.0, seed=5)
    assert (answer.new_tokens, answer.rounds, sorted(answer.accepted_lengths)) == (9, 3, [2, 3, 3])
    assert seen[-1][1]["sampling_params"]["sampling_seed"] == 5
    answers, seconds = server.load([Prompt("a", i, [i]) for i in range(7)], 3, 9)
    assert len(answers) == 7 and seconds > 0
    with pytest.raises(RuntimeError, match=r"/generate answered 400: .*too long"):
        server.generate([1] * 51, 9)


def test_client_of_openai(serve):
    url, seen = serve()
    answer = Server(url, api="openai").generate([1, 2], 9)
    assert (answer.new_tokens, answer.rounds, answer.output_ids) == (9, 3, None)
    assert seen[-1][1]["prompt"] == [1, 2] and seen[-1][1]["model"] == "model"
    with pytest.raises(ValueError, match="api must be"):
        Server(url, api="grpc")


def test_client_says_when_nobody_answers():
    with pytest.raises(RuntimeError, match="cannot be reached"):
        Server("http://127.0.0.1:9").info()


# ---- the commands ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def work():
    return load_example("benchmarking.work")


@pytest.fixture
def benchmark(work):
    return load_example("benchmark")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder)
    bench = folder / "bench"
    bench.mkdir()
    for name in ("gsm8k", "own"):
        (bench / f"{name}.jsonl").write_text("\n".join(json.dumps({"turns": [f"w{i} w{i + 3}"]}) for i in range(3)))
    return folder


def command(folders, out, *more):
    return [
        *("--target", str(folders / "target"), "--bench-dir", str(folders / "bench"), "--datasets", "gsm8k", "own"),
        *("--drafter", f"dspine={folders / 'drafter'}", "--max-new-tokens", "12", "--dtype", "float32"),
        *("--device", "cpu", "--warmup-tokens", "0", "--num-resamples", "20", "--out", str(out), *more),
    ]


def test_benchmark_runs_and_resumes(benchmark, folders, tmp_path, capsys):
    cut = benchmark.main(command(folders, tmp_path, "--time-limit", "0"))
    assert not cut["complete"] and cut["cells"] == []
    options = ("--temperatures", "0", "1", "--block-sizes", "0", "3")
    summary = benchmark.main(command(folders, tmp_path, *options))
    # target, lookup and the drafter in two block sizes, at two temperatures
    assert summary["complete"] and len(summary["cells"]) == 8
    greedy = [c for c in summary["cells"] if c["kind"] == "drafter" and c["temperature"] == 0]
    assert {cell["block_size"] for cell in greedy} == {3, 6}
    assert all(c["exactness"] == {"compared": 6, "equal": 6, "faults": 0, "largest_gap": 0.0} for c in greedy)
    assert all(set(c["speed_up"]) == {"target", "prompt_lookup"} for c in greedy)
    lines = (tmp_path / "results-0.jsonl").read_text().splitlines()
    again = benchmark.main(command(folders, tmp_path, *options))
    assert (tmp_path / "results-0.jsonl").read_text().splitlines() == lines and again["cells"] == summary["cells"]
    used = summary["versions"]["implementations"]
    assert used["transition_cache"] and again["versions"]["implementations"] == used
    assert "dspine" in capsys.readouterr().out
    kept = json.loads((tmp_path / "summary.json").read_text())
    assert str(folders) not in json.dumps(kept), "machine paths in the summary"
    assert kept["versions"]["torch"] == torch.__version__ and kept["arguments"]["seeds"] == [0]
    with pytest.raises(ValueError, match="max_new_tokens: 12 there, 13 now"):
        benchmark.main([*command(folders, tmp_path, *options), "--max-new-tokens", "13"])


def test_summary_of_what_a_killed_run_left(benchmark, folders, tmp_path):
    whole = benchmark.main(command(folders, tmp_path, "--baselines", "target"))
    (tmp_path / "summary.json").unlink()
    summary = benchmark.main(command(folders, tmp_path, "--summary-only"))
    assert summary["cells"] == whole["cells"] and summary["drafters"].keys() == whole["drafters"].keys()
    # what was asked for and which implementations ran, not what the process that sums up was given
    assert summary["arguments"] == whole["arguments"] and summary["versions"] == whole["versions"]
    assert not summary["complete"] and (tmp_path / "summary.json").is_file()
    with pytest.raises(FileNotFoundError, match=r"--summary-only needs a run's folder"):
        benchmark.main(command(folders, tmp_path / "nowhere", "--summary-only"))


def test_same_drafter_in_transformers_loop(benchmark, folders, tmp_path):
    """The baseline `assisted`: the same greedy texts, and a speed-up over it for the drafter it belongs to."""
    from transformers.generation import candidate_generator

    arguments = command(folders, tmp_path, "--baselines", "target", "assisted")
    if not hasattr(candidate_generator, "DFlashTokenCandidateGenerator"):
        with pytest.raises(RuntimeError, match="5.19 or later"):
            benchmark.main(arguments)
        return
    cells = {cell["method"]: cell for cell in benchmark.main(arguments)["cells"]}
    theirs = cells["dspine in Transformers' loop"]
    assert theirs["kind"] == "assisted" and theirs["exactness"] == cells["dspine"]["exactness"]
    assert set(cells["dspine"]["speed_up"]) == {"target", "assisted"}


def test_peers_with_a_head_are_left_out_of_transformers_loop(benchmark, folders, tmp_path, monkeypatch):
    import benchmarking.transformers_run as backend

    class Peer(DSpineModel):
        def propose(self, *args, **kwargs):
            return super().propose(*args, **kwargs)

    monkeypatch.setattr(backend, "check_transformers_loop", lambda: None)
    monkeypatch.setattr(backend, "load", lambda folder, dtype: Peer.from_pretrained(folder, dtype=dtype))
    cells = benchmark.main(command(folders, tmp_path, "--baselines", "assisted"))["cells"]
    assert [cell["method"] for cell in cells] == ["dspine"]


def units(work, lengths, temperatures=(0.0, 1.0), drafters=2, size=3):
    """All units of made-up prompts: the target and some drafters at every temperature."""
    asked = [Prompt("ab"[i % 2], i // 2, [0], answer_length=length) for i, length in enumerate(lengths)]
    methods = [{"method": "target", "kind": "target"}]
    methods += [{"method": f"drafter {i}", "kind": "drafter"} for i in range(drafters)]
    return [
        work.Unit(temperature, 0, place, batch, method)
        for temperature in temperatures
        for place, batch in enumerate(work.batches(asked, size, mix_sets=True))
        for method in methods
    ]


def test_batches_hold_like_answers(work):
    parts = units(work, [9, 1, 8, 2, 7, 3], drafters=0)
    assert [[prompt.answer_length for prompt in unit.prompts] for unit in parts] == [[1, 2, 3], [7, 8, 9]] * 2
    assert [unit.rounds(512) for unit in parts] == [3, 9] * 2 and parts[1].rounds(5) == 5
    unknown = work.Unit(0.0, 0, 0, [Prompt("a", 0, [0])] * 4, {"method": "lookup", "kind": "prompt_lookup"})
    assert unknown.rounds(30) == 4 * 30 / 3, "prompt by prompt"


@pytest.mark.parametrize("world", [1, 2, 3, 16, 40])
def test_units_are_shared_out_once_and_evenly(work, world):
    parts = units(work, [40 + 7 * i % 400 for i in range(48)], drafters=5, size=6)
    shares = work.share_out(parts, world, 512)
    given = [id(unit) for part in shares for share in part for unit in share]
    assert sorted(given) == sorted(map(id, parts)), "every unit exactly once"
    first, then = shares
    early = [unit for share in first for unit in share]
    assert all(unit.gives_answers or unit.temperature > 0 for unit in early)
    assert all(not unit.gives_answers for share in then for unit in share)

    def load(share):
        return sum(unit.rounds(512) for unit in share)

    # nobody is kept waiting at the meeting by work that could have come later
    assert max(map(load, first)) == max(load([u for u in share if u.gives_answers]) for share in first)
    longest = max((unit.rounds(512) for share in then for unit in share), default=0)
    assert max(map(load, then)) <= sum(map(load, then)) / world + longest
    # a run that is cut has all methods of the same prompts: at any time at most a few batches are begun
    for share in then:
        answers = [max(prompt.answer_length for prompt in unit.prompts) for unit in share]
        assert answers == sorted(answers, reverse=True)


def test_idle_processes_take_what_needs_no_answers(work):
    first, _ = work.share_out(units(work, [8, 8, 8, 8]), 4, 512)
    kinds = [[(unit.temperature, unit.method["kind"]) for unit in share] for share in first]
    assert sum(kind == [(0.0, "target")] for kind in kinds) == 2
    assert all(share and share[0][0] == 1.0 for share in kinds if share[0] != (0.0, "target"))
    # without answers to wait for there is one part only
    known = [unit for unit in units(work, [8, 8, 8, 8]) if not unit.gives_answers]
    assert not any(work.share_out(known, 4, 512)[0])


def test_servers_prompts_are_shared_out(work):
    asked = [Prompt("ab"[i % 2], i // 2, [0], answer_length=length) for i, length in enumerate([9, 1, 8, 2, 7, 3])]
    lengths = [sorted(prompt.answer_length for prompt in work.part_of(asked, rank, 2)) for rank in range(2)]
    assert lengths == [[1, 3, 8], [2, 7, 9]]


def test_batches_that_do_not_fit_are_decoded_in_halves(benchmark, folders, monkeypatch, tmp_path, capsys):
    backend = load_example("benchmarking.transformers_run")
    decode = backend.decode_with_drafter

    def tight(target, drafter, rows, *args, **kwargs):
        if len(rows) > 2:
            raise torch.OutOfMemoryError("no room")
        return decode(target, drafter, rows, *args, **kwargs)

    options = ("--batch-size", "6", "--mix-sets", "--baselines", "target", "--temperatures", "0", "1")
    whole = benchmark.main(command(folders, tmp_path / "whole", *options))
    monkeypatch.setattr(backend, "decode_with_drafter", tight)
    halves = benchmark.main(command(folders, tmp_path / "halves", *options))
    assert "dspine: 6 rows do not fit, 3 at a time" in capsys.readouterr().err
    assert lengths_of(tmp_path / "whole") == lengths_of(tmp_path / "halves")
    assert halves["complete"] and len(halves["cells"]) == len(whole["cells"]) == 4


def lengths_of(folder):
    """What every request's record says, apart from the clock and the process."""
    records = [record for file in folder.glob("results-*.jsonl") for record in results.read_lines(file)]
    keys = [results.ResultStore.key(record) for record in records]
    assert len(set(keys)) == len(keys), "a request was decoded twice"
    parts = ("accepted_lengths", "new_tokens", "exactness", "output_ids", "batch_size")
    return {key: [record.get(part) for part in parts] for key, record in zip(keys, records)}


def under_torchrun(arguments, processes=2):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [*launch, str(ROOT / "examples" / "benchmark.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_processes_give_the_records_of_one(benchmark, folders, tmp_path):
    """Two processes, cut and continued, one of them without work at times: every request once, and the same records."""
    options = ("--batch-size", "4", "--mix-sets", "--temperatures", "0", "1", "--block-sizes", "0", "3")
    benchmark.main(command(folders, tmp_path / "one", *options))
    out = tmp_path / "two"
    # before the deadline nobody has time for anything: the processes still meet
    under_torchrun(command(folders, out, *options, "--time-limit", "0"))
    assert not json.loads((out / "summary.json").read_text())["complete"]
    # one batch of the target only, which leaves a process without work
    under_torchrun(command(folders, out, *options[:3], "--baselines", "target", "--datasets", "own"))
    before = lengths_of(out)
    assert len(before) == 6
    under_torchrun(command(folders, out, *options))
    assert json.loads((out / "summary.json").read_text())["complete"]
    together = lengths_of(out)
    assert {key: together[key] for key in before} == before
    alone = lengths_of(tmp_path / "one")
    sampled = {key for key in alone if key[0] == "target" and key[results.KEY.index("temperature")] > 0}
    # what the target samples depends on the whole batch
    assert alone.keys() == together.keys()
    assert {k: v for k, v in alone.items() if k not in sampled} == {
        k: v for k, v in together.items() if k not in sampled
    }
    # greedy texts were compared, whichever process the target's answers came from
    greedy = [v for k, v in together.items() if k[0] == "dspine" and k[results.KEY.index("temperature")] == 0]
    assert len(greedy) == 12 and all(values[2] == {"equal": True} for values in greedy)
    assert all((out / f"results-{rank}.jsonl").is_file() for rank in range(2))


def test_batches_are_of_one_set_unless_mixed(work):
    asked = [Prompt(name, i, [0] * (9 - i)) for i in range(3) for name in "ab"]
    apart, mixed = work.batches(asked, 2), work.batches(asked, 4, mix_sets=True)
    assert [len(batch) for batch in apart] == [2, 2, 1, 1] and all(len({p.dataset for p in b}) == 1 for b in apart)
    assert [len(batch) for batch in mixed] == [4, 2] and {p.dataset for p in mixed[0]} == {"a", "b"}


def test_benchmark_in_batches(benchmark, folders, tmp_path):
    summary = benchmark.main(command(folders, tmp_path, "--batch-size", "2"))
    cells = {cell["method"]: cell for cell in summary["cells"]}
    assert cells["dspine"]["exactness"]["faults"] == 0 and cells["dspine"]["batch_size"] == 2
    # one prompt at a time is no fair comparison with two
    assert set(cells["dspine"]["speed_up"]) == {"target"}


def test_benchmark_of_servers(benchmark, folders, tmp_path, serve):
    arguments = [
        *("--backend", "sglang", "--target", str(folders / "target"), "--bench-dir", str(folders / "bench")),
        *("--server", f"target={serve(drafts=False)[0]}", "--server", f"dspine={serve()[0]}", "--datasets", "gsm8k"),
        *("--concurrency", "1", "2", "--max-new-tokens", "9", "--out", str(tmp_path), "--num-resamples", "20"),
    ]
    summary = benchmark.main(arguments)
    assert len(summary["cells"]) == 4
    cell = next(c for c in summary["cells"] if c["method"] == "dspine" and c["concurrency"] == 2)
    assert cell["mean_of_sets"]["accepted_length"] == pytest.approx(8 / 3) and cell["block_size"] == 4
    assert cell["speed_up"]["target"] > 0 and cell["tokens_per_second"] > 0
    assert benchmark.main(arguments)["cells"] == summary["cells"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "sglang"], "needs --server NAME=URL"),
        (["--server", "a=http://x"], "is for --backend sglang"),
        (["--batch-size", "0"], "must be at least 1"),
    ],
)
def test_benchmark_refuses_in_one_sentence(benchmark, arguments, message, capsys):
    with pytest.raises(SystemExit):
        benchmark.parse_arguments(["--target", "t", "--out", "o", *arguments])
    assert message in capsys.readouterr().err
