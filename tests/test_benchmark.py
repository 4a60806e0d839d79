"""The benchmark runner and its report: prompts, decoding alike, crash-safe results, servers, and the page."""

import importlib.util
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from conftest import ROOT, load_example
from tiny_checkpoints import THINKING_TEMPLATE, save_pair, tiny_tokenizer
from tiny_models import scripted_drafter, tiny_target

from dspine.integrations.evaluation import decoding, prompts, report, results
from dspine.integrations.evaluation.prompts import Prompt
from dspine.integrations.evaluation.serving import Server


# ---- prompts --------------------------------------------------------------------------------------------------------------------


def test_wording_is_that_of_the_local_files(shared_data):
    """A row of the Hub, as its columns are called there, becomes the line that DeepSpec's converter made of it."""
    first = {path.stem: prompts.read_turns(path) for path in (shared_data / "bench").glob("*.jsonl")}
    assert set(first) == set(prompts.BENCHMARKS)
    suffix = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    for name, column in (("gsm8k", "question"), ("math500", "problem")):
        text = first[name][0][0]
        assert (
            prompts.BENCHMARKS[name].turns({column: text.removesuffix(suffix)})
            == [text]
            != [text.removesuffix(suffix)]
        )
    text = first["humaneval"][0][0]
    body = re.fullmatch(r"Write a solution .*?:\n```python\n(.*)\n```", text, re.DOTALL).group(1)
    assert prompts.BENCHMARKS["humaneval"].turns({"prompt": body}) == [text]
    seen = set()
    for (text,) in first["livecodebench"]:
        question, code = re.search(
            r"### Question:\n(.*)\n\n### Format: .*?\n```python\n(.*)\n```\n\n###", text, re.DOTALL
        ).groups()
        code = "" if code == "# YOUR CODE HERE" else code
        assert prompts.BENCHMARKS["livecodebench"].turns({"question_content": question, "starter_code": code}) == [
            text
        ]
        seen.add(bool(code))
    assert seen == {True, False}
    assert prompts.BENCHMARKS["mt-bench"].turns({"prompt": first["mt-bench"][0]}) == first["mt-bench"][0]


def test_turns_may_hold_any_character(tmp_path):
    path = tmp_path / "odd.jsonl"
    path.write_text(json.dumps({"turns": ["a\u2028b\x85c", "d"]}, ensure_ascii=False) + "\n\n", encoding="utf-8")
    assert prompts.read_turns(path) == [["a\u2028b\x85c", "d"]]


@pytest.mark.parametrize("line", ["{", '{"turns": []}', '{"turns": [1]}', "[]", '{"prompt": "x"}'])
def test_malformed_lines_are_named(tmp_path, line):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"turns": ["good"]}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl line 2 must be an object"):
        prompts.read_turns(path)


def test_thinking_is_a_switch_of_the_template():
    plain, thinking = tiny_tokenizer(), tiny_tokenizer(THINKING_TEMPLATE)
    without = prompts.render(plain, "w1 w2")
    assert plain.convert_ids_to_tokens(without) == ["<user>", "w1", "w2", "<answer>"]
    assert prompts.render(thinking, "w1 w2", thinking=False) == without
    assert prompts.render(thinking, "w1 w2", thinking=True) == [*without, thinking.convert_tokens_to_ids("<think>")]
    with pytest.raises(ValueError, match="no switch `enable_thinking`"):
        prompts.render(plain, "w1", thinking=True)


def test_selection_is_seeded_and_capped(tmp_path):
    assert prompts.select(5, None, 42) == prompts.select(5, 9, 42) == [0, 1, 2, 3, 4]
    assert prompts.select(100, 3, None) == [0, 1, 2]
    drawn = prompts.select(100, 10, 42)
    assert drawn == prompts.select(100, 10, 42) == sorted(drawn) != prompts.select(100, 10, 7)
    (tmp_path / "mt-bench.jsonl").write_text("\n".join(json.dumps({"turns": [f"w{i % 90}"]}) for i in range(90)))
    (tmp_path / "own.jsonl").write_text('{"turns": ["w1 w2 w3 w4"]}\n{"turns": ["w1"]}')
    tokenizer = tiny_tokenizer()
    assert len(prompts.load_prompts(["mt-bench"], tokenizer, tmp_path)) == 80  # the set's cap
    (short,) = prompts.load_prompts(["own"], tokenizer, tmp_path, max_prompt_tokens=4)
    assert (short.dataset, short.index) == ("own", 1)
    with pytest.raises(FileNotFoundError, match=r"no file other\.jsonl .* \['mt-bench', 'own'\]"):
        prompts.load_prompts(["other"], tokenizer, tmp_path)
    with pytest.raises(ValueError, match="unknown benchmark 'other'"):
        prompts.hub_turns("other")


def test_hub_rows_are_read_through_datasets(monkeypatch):
    datasets = pytest.importorskip("datasets")
    calls = []

    def load_dataset(path, name=None, **options):
        calls.append((path, name, options))
        column = {"json": {"question_content": "q", "starter_code": ""}}.get(path, {"question": "q"})
        return iter([column] * 600) if options.get("streaming") else [column] * 3

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(prompts.hub_turns("gsm8k")) == 3 and calls[0] == ("openai/gsm8k", "main", {"split": "test"})
    assert len(prompts.hub_turns("livecodebench")) == 500 and calls[1][2]["streaming"]


# ---- decoding -------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair():
    target = tiny_target(initializer_range=0.2)
    target.generation_config.eos_token_id = None
    asked = [Prompt("set", i, torch.arange(3 + i, 9 + 2 * i).tolist()) for i in range(3)]
    inputs = torch.tensor([asked[0].input_ids])
    answer = target.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=24, do_sample=False)[0]
    return target, scripted_drafter(target, answer, wrong_every=5), asked


def test_all_ways_give_the_same_greedy_text(pair):
    target, drafter, asked = pair
    alone = [decoding.decode_alone(target, [p], 24)[0] for p in asked]
    lookup = decoding.decode_prompt_lookup(target, asked, 24)
    drafted = [decoding.decode_with_drafter(target, drafter, [p], 24)[0] for p in asked]
    batch = decoding.decode_with_drafter(target, drafter, asked, 24)
    for a, b, c, d in zip(alone, lookup, drafted, batch):
        assert a.output_ids == b.output_ids == c.output_ids == d.output_ids and len(a.output_ids) == 24
        assert a.accepted_lengths is None and a.seconds > 0
        assert sum(b.accepted_lengths) == 24  # its first round holds the prefill
        assert sum(c.accepted_lengths) == 23 and c.accepted_lengths == d.accepted_lengths
    assert max(drafted[0].accepted_lengths) > 2


def test_lookup_counts_passes(pair):
    target, _, asked = pair
    passes = []
    handle = target.register_forward_hook(lambda *args: passes.append(1))
    (answer,) = decoding.decode_prompt_lookup(target, asked[:1], 24)
    handle.remove()
    assert len(answer.accepted_lengths) == len(passes)


def test_block_size_is_put_back(pair):
    target, drafter, asked = pair
    (answer,) = decoding.decode_with_drafter(target, drafter, asked[:1], 24, block_size=3)
    assert max(answer.accepted_lengths) == 3 and drafter.config.block_size == 6
    with pytest.raises(RuntimeError), decoding.block_size_of(drafter, 3):
        raise RuntimeError
    assert drafter.config.block_size == 6


def test_samples_depend_on_prompt_and_seed_only(pair):
    target, drafter, asked = pair
    alone = decoding.decode_with_drafter(target, drafter, asked[1:2], 12, temperature=1.0, seed=3)[0]
    batch = decoding.decode_with_drafter(target, drafter, asked, 12, temperature=1.0, seed=3)[1]
    other = decoding.decode_with_drafter(target, drafter, asked[1:2], 12, temperature=1.0, seed=4)[0]
    assert alone.output_ids == batch.output_ids != other.output_ids


def test_texts_end_with_their_end_token(pair):
    target, drafter, asked = pair
    whole = decoding.decode_alone(target, asked[:1], 24)[0].output_ids
    target.generation_config.eos_token_id = whole[9]
    try:
        end = whole.index(whole[9]) + 1
        for answer in (
            *decoding.decode_alone(target, asked, 24)[:1],
            *decoding.decode_prompt_lookup(target, asked[:1], 24),
            *decoding.decode_with_drafter(target, drafter, asked, 24)[:1],
        ):
            assert answer.output_ids == whole[:end]
    finally:
        target.generation_config.eos_token_id = None


def test_near_tie_check(pair):
    target, _, asked = pair
    ids, text = asked[0].input_ids, decoding.decode_alone(target, asked[:1], 8)[0].output_ids
    check = decoding.NearTieCheck(target)
    assert check(ids, text, list(text)) == {"equal": True}
    with torch.no_grad():
        logits = target(torch.tensor([ids + text[:3]])).logits[0, -1]
    second = int(logits.topk(2).indices[1])
    other = [*text[:3], second, *text[4:]]
    found = check(ids, text, other)
    assert (found["equal"], found["at"], found["fault"]) == (False, 3, True)
    assert found["gap"] == pytest.approx(float(logits[text[3]] - logits[second]), abs=1e-5)
    assert not decoding.NearTieCheck(target, tie_gap=found["gap"] + 0.01)(ids, text, other)["fault"]
    assert check(ids, text, text[:-1])["fault"]  # a text that stops early is no rounding


# ---- results --------------------------------------------------------------------------------------------------------------------


def record(method="dspine", kind="drafter", index=0, lengths=(4, 2), dataset="gsm8k", **more):
    lengths = None if lengths is None else list(lengths)
    return {
        "backend": "transformers",
        "method": method,
        "kind": kind,
        "fingerprint": None,
        "dataset": dataset,
        "index": index,
        "prompt": "00000000",
        "temperature": 0.0,
        "block_size": 4 if kind == "drafter" else None,
        "seed": 0,
        "concurrency": None,
        "batch_size": 1,
        "new_tokens": 7,
        "seconds": 1.0,
        "accepted_lengths": lengths,
    } | more


def test_store_survives_a_crash(tmp_path):
    store = results.ResultStore(tmp_path, {"a": 1})
    store.add(record(index=0))
    store.close()
    with store.path.open("a") as file:
        file.write('{"method": "dspine", "ind')  # the process was killed here
    again = results.ResultStore(tmp_path, {"a": 1})
    assert again.key(record(index=0)) in again.done and len(again.done) == 1
    again.add(record(index=1))
    again.close()
    other = results.ResultStore(tmp_path, {"a": 1}, rank=1)
    other.add(record(index=2))
    assert [r["index"] for r in results.ResultStore(tmp_path, {"a": 1}).records()] == [0, 1, 2]


def test_store_refuses_other_settings(tmp_path):
    results.write_json(tmp_path / "run.json", {"settings": {"max_new_tokens": 512, "dtype": "bfloat16"}})
    with pytest.raises(ValueError, match="max_new_tokens: 512 there, 256 now"):
        results.ResultStore(tmp_path, {"max_new_tokens": 256, "dtype": "bfloat16"})


def test_fingerprint_follows_the_weights(tmp_path):
    save_pair(tmp_path)
    before = results.fingerprint(tmp_path / "drafter")
    weights = tmp_path / "drafter" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert len(before) == 12 and results.fingerprint(tmp_path / "drafter") != before


def test_summary_by_hand():
    records = [
        record("target", "target", 0, None, seconds=7.0),
        record("target", "target", 1, None, seconds=7.0),
        record("dspine", index=0, lengths=(4, 2), seconds=2.0, exactness={"equal": True}),
        record("dspine", index=1, lengths=(3, 3), seconds=2.0, exactness={"equal": False, "gap": 0.2, "fault": False}),
        record("dflash", index=0, lengths=(2, 2, 2), seconds=3.0),
        record("dflash", index=1, lengths=(1, 5 - 2, 2), seconds=3.0),
    ]
    summary = results.summarise_records(records, num_resamples=50)
    cells = {cell["method"]: cell for cell in summary["cells"]}
    assert cells["dspine"]["mean_of_sets"]["accepted_length"] == 3.0
    assert cells["dspine"]["speed_up"] == {"target": 3.5} and cells["dflash"]["tokens_per_second"] == pytest.approx(
        7 / 3
    )
    assert cells["dspine"]["exactness"] == {"compared": 2, "equal": 1, "faults": 0, "largest_gap": 0.2}
    assert "mean_of_sets" not in cells["target"]
    gains = {(part["method"], part["over"]): part["accepted_length"] for part in summary["gains"]}
    assert gains[("dspine", "dflash")] == pytest.approx(0.5)


def test_summary_counts_rounds_of_a_server_without_histogram():
    part = record(lengths=None, rounds=2, new_tokens=6, concurrency=1, backend="sglang")
    (cell,) = results.summarise_records([part], num_resamples=0)["cells"]
    assert cell["mean_of_sets"]["accepted_length"] == 2.5 and "slot_acceptance" not in cell["all"]


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


def test_benchmark_runs_and_resumes(folders, tmp_path, capsys):
    benchmark = load_example("benchmark")
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
    assert "dspine" in capsys.readouterr().out
    kept = json.loads((tmp_path / "summary.json").read_text())
    assert str(folders) not in json.dumps(kept), "machine paths in the summary"
    assert kept["versions"]["torch"] == torch.__version__ and kept["arguments"]["seeds"] == [0]
    with pytest.raises(ValueError, match="max_new_tokens: 12 there, 13 now"):
        benchmark.main([*command(folders, tmp_path, *options), "--max-new-tokens", "13"])


def test_benchmark_shares_prompts_out(folders, monkeypatch, tmp_path):
    benchmark = load_example("benchmark")
    tokenizer = tiny_tokenizer()
    taken = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        args = benchmark.parse_arguments(command(folders, tmp_path))
        taken.append({(p.dataset, p.index) for p in benchmark.read_prompts(args, tokenizer)})
    assert not taken[0] & taken[1] and len(taken[0] | taken[1]) == 6 and len(taken[0]) == 3


def test_summary_of_what_a_killed_run_left(folders, tmp_path):
    benchmark = load_example("benchmark")
    whole = benchmark.main(command(folders, tmp_path, "--baselines", "target"))
    (tmp_path / "summary.json").unlink()
    summary = benchmark.main(command(folders, tmp_path, "--summary-only"))
    assert summary["cells"] == whole["cells"] and summary["drafters"].keys() == whole["drafters"].keys()
    assert not summary["complete"] and (tmp_path / "summary.json").is_file()
    with pytest.raises(FileNotFoundError, match=r"--summary-only needs a run's folder"):
        benchmark.main(command(folders, tmp_path / "nowhere", "--summary-only"))


def test_same_drafter_in_transformers_loop(folders, tmp_path):
    """The baseline `assisted`: the same greedy texts, and a speed-up over it for the drafter it belongs to."""
    from transformers.generation import candidate_generator

    benchmark = load_example("benchmark")
    arguments = command(folders, tmp_path, "--baselines", "target", "assisted")
    if not hasattr(candidate_generator, "DFlashTokenCandidateGenerator"):
        with pytest.raises(RuntimeError, match="5.19 or later"):
            benchmark.main(arguments)
        return
    cells = {cell["method"]: cell for cell in benchmark.main(arguments)["cells"]}
    theirs = cells["dspine in Transformers' loop"]
    assert theirs["kind"] == "assisted" and theirs["exactness"] == cells["dspine"]["exactness"]
    assert set(cells["dspine"]["speed_up"]) == {"target", "assisted"}


def test_stored_answers_share_out_the_work(folders, monkeypatch, tmp_path):
    """Prompts whose answers are known: every process gets long and short ones, and batches hold like ones."""
    benchmark = load_example("benchmark")
    asked = [Prompt("ab"[i % 2], i // 2, [0], answer_length=length) for i, length in enumerate([9, 1, 8, 2, 7, 3])]
    monkeypatch.setattr(benchmark, "load_token_prompts", lambda *args: asked)
    taken = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        args = benchmark.parse_arguments(command(folders, tmp_path, "--prompts", "file"))
        taken.append(benchmark.read_prompts(args, None))
    lengths = [sorted(prompt.answer_length for prompt in part) for part in taken]
    assert lengths == [[1, 3, 8], [2, 7, 9]]
    batches = benchmark.batches(asked, 3, mix_sets=True)
    assert [[prompt.answer_length for prompt in batch] for batch in batches] == [[1, 2, 3], [7, 8, 9]]


@pytest.mark.slow
def test_benchmark_under_torchrun(folders, tmp_path):
    import subprocess
    import sys

    script = str(ROOT / "examples" / "benchmark.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", script]
    done = subprocess.run([*launch, *command(folders, tmp_path)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["complete"] and all(cell["requests"] == 6 for cell in summary["cells"])
    assert (tmp_path / "results-0.jsonl").is_file() and (tmp_path / "results-1.jsonl").is_file()


def test_batches_are_of_one_set_unless_mixed():
    benchmark = load_example("benchmark")
    asked = [Prompt(name, i, [0] * (9 - i)) for i in range(3) for name in "ab"]
    apart, mixed = benchmark.batches(asked, 2), benchmark.batches(asked, 4, mix_sets=True)
    assert [len(batch) for batch in apart] == [2, 2, 1, 1] and all(len({p.dataset for p in b}) == 1 for b in apart)
    assert [len(batch) for batch in mixed] == [4, 2] and {p.dataset for p in mixed[0]} == {"a", "b"}


def test_benchmark_in_batches(folders, tmp_path):
    benchmark = load_example("benchmark")
    summary = benchmark.main(command(folders, tmp_path, "--batch-size", "2"))
    cells = {cell["method"]: cell for cell in summary["cells"]}
    assert cells["dspine"]["exactness"]["faults"] == 0 and cells["dspine"]["batch_size"] == 2
    # one prompt at a time is no fair comparison with two
    assert set(cells["dspine"]["speed_up"]) == {"target"}


def test_benchmark_of_servers(folders, tmp_path, serve):
    benchmark = load_example("benchmark")
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
def test_benchmark_refuses_in_one_sentence(arguments, message, capsys):
    with pytest.raises(SystemExit):
        load_example("benchmark").parse_arguments(["--target", "t", "--out", "o", *arguments])
    assert message in capsys.readouterr().err


# ---- the report -----------------------------------------------------------------------------------------------------------------


def made_up_summary(served=False, gain=1):
    """A scoreboard of two drafters at two temperatures on all sets."""
    import numpy as np

    generator = np.random.default_rng(0)
    records = []
    for name in prompts.BENCHMARKS:
        for index in range(12):
            for temperature in (0.0, 1.0):
                for method, chance in (("dspine", 0.72), ("dflash", 0.72 - 0.08 * gain), ("target", None)):
                    for load in (1, 4, 16) if served else (None,):
                        lengths = None
                        if chance:
                            lengths = generator.geometric(1 - chance + 0.1 * temperature, 30).clip(1, 8).tolist()
                        tokens = sum(lengths or [90]) + 1
                        part = record(
                            method,
                            "target" if chance is None else "drafter",
                            index,
                            lengths,
                            name,
                            temperature=temperature,
                            block_size=8 if chance else None,
                            new_tokens=tokens,
                            seconds=len(lengths or [0] * tokens) * 0.02,
                            concurrency=load,
                        )
                        if served:
                            part |= {"wall_seconds": 20 / load**0.7 + bool(chance), "wall_tokens": 3000}
                        if chance and temperature == 0:
                            part["exactness"] = {"equal": True}
                        records.append(part)
    settings = {"backend": "sglang" if served else "transformers", "target": "tiny", "dtype": "bfloat16"}
    settings |= {"max_new_tokens": 512, "thinking": "off", "batch_size": 1}
    return {
        "complete": True,
        "settings": settings,
        "arguments": {"num_resamples": 50},
        "versions": {"device": "a test"},
        "drafters": {},
        "seconds": 1.0,
        **results.summarise_records(records, num_resamples=50),
    }


def made_up_training(name, **changes):
    log = [
        {"step": step, "loss": 5 / step, "loss_base": 5 / step, "accepted_length_base": 1 + step / 10}
        for step in range(1, 9)
    ]
    return {
        "name": name,
        "log": log,
        "steps": 8,
        "drafter_parameters": 20_000_000,
        "drafter": {"transfer_rank": 8} | changes,
        "arguments": {"loss": {"decay_gamma": 7}},
        "evaluation": {"eval_greedy_accepted_length": 2.0 + len(changes), "eval_greedy_runtime": 1.0},
    }


needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")


@needs_matplotlib
def test_report_page_is_whole(tmp_path):
    for name, served in (("here", False), ("served", True)):
        (tmp_path / name).mkdir()
        results.write_json(tmp_path / name / "summary.json", made_up_summary(served))
    for name, changes in (("full", {}), ("narrow", {"transfer_rank": 4})):
        results.write_json(tmp_path / f"{name}.json", made_up_training(name, **changes))
    command = load_example("report")
    arguments = [str(tmp_path / "here"), f"server={tmp_path / 'served'}", "--out", str(tmp_path / "page")]
    assert command.main([*arguments, "--training", str(tmp_path / "full.json"), str(tmp_path / "narrow.json")]) == 0
    page = (tmp_path / "page" / "report.html").read_text()
    assert "<strong>Use dspine.</strong>" in page and page.count("<svg") == 5
    assert not re.search(r'(src|href)="(?!#)', page), "the page must not load anything"
    assert "transfer_rank = 4" in page and "MATH-500" in page
    # every reference inside the drawings points at something in the page
    ids = set(re.findall(r'id="([^"]+)"', page))
    assert set(re.findall(r'(?:xlink:href="|url\()#([^")]+)', page)) <= ids
    text = (tmp_path / "page" / "report.md").read_text()
    for figure in re.findall(r"\((figures/[^)]+)\)", text):
        assert (tmp_path / "page" / figure).is_file()
    for line in re.findall(r"(?m)^\|.*\|$", text):
        assert line.count("|") > 2


def test_conclusion_follows_the_numbers():
    words = " ".join(report.conclusion(report.Run("x", made_up_summary())))
    assert "Use dspine" in words and "more than dflash" in words and "token for token" in words
    words = " ".join(report.conclusion(report.Run("x", made_up_summary(gain=-1))))
    assert "Use dflash" in words
    words = " ".join(report.conclusion(report.Run("x", made_up_summary(gain=0))))
    assert "cannot tell apart" in words
    summary = made_up_summary()
    for cell in summary["cells"]:
        cell["speed_up"] = {"target": 0.8}
        if cell["kind"] == "drafter":
            cell["exactness"] = {"compared": 5, "equal": 3, "faults": 2, "largest_gap": 3.0}
    words = " ".join(report.conclusion(report.Run("x", summary)))
    assert "No drafter pays" in words and "slower than" in words and "**Careful:** 8 of 20" in words


@needs_matplotlib
def test_times_of_a_crowded_run_are_left_out():
    """Lengths from the run whose processes shared devices, speed from the one that had the device for itself."""
    crowded, alone = made_up_summary(), made_up_summary()
    crowded["versions"] |= {"processes": 8, "devices": 2}
    for cell in crowded["cells"]:
        cell["speed_up"] = {"target": 0.1}
    blocks = report.build([report.Run("lengths", crowded), report.Run("speed", alone)])
    words = " ".join(block.text for block in blocks if block.kind == "lead")
    assert "Use dspine" in words and "times as fast as the target alone" in words and "No drafter pays" not in words
    titles = [block.text for block in blocks if block.kind == "h2" and block.text.startswith("Speed")]
    assert titles == ["Speed on a test (speed)"]
    assert any("Several processes shared each device" in block.text for block in blocks)
    words = " ".join(report.conclusion(report.Run("lengths", crowded)))
    assert "Use dspine" in words and "as fast as" not in words


def test_report_says_what_is_missing(tmp_path, capsys):
    command = load_example("report")
    assert command.main([str(tmp_path), "--out", str(tmp_path / "page")]) == 2
    assert "no summary.json" in capsys.readouterr().err
    (tmp_path / "summary.json").write_text("{}")
    assert command.main([str(tmp_path), "--out", str(tmp_path / "page")]) == 2
    assert "has no cells" in capsys.readouterr().err
