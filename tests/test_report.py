"""The report's page: what stands on it, that its words follow the numbers, and that partial results do not break it."""

import importlib.util
import json
import re

import pytest
from conftest import load_example
from test_benchmark_results import record

from dspine.integrations.evaluation import prompts, report, results


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
                            part |= {"wall_seconds": 20 / load**0.7 + (chance is None), "wall_tokens": 3000}
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
    changes = {"recipe": {}, "r = 4": {"transfer_rank": 4}}
    rows = {name: made_up_training(name, **part) | {"what": name} for name, part in changes.items()}
    results.write_json(tmp_path / "ablations.json", {"rows": rows})
    arguments = [str(tmp_path / "here"), f"server={tmp_path / 'served'}", "--out", str(tmp_path / "page")]
    arguments += ["--training", str(tmp_path / "full.json"), str(tmp_path / "narrow.json")]
    arguments += ["--ablations", str(tmp_path / "ablations.json")]
    arguments += ["--goal", "dflash=90", "--label", "dflash=plain DFlash"]
    assert command.main(arguments) == 0
    page = (tmp_path / "page" / "report.html").read_text()
    assert "<strong>Use DSpine.</strong>" in page and page.count("<svg") == 6
    assert (
        "The goal for DSpine, +90 % over plain DFlash, is not met" in page
        and "below the goal of +90 % on every set" in page
    )
    assert "#1b1c1e" not in page.partition("</style>")[2], "text of figures must take the page's colour"
    images = list((tmp_path / "page" / "figures").glob("*.png"))
    assert len(images) == 6 and all(path.stat().st_size <= 60_000 for path in images)
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
    assert "Use dspine" in words and " over dflash; in brackets" in words and "token for token" in words
    words = " ".join(report.conclusion(report.Run("x", made_up_summary(gain=-1))))
    assert "Use dflash" in words
    words = " ".join(report.conclusion(report.Run("x", made_up_summary(gain=0))))
    assert "Within what other prompts could have changed: the difference to" in words
    summary = made_up_summary()
    for cell in summary["cells"]:
        cell["speed_up"] = {"target": 0.8}
        if cell["kind"] == "drafter":
            cell["exactness"] = {"compared": 5, "equal": 3, "faults": 2, "largest_gap": 3.0}
    words = " ".join(report.conclusion(report.Run("x", summary)))
    assert "No drafter pays" in words and "**Careful:** 8 of 20 greedy answers (4 of dflash and 4 of dspine)" in words


@needs_matplotlib
def test_times_of_a_crowded_run_are_left_out():
    """Lengths from the run whose processes shared devices, speed from the one that had the device for itself."""
    crowded, alone = made_up_summary(), made_up_summary()
    crowded["versions"] |= {"processes": 8, "devices": 2}
    for cell in crowded["cells"]:
        cell["speed_up"] = {"target": 0.1}
    blocks = report.build([report.Run("lengths", crowded), report.Run("speed", alone)])
    words = " ".join(block.text for block in blocks if block.kind == "lead")
    assert "Use dspine" in words and "the fastest drafter" in words and "No drafter pays" not in words
    titles = [block.text for block in blocks if block.kind == "h2" and block.text.startswith("Speed")]
    assert titles == ["Speed on a test"]
    assert any("Several processes shared each device" in block.text for block in blocks)
    words = " ".join(report.conclusion(report.Run("lengths", crowded)))
    assert "Use dspine" in words and "the fastest drafter" not in words and "no usable measurement of speed" in words
    # speeds that are not there have no limits
    blocks = report.build([report.Run("lengths", crowded)])
    assert not any("Speeds hold" in block.text for block in blocks)


@needs_matplotlib
def test_run_of_another_dtype_or_a_server_adds_its_lengths():
    first, float32, timed = made_up_summary(), made_up_summary(gain=2), made_up_summary()
    float32["settings"]["dtype"] = "float32"
    runs = [report.Run(n, s) for n, s in (("b", first), ("f", float32), ("t", timed), ("s", made_up_summary(True)))]
    blocks = report.build(runs, ours="dspine")
    titles = [i for i, block in enumerate(blocks) if block.text.startswith("Accepted length in another run")]
    assert [blocks[i].text.rpartition(": ")[2] for i in titles] == ["f", "s"]
    words, _, lengths = blocks[titles[0] + 1 : titles[0] + 4]
    assert "all decode the same text" in words.text
    cell = next(c for c in float32["cells"] if c["method"] == "dspine" and c["temperature"] == 0)
    mean = cell["mean_of_sets"]["accepted_length"]
    assert next(row for row in lengths.rows if row[0] == "dspine")[2].startswith(f"{mean:.2f} (")
    gains = next(
        block for block in blocks[titles[0] :] if block.kind == "table" and "dspine against" in block.rows[0][0]
    )
    share = next(g for g in float32["gains"] if g["method"] == "dspine" and g["temperature"] == 0)["accepted_length"]
    assert gains.rows[1][1].startswith(f"+{share:.1%}".replace("%", " %"))


def test_words_on_losses_take_the_best_rival_of_every_temperature():
    summary = made_up_summary()
    others = [cell | {"method": "third"} for cell in summary["cells"] if cell["method"] == "dflash"]
    over_dflash = [part for part in summary["gains"] if part["method"] == "dspine"]
    # the third drafter is the nearer one at temperature 1 only
    shifts = {0.0: 0.1, 1.0: -0.1}
    closer = [
        part | {"over": "third", "accepted_length": part["accepted_length"] + shifts[part["temperature"]]}
        for part in over_dflash
    ]
    summary = summary | {"cells": summary["cells"] + others, "gains": summary["gains"] + closer}
    goal = report.Goal("dspine", ("dflash", "third"), 9.0)
    words = report.where_it_loses(report.Run("x", summary), "dspine", [goal])
    assert [sentence.partition(":**")[0] for sentence in words] == [
        "**dspine against dflash at temperature 0",
        "**dspine against third at temperature 1",
    ]
    assert "below the goal of +900 %" in words[0] and "goal" not in words[1]


def test_unequal_training_is_said():
    longer, shorter = made_up_training("dspine"), made_up_training("dflash")
    for part in (longer, shorter):
        part["arguments"]["training"] = {"tokens_per_batch": 1_000_000}
    run = report.Run("x", made_up_summary())
    assert "Not trained alike" not in " ".join(report.conclusion(run, trainings=[longer, shorter]))
    longer["steps"] *= 2
    words = " ".join(report.conclusion(run, trainings=[longer, shorter]))
    assert "**Not trained alike:** dspine saw 16 M tokens in training, the others 8 M" in words


@needs_matplotlib
def test_partial_results_are_reported_as_such():
    """A drafter without T=1, and one with fewer prompts: named as missing, and not compared by set on other prompts."""
    summary = made_up_summary()
    summary["cells"] = [c for c in summary["cells"] if (c["method"], c["temperature"]) != ("dflash", 1.0)]
    for cell in summary["cells"]:
        if cell["method"] == "dflash":
            cell["requests"] -= 4
    blocks = report.build([report.Run("x", summary)], goals=[report.Goal("dspine", ("dflash",), 0.9)], ours="dspine")
    words = " ".join(block.text for block in blocks)
    assert "dflash at temperature 1 with blocks of 8 (not measured)" in words
    assert "(80 of 84 prompts)" in words and "not compared by set and slot" in words
    assert not any("same by set, at temperature 0" in block.text for block in blocks)


def test_faster_drafter_leads_the_conclusion():
    """The longest accepted drafter is not the one to use where the server's clock says otherwise."""
    served = made_up_summary(served=True)
    for cell in served["cells"]:
        if cell["kind"] == "drafter":
            cell["tokens_per_second"] = 100.0 if cell["method"] == "dspine" else 130.0
            cell["speed_up"] = {"target": cell["tokens_per_second"] / 50}
    words = " ".join(report.conclusion(report.Run("x", made_up_summary()), report.Run("server", served)))
    assert "**Use dflash**" in words and "**dspine** drafts best" in words
    assert "1: dflash, blocks of 8 (2.60 times)" in words and "dspine is up to 30 % behind" in words


@needs_matplotlib
def test_training_says_what_was_equal():
    ours, peer = made_up_training("DSpine"), made_up_training("Domino")
    for part in (ours, peer):
        part["arguments"]["training"] = {"learning_rate": 1e-3, "tokens_per_batch": 1000}
    ours["arguments"]["data"] = {"data": ["somewhere/train.parquet"]}
    peer |= {"peer": {"kind": "domino", "rank": 8, "package": "specforge 0.2.0"}, "drafter_parameters": 30_000_000}
    blocks = report.build([], [ours, peer])
    words = " ".join(block.text for block in blocks)
    assert "Equal settings of all 2 runs: steps 8, tokens per step 1,000" in words and "learning rate 0.001" in words
    assert "Data files: train.parquet; those of Domino are not on record." in words
    (table,) = [block.rows for block in blocks if block.kind == "table"]
    assert "parameters" in table[0] and "model and loss of specforge 0.2.0" in table[2]
    assert json.dumps(table).count("30.0 M") == 1


@needs_matplotlib
def test_legend_of_long_names_stays_inside_the_figure():
    from matplotlib.figure import Figure

    from dspine.integrations.evaluation import report_figures

    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 2, squeeze=False)
    names = [f"drafter {i} (trained for {i},000 steps of another recipe)" for i in range(6)]
    for name in names:
        axes[0, 0].plot([0, 1], label=name)
    report_figures._legend(figure, axes)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == names
    assert legend.get_window_extent().width <= figure.bbox.width


def test_report_says_what_is_missing(tmp_path, capsys):
    command = load_example("report")
    assert command.main([str(tmp_path), "--out", str(tmp_path / "page")]) == 2
    assert "no summary.json" in capsys.readouterr().err
    (tmp_path / "summary.json").write_text("{}")
    assert command.main([str(tmp_path), "--out", str(tmp_path / "page")]) == 2
    assert "has no cells" in capsys.readouterr().err
