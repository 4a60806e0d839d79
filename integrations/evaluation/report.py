"""Results into a page that reads by itself.

A report is a list of blocks (headings, paragraphs, tables, figures, folded details) that two short renderers write out. Every number
comes from `summary.json` of a benchmark run or `metrics.json` of a training run; nothing is computed from anything else. This file
decides what stands on the page; its parts are made in `report_words.py`, `report_figures.py` and `report_tables.py`.
"""

import json

from .report_data import FEWEST_ROUNDS, Run, load_run, load_training
from .report_figures import colours_of, figure_concurrency, figure_sets, figure_slots, figure_speed, figure_training
from .report_render import Block, to_html, to_markdown, write
from .report_tables import table_gains, table_lengths, table_speed, table_training
from .report_words import conclusion, load_sentence, weakest


def build(runs: list[Run], trainings: list[dict] | None = None, title: str | None = None) -> list[Block]:
    """All blocks of a report.

    Args:
        runs: the first one with drafters carries the conclusion and the comparison by set and slot; all give their speeds.
        trainings: `metrics.json` contents; the first one is what the others are compared with.
    """
    trainings = trainings or []
    # the best drafter comes first, wherever drafters are listed
    methods = [cell["method"] for run in runs for cell in run.ranked()]
    methods += [report["name"] for report in trainings]
    colours = colours_of(methods)
    blocks = []
    main = next((run for run in runs if run.drafters() and not run.is_served), None) or next(
        (run for run in runs if run.drafters()), None
    )
    target = (main or runs[0]).summary["settings"].get("target", "the target") if runs else "the target"
    blocks.append(Block("h1", title or f"Drafters for {target}"))
    if main is not None:
        if not main.summary.get("complete", True):
            blocks.append(Block("lead", "**This run is not finished**; the numbers cover what was decoded so far."))
        timed = next((run for run in runs if run.drafters() and not run.is_served and not run.is_crowded), None)
        blocks += [Block("lead", sentence) for sentence in conclusion(main, timed)]
        blocks += explanation(main)
        blocks += accepted_lengths(main, colours)
    for run in runs:
        if not run.is_crowded:
            blocks += speeds(run, colours, len(runs) > 1)
    if trainings:
        blocks += training(trainings, colours)
    blocks += limits(runs)
    return blocks


def explanation(run: Run) -> list[Block]:
    settings, arguments = run.summary["settings"], run.summary.get("arguments", {})
    counts = sorted({part["requests"] for cell in run.drafters() for part in cell["sets"].values()})
    each = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}" if counts else "no"
    thinking = {"off": "thinking off", "on": "thinking on"}.get(
        settings.get("thinking"), "the template's own thinking mode"
    )
    device = run.summary["versions"].get("device", "an unnamed machine")
    batch = settings.get("batch_size")
    crowded = (
        " Several processes shared each device here, which changes neither texts nor accepted lengths but all times, so this run's are "
        "left out."
        if run.is_crowded
        else ""
    )
    return [
        Block("h2", "What was measured"),
        Block(
            "p",
            "A large model, the *target*, normally writes one token per pass. In *speculative decoding* a small *drafter* proposes a block of "
            "tokens, and the target checks the whole block in one pass: it keeps the proposals up to the first one it would not have written, "
            "and adds one token of its own. The text stays the target's; only the number of passes shrinks. **Accepted length** is the "
            "number of tokens kept per pass, the target's own token included: 1 means that drafting was useless, the block size is the most. "
            "**Speed-up** is measured by the clock, since drafting and checking cost time too.",
        ),
        Block(
            "p",
            f"Target: {settings.get('target')}, {settings.get('dtype', 'the server dtype')}, on {device}"
            + (f", {batch} prompt{'s' if batch != 1 else ''} at a time" if batch else "")
            + f". {each} prompts of each set, first turn only, the target's chat template with {thinking}, at most "
            f"{settings.get('max_new_tokens')} new tokens. Temperature 0 is greedy; at temperature 1 the target samples, and drafts are accepted "
            "by rejection sampling, which keeps its distribution. Intervals are 95 % bootstrap intervals over prompts "
            f"({arguments.get('num_resamples', 1000):,} resamples): another choice of prompts would mostly have landed inside."
            + crowded,
        ),
    ]


def accepted_lengths(run: Run, colours) -> list[Block]:
    size = run.main_block_size
    blocks = [
        Block("h2", "Accepted length on every benchmark"),
        Block(
            "figure",
            f"Tokens committed per pass with blocks of {size}: dots are sets, diamonds the mean over sets, whiskers 95 % intervals. Higher is better.",
            name="accepted_length",
            svg=figure_sets(run, colours),
        ),
    ]
    for temperature in run.temperatures:
        if run.drafters(temperature):
            blocks.append(Block("p", f"Temperature {temperature:g}, tokens committed per pass:"))
            blocks.append(Block("table", rows=table_lengths(run, temperature)))
    gains = table_gains(run)
    if len(gains) > 1:
        blocks.append(
            Block(
                "p",
                "The best drafter against every other, on the same prompts (intervals from resampling prompts in pairs):",
            )
        )
        blocks.append(Block("table", rows=gains))
    slots = figure_slots(run, colours)
    if slots:
        blocks += [
            Block("h2", "Where in the block drafts fail"),
            Block(
                "figure",
                "Share of drafts accepted at each slot, among the passes that accepted everything before it. A line that stays up to the right "
                f"means that late slots know what the earlier ones say. Slots reached in fewer than {FEWEST_ROUNDS} passes are left out.",
                name="slots",
                svg=slots,
            ),
        ]
        words = [text for text in (weakest(run, temperature) for temperature in run.temperatures) if text]
        if words:
            blocks.append(Block("p", " ".join(words)))
    return blocks


def speeds(run: Run, colours, is_one_of_several: bool) -> list[Block]:
    device = run.summary["versions"].get("device", "")
    served = run.is_served
    title = "Speed in the server" if served else f"Speed on {device}" if device else "Speed"
    blocks = [Block("h2", title + (f" ({run.name})" if is_one_of_several else ""))]
    if served:
        figure = figure_concurrency(run, colours)
        caption = (
            "Tokens per second of all requests together against the number of requests at a time. Higher is better."
        )
        blocks.append(Block("figure", caption, name=f"concurrency_{run.name}", svg=figure))
        if sentence := load_sentence(run):
            blocks.append(Block("p", sentence))
    else:
        caption = "Tokens per second, prefill included, all methods in the same process on the same prompts. Longer is better."
        blocks.append(Block("figure", caption, name=f"speed_{run.name}", svg=figure_speed(run, colours)))
    blocks.append(Block("table", rows=table_speed(run)))
    if any(cell["kind"] == "prompt_lookup" for cell in run.cells):
        blocks.append(
            Block(
                "p",
                "Prompt lookup is Transformers' own drafting without a model: it proposes what followed the last words earlier in the text. "
                "Its first pass includes the prefill.",
            )
        )
    return blocks


def training(trainings: list[dict], colours) -> list[Block]:
    blocks = [
        Block("h2", "Training" if len(trainings) == 1 else "Training and ablations"),
        Block(
            "figure",
            "Left: cross-entropy of the slots' own predictions. Right: tokens per pass estimated on training batches, each block on its own; "
            "the numbers above are real decoding.",
            name="training",
            svg=figure_training(trainings, colours),
        ),
        Block("table", rows=table_training(trainings)),
        Block(
            "p", "Accepted length here is walked on stored answers of the target, as decoding would go through them."
        ),
    ]
    return blocks


def limits(runs: list[Run]) -> list[Block]:
    blocks = [
        Block("h2", "What these numbers do not say"),
        Block(
            "p",
            "They hold for this target, its chat template and these kinds of prompts; other prompts, thinking modes and languages can halve an "
            "accepted length. Speeds hold for this machine and software. Accepted lengths from papers that count accepted drafts without the "
            "target's own token are one lower by definition, and drafters trained on more data are not comparable with these.",
        ),
    ]
    for run in runs:
        shown_parts = {k: run.summary.get(k) for k in ("settings", "arguments", "versions", "drafters", "seconds")}
        blocks.append(
            Block("details", json.dumps(shown_parts, indent=1, default=str), name=f"Configuration of {run.name}")
        )
    return blocks


__all__ = ["Block", "Run", "build", "conclusion", "load_run", "load_training", "to_html", "to_markdown", "write"]
