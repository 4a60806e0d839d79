"""The measurements of a served drafter: their statistics, their arithmetic, and runs against a stand-in for the server."""

import gzip
import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from sglang_testing import example, trace_of_rounds


check = example("check_sglang")
chi_square = example("sglang_checks.chi_square")
distribution = example("sglang_checks.distribution")
hugging_face = example("sglang_checks.hugging_face")
lengths = example("sglang_checks.lengths")
profile = example("sglang_checks.profile")
rounds = example("sglang_checks.rounds")


@pytest.fixture
def bench(tmp_path):
    folder = tmp_path / "bench"
    folder.mkdir()
    for name in ("one", "two"):
        lines = [json.dumps({"turns": [f"{name} {i} " + "x" * i, "unused"]}) for i in range(40)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


# ---- statistics -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statistic", "freedom", "tail"),
    # tables of the chi-square distribution
    [(3.841459, 1, 0.05), (18.307038, 10, 0.05), (23.209251, 10, 0.01), (124.342113, 100, 0.05), (2.0, 2, 0.36787944)],
)
def test_chi_square_tail(chi_square, statistic, freedom, tail):
    assert chi_square.chi_square_tail(statistic, freedom) == pytest.approx(tail, rel=1e-5)
    assert chi_square.chi_square_tail(0, freedom) == 1.0
    assert chi_square.chi_square_tail(1e4, freedom) < 1e-100


def draw(weights, count, seed):
    return Counter(random.Random(seed).choices(range(len(weights)), weights, k=count))


def test_two_sample_test_is_calibrated_and_has_power(chi_square):
    weights = [0.3, 0.2, 0.1, *[0.4 / 400] * 400]
    values = [
        chi_square.two_sample_test(draw(weights, 2000, 2 * i), draw(weights, 2000, 2 * i + 1))["p"] for i in range(200)
    ]
    assert 0.02 < sum(p < 0.1 for p in values) / 200 < 0.2
    other = [0.22, 0.28, 0.1, *[0.4 / 400] * 400]
    result = chi_square.two_sample_test(draw(weights, 20000, 1), draw(other, 20000, 2))
    assert result["p"] < 1e-6 and result["samples"] == [20000, 20000] and result["in_rare_cells"] >= 0
    assert chi_square.two_sample_test(Counter({1: 50}), Counter({1: 70}))["p"] == 1.0
    assert chi_square.two_sample_test(Counter({1: 500}), Counter({2: 500}))["p"] < 1e-100


def test_lengths(lengths):
    texts = [{"tokens": 11, "rounds": 5}, {"tokens": 7, "rounds": 2}, {"tokens": 1, "rounds": 0}]
    assert lengths.lengths_of(texts) == {"accepted_length": 16 / 7, "accepted_length_per_request": 2.5, "requests": 2}
    assert lengths.lengths_of(texts[2:]) == {}
    summary = lengths.summary_of({"a": texts[:1], "b": texts[1:]})
    assert summary["mean_of_sets"]["accepted_length"] == 2.5 and summary["all"]["accepted_length"] == 16 / 7


@pytest.mark.parametrize(
    ("a", "b", "at"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [4], 0)]
)
def test_first_difference(hugging_face, a, b, at):
    assert hugging_face.first_difference(a, b) == at


# ---- runs -----------------------------------------------------------------------------------------------------------------


def test_parity(check, hugging_face, sglang_servers, character_tokenizer, bench, tmp_path):
    plain, same, other = sglang_servers(rounds=None), sglang_servers(), sglang_servers(wrong_after=30)
    out = tmp_path / "parity.json"
    urls = [f"plain={plain.url}", f"dspine={same.url}", f"other={other.url}", "gone=http://127.0.0.1:1"]
    arguments = ["parity", "--server", *urls, "--target", "t", "--bench-dir", str(bench), "--output", str(out)]
    check.main([*arguments, "--max-new-tokens", "9", "--max-prompt-tokens", "30"])
    result = json.loads(out.read_text())
    assert list(result["failed"]) == ["gone"], result["failed"]
    assert {name: len(part) for name, part in result["prompts"].items()} == {"one": 20, "two": 20}
    assert result["figures"]["dspine"]["against_first"] == {"texts": 40, "differ": 0}
    assert result["figures"]["other"]["against_first"] == {"texts": 40, "differ": 10}
    assert result["figures"]["dspine"]["all"]["accepted_length"] == 2.0
    assert "all" not in result["figures"]["plain"] or not result["figures"]["plain"]["all"]
    assert list(result["failed"]) == ["gone"] and plain.most <= 32

    # the gap at the first difference, with a target whose logits are its token ids
    target = lambda ids: SimpleNamespace(logits=torch.arange(100.0).expand(*ids.shape, 100))  # noqa: E731
    gaps = hugging_face.gaps_between(target, result["prompts"], result["texts"]["plain"], result["texts"], "cpu")
    assert gaps["dspine"] == gaps["plain"] and gaps["plain"]["equal"] == 40 and gaps["plain"]["differ"] == 0
    assert gaps["other"]["beyond_0.5"] == 10 and gaps["other"]["largest_gap"] == 1.0
    shorter = {"other": {name: [one | {"ids": one["ids"][:3]} for one in part] for name, part in result["texts"]["plain"].items()}}  # fmt: skip
    assert hugging_face.gaps_between(target, result["prompts"], result["texts"]["plain"], shorter, "cpu")["other"]["one_ended"] == 40  # fmt: skip


def test_hugging_face_side(check, lengths, tmp_path, monkeypatch):
    """Texts and lengths of a tiny target and drafter, as if they had been served, come back with ratio one."""
    tiny_models = pytest.importorskip("tiny_models", exc_type=ImportError)
    transformers = pytest.importorskip("transformers")
    from dspine.integrations.evaluation.decoding import decode_with_drafter
    from dspine.integrations.evaluation.prompts import Prompt
    from dspine.modeling_dspine import DSpineModel

    target = tiny_models.tiny_target()
    drafter = tiny_models.tiny_drafter(target)
    prompts = {"one": [[5, 6, 7], [8, 9]], "two": [[11, 12]]}
    texts = {}
    for name, ids in prompts.items():
        decoded = decode_with_drafter(target, drafter, [Prompt(name, i, one) for i, one in enumerate(ids)], 12)
        texts[name] = [
            {"ids": one.output_ids, "tokens": sum(one.accepted_lengths) + 1, "rounds": len(one.accepted_lengths)}
            for one in decoded
        ]
    stored = {"servers": {"plain": "", "dspine": ""}, "prompts": prompts, "max_new_tokens": 12}
    stored |= {"texts": {"plain": texts, "dspine": texts}, "figures": {"dspine": lengths.summary_of(texts)}}
    (tmp_path / "parity.json").write_text(json.dumps(stored))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda folder, dtype: target)
    monkeypatch.setattr(DSpineModel, "from_pretrained", lambda folder, dtype: drafter)
    out = tmp_path / "hf.json"
    arguments = ["hf", "--parity", str(tmp_path / "parity.json"), "--target", "t", "--drafter", "dspine=d"]
    check.main([*arguments, "--dtype", "float32", "--device", "cpu", "--output", str(out)])
    result = json.loads(out.read_text())
    assert result["ties"]["dspine"]["equal"] == 3
    ratios = result["drafters"]["dspine"]["served_over_hf"]
    assert {round(value, 9) for part in ratios.values() for value in part.values()} == {1.0}

    # the walk over these texts finds the same rounds, and one round too many is seen
    arguments = ["walk", "--parity", str(tmp_path / "parity.json"), "--target", "t", "--dtype", "float32"]
    arguments += ["--device", "cpu", "--output", str(out)]
    walked = check.main([*arguments, "--drafter", "dspine=d"])["drafters"]["dspine"]
    assert walked["equal_rounds"] == 1.0 and walked["more_rounds_served"] == {"0": 3}
    assert set(walked["served_over_walked"].values()) == {1.0} and set(walked["sets"]) == {"one", "two"}
    with pytest.raises(ValueError, match="named like a server"):
        check.main([*arguments, "--drafter", "other=d"])
    texts["two"][0]["rounds"] += 1
    (tmp_path / "parity.json").write_text(json.dumps(stored))
    walked = check.main([*arguments, "--drafter", "dspine=d", "--keep-rounds"])["drafters"]["dspine"]
    assert walked["more_rounds_served"] == {"0": 2, "1": 1} and walked["served_over_walked"]["accepted_length"] < 1
    assert [sum(rounds) for rounds in walked["rounds"]["one"]] == [one["tokens"] - 1 for one in texts["one"]]


def test_distribution(check, sglang_servers, character_tokenizer, tmp_path):
    one, other, wrong = sglang_servers(), sglang_servers(), sglang_servers(wrong_after=-1)
    out = tmp_path / "d.json"
    urls = [f"a={one.url}", f"b={other.url}", f"c={wrong.url}"]
    arguments = ["distribution", "--server", *urls, "--target", "t", "--output", str(out), "--samples", "600"]
    result = check.main([*arguments, "--tokens", "2", "--settings", "1", "0.7/0.9"])
    assert result["samples"] == {"a": 600, "b": 600, "c": 600} and result["passed"] and "samples_again" not in result
    found = result["against_first"]["b"]
    assert found["cells"] == 16 and found["passed"] and not found["suspected"] and found["smallest_p"] * 16 >= 0.01
    assert set(found["settings"]) == {"temperature=1, top_p=1", "temperature=0.7, top_p=0.9"}
    part = found["settings"]["temperature=1, top_p=1"][0]
    assert part["tests"][1]["samples"] == [600, 600] and part["distinct"] == [16, 16]
    assert part["greedy_equal"] and part["greedy_rows_differ"] == 0
    # as far beyond chance as chance goes
    assert abs(part["tests"][1]["distance"]) < 5 * part["tests"][1]["distance_error"] < 0.1
    greedy = result["against_first"]["c"]["settings"]["temperature=1, top_p=1"][0]
    assert not greedy["greedy_equal"]
    rows = one.asked[0]["sampling_params"]
    assert len(rows) == 8 * 2 * 4 + 4 and [row["temperature"] for row in rows[-5:]] == [0.7, 0, 0, 0, 0]
    with gzip.open(tmp_path / "d-samples.json.gz", "rt") as file:
        stored = json.load(file)
    assert (
        len(stored["cases"]) == 8 and stored["cases"][-1]["temperature"] == 0.7 and stored["cases"][-1]["top_p"] == 0.9
    )
    assert [sum(row[-1] for row in case) for case in stored["samples"]["b"]] == [600] * 8
    with pytest.raises(ValueError, match="must leave time"):
        check.main([*arguments, "--time-limit", "0"])


def test_what_is_suspected_is_sampled_afresh(
    check, distribution, sglang_servers, character_tokenizer, tmp_path, monkeypatch
):
    one, skewed, chance = sglang_servers(), sglang_servers(skew=0.5), sglang_servers()
    urls = [f"a={one.url}", f"b={skewed.url}", f"c={chance.url}"]
    arguments = ["distribution", "--server", *urls, "--target", "t", "--output", str(tmp_path / "d.json")]
    arguments += [
        "--tokens",
        "2",
        "--settings",
        "1",
        "0.7",
        "--samples",
        "300",
        "--num-prompts",
        "1",
        "--time-limit",
        "60",
    ]
    compare, times = distribution.compare_samples, []

    def unlucky(one, other, depth):
        """The third server's first sample is a bad one by chance: at its second setting, with two tokens."""
        tests = compare(one, other, depth)
        times.append(depth)
        if len(times) == 4:
            tests[1]["p"] = 1e-9
        return tests

    monkeypatch.setattr(distribution, "compare_samples", unlucky)
    result = check.main(arguments)
    assert not result["passed"] and result["samples_again"].keys() == {"a", "b", "c"}
    assert result["samples_again"]["b"] == 1200
    b, c = (result["against_first"][name] for name in "bc")
    assert not b["passed"] and set(b["suspected_again"]) <= set(b["suspected"]) and len(b["suspected"]) == 4
    text = "temperature=0.7, top_p=1, Once upon a time, in a small village, there lived a, 2 tokens"
    assert c["suspected"] == [text]
    # p is below 0.01 once in a hundred times; sampling is not seeded, since tasks interleave
    assert c["passed"] == (c["suspected_again"] == []) == (c["tests_again"][text]["p"] >= 0.01)
    assert list(c["tests_again"]) == c["suspected"] and c["tests_again"][c["suspected"][0]]["samples"] == [1200, 1200]
    assert (tmp_path / "d-again-samples.json.gz").exists()


def test_samples_against_the_targets_own_probabilities(check, tmp_path, monkeypatch):
    """Texts drawn from a tiny target at two settings pass; those of a server that draws one token in twenty anew do not."""
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    target = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2)).eval()
    target.lm_head.weight.data *= 60
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: target)
    prompt, count = [5, 6, 7], 6000

    def draw_texts(temperature, top_p, wrong):
        ids = torch.tensor([prompt] * count)
        for _ in range(2):
            with torch.no_grad():
                probs = torch.softmax(target(ids).logits[:, -1] / temperature, -1)
            ordered, order = probs.sort(descending=True)
            ordered = torch.where(ordered.cumsum(-1) - ordered > top_p, 0.0, ordered)
            token = order.gather(1, torch.multinomial(ordered, 1))
            token = torch.where(torch.rand(count, 1) < wrong, torch.randint(0, 30, (count, 1)), token)
            ids = torch.cat([ids, token], 1)
        return [[*text, number] for text, number in Counter(map(tuple, ids[:, 3:].tolist())).items()]

    settings = [(1.0, 1.0), (0.7, 0.9)]
    cases = [
        {"setting": f"{t}/{p}", "begun": "x", "prompt": prompt, "temperature": t, "top_p": p} for t, p in settings
    ]
    samples = {name: [draw_texts(t, p, wrong) for t, p in settings] for name, wrong in (("good", 0.0), ("bad", 0.05))}
    with gzip.open(tmp_path / "d-samples.json.gz", "wt") as file:
        json.dump({"cases": cases, "samples": samples}, file)
    arguments = ["exact", "--samples", str(tmp_path / "d-samples.json.gz"), "--target", "t", "--device", "cpu"]
    result = check.main([*arguments, "--output", str(tmp_path / "e.json"), "--batch-size", "3"])["servers"]
    for setting in ("1.0/1.0", "0.7/0.9"):
        good = result["good"][setting]
        assert good["p"] > 1e-3 and good["outside_top_p"] == 0 and good["beginnings"] > 3
        assert abs(good["distance"]) < 4 * good["distance_error"]
        parts = [result["good"][f"{setting}, token {i}"] for i in (1, 2)]
        assert parts[0]["samples"] <= count and sum(part["chi_square"] for part in parts) == pytest.approx(
            good["chi_square"]
        )
    bad = result["bad"]["1.0/1.0"]
    assert bad["p"] < 1e-9 and bad["distance"] > 10 * bad["distance_error"]
    # what it draws wrongly there is mostly outside of top-p, and the rest as it should be
    assert result["bad"]["0.7/0.9"]["outside_top_p"] > 100


def test_another_distribution_is_found(distribution):
    """Samples of two tokens, the second of which depends on the first in one of the two samples only."""
    order = random.Random(0)
    one = Counter((a, order.randrange(4)) for a in (order.randrange(4) for _ in range(20000)))
    other = Counter((a, a if order.random() < 0.05 else order.randrange(4)) for a in (order.randrange(4) for _ in range(20000)))  # fmt: skip
    first, both = distribution.compare_samples(one, other, 2)
    assert first["p"] > 1e-4 and both["p"] < 1e-6


def test_rounds(check, sglang_servers, tmp_path):
    fast, slow, plain = sglang_servers(delay=0.02), sglang_servers(delay=0.04), sglang_servers(delay=0.02, rounds=None)
    out = tmp_path / "rounds.json"
    urls = [f"dspine={slow.url}", f"dflash={fast.url}", f"plain={plain.url}"]
    arguments = ["rounds", "--server", *urls, "--output", str(out), "--concurrency", "1", "4", "--new-tokens", "21"]
    result = check.main([*arguments, "--repeats", "2", "1", "--prompt-tokens", "5", "--vocabulary", "900"])
    for concurrency in (1, 4):
        figures = result["concurrency"][concurrency]
        assert set(figures["dspine"]) >= {"over_dflash", "over_plain", "over_dflash_range", "range"}
        assert [figures[name]["windows"] for name in ("dspine", "dflash", "plain")] == [6, 4, 2]
        assert figures["plain"]["accepted_length"] == 1.0 and figures["dflash"]["accepted_length"] == 2.0
    assert fast.most == 4


def test_a_step_is_what_a_request_takes_beyond_its_first_token(rounds):
    empty, whole = {"seconds": 0.5, "tokens": 4, "rounds": 0}, {"seconds": 2.5, "tokens": 84, "rounds": 40}
    assert rounds.step_of(whole, empty, 4) == {"seconds_per_step": 0.2, "accepted_length": 2.0}
    assert rounds.step_of(whole | {"rounds": 0}, empty, 4) == {"seconds_per_step": 0.1, "accepted_length": 1.0}


def test_breakdown(profile):
    result = profile.breakdown(trace_of_rounds())
    assert result["microseconds"] == {"round": 190.0, "draft": 50.0, "tail": 15.0, "verify": 100.0, "rest": 25.0}
    assert result["running"] == {"round": 171.0, "draft": 50.0, "tail": 15.0, "verify": 100.0, "rest": 6.0}
    assert result["kernels"] == {"round": 131, "draft": 25, "tail": 5, "verify": 100, "rest": 1}
    assert result["rounds"] == 3 and result["tail_kernels"] == {f"tail_{i}": 3.0 for i in range(5)}
    assert result["verify_kernels"] == {"target": 100.0} and result["host"] == {}
    with pytest.raises(ValueError, match="several rounds"):
        profile.breakdown([])
    with pytest.raises(ValueError, match="in turn"):
        profile.breakdown([event for event in trace_of_rounds() if event["name"] == "target"])


def test_kernels_that_overlap_count_once(profile):
    events = [{"ts": ts, "dur": dur} for ts, dur in ((10, 5), (0, 4), (2, 1), (3, 3))]
    assert profile.merged(events) == 11.0 and profile.merged([]) == 0.0


def test_profile_keeps_the_server_busy_until_the_trace_is_there(check, sglang_servers, tmp_path):
    """A stand-in that records only while it answers, as SGLang does; one answer takes less time than `--after`."""
    busy, silent = sglang_servers(delay=0.01, trace=trace_of_rounds()), sglang_servers(delay=0.01)
    out = tmp_path / "profile.json"
    arguments = ["profile", "--server", f"dspine={busy.url}", f"other={silent.url}", "--output", str(out)]
    arguments += ["--concurrency", "1", "3", "--prompt-tokens", "5", "--vocabulary", "900", "--new-tokens", "9"]
    result = check.main([*arguments, "--after", "0.1", "--steps", "4", "--patience", "0.5", "--repeats", "1"])
    for concurrency in (1, 3):
        (found,), (failed,) = (result["concurrency"][concurrency][name] for name in ("dspine", "other"))
        assert found["rounds"] == 3 and found["microseconds"]["draft"] == 50.0
        assert found["rest_kernels"] == {"commit": 6.0} and "no trace was written" in failed["error"]
    assert busy.most == silent.most == 3 and result["ratios"][3] == {"dspine over other": {}}
    assert json.loads(out.read_text())["concurrency"]["3"] == result["concurrency"][3]


def test_ratios_of_two_servers(profile):
    found = profile.breakdown(trace_of_rounds())
    slow = {kind: {name: 1.5 * value for name, value in found[kind].items()} for kind in ("running", "verify_kernels")}
    both = profile.ratios([slow, {"error": "x"}, slow], [found])
    assert both == {"running": dict.fromkeys(found["running"], 1.5), "verify_kernels": {"target": 1.5}}
    assert profile.ratios([{"error": "x"}], [found]) == {}


def test_host_side(profile):
    """Launches a fixed time before the GPU starts, and a wait after every launch of a verification graph."""
    events = trace_of_rounds()
    starts = {}
    for event in events:
        if event["cat"] == "kernel":
            correlation = event["args"]["correlation"]
            starts[correlation] = min(starts.get(correlation, 1e9), event["ts"])
    for i, (correlation, start) in enumerate(sorted(starts.items())):  # draft graph, verification graph, commit
        name, ahead = [("cudaGraphLaunch", 40.0), ("cudaGraphLaunch", 30.0), ("cudaLaunchKernel", 5.0)][i % 3]
        call = {"cat": "cuda_runtime", "name": name, "dur": 5.0, "args": {"correlation": correlation}}
        events.append(call | {"ts": start - ahead})
        if i % 3 == 1:
            events.append(call | {"name": "cudaEventSynchronize", "ts": start - 20, "dur": 10.0, "args": {}})
            events += [{"cat": "cpu_op", "name": "aten::add", "ts": start - i, "dur": 1.0} for i in (1, 2)]
    assert profile.breakdown(events)["host"] == {
        "round": 190.0, "waits": 10.0, "in_calls": 25.0, "operations": 2, "calls": 4, "calls cudaGraphLaunch": 2, "calls cudaEventSynchronize": 1,
        "calls cudaLaunchKernel": 1, "draft_ahead": 40.0, "verify_ahead": 30.0,
    }  # fmt: skip


# ---- command line ---------------------------------------------------------------------------------------------------------


def test_command_line(check, tmp_path):
    arguments = ["distribution", "--target", "t", "--output", "o", "--server", "a=http://x:1"]  # one is too few
    with pytest.raises(SystemExit):
        check.parse_arguments(arguments)
    assert check.parse_arguments([*arguments, "b=http://x:2", "--settings", "0.7/0.9", "1"]).settings == [
        (0.7, 0.9), (1.0, 1.0),
    ]  # fmt: skip
    with pytest.raises(SystemExit):
        check.parse_arguments(["rounds", "--output", "o", "--server", "http://x:1"])
