"""The benchmark's results: crash-safe records, the summary, and the report's page."""

import importlib.util
import re

import pytest
from conftest import load_example
from tiny_checkpoints import save_pair

from dspine.integrations.evaluation import prompts, report, results


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
