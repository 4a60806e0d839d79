"""Results into a page that reads by itself.

A report is a list of blocks (headings, paragraphs, tables, figures, folded details) that two short renderers write out. Every number
comes from `summary.json` of a benchmark run, `metrics.json` of a training run or `ablations.json`; nothing is computed from anything
else. This file decides what stands on the page; its parts are made in `report_words.py`, `report_figures.py` and `report_tables.py`.
"""

import json
import re

from .report_data import FEWEST_ROUNDS, Goal, Run, load_ablations, load_run, load_training
from .report_figures import (
    figure_ablations,
    figure_concurrency,
    figure_sets,
    figure_slots,
    figure_speed,
    figure_training,
    styles_of,
)
from .report_render import Block, to_html, to_markdown, write
from .report_tables import (
    equalised,
    evaluations,
    table_ablations,
    table_gains,
    table_lengths,
    table_loads,
    table_methods,
    table_set_gains,
    table_speed,
    table_training,
)
from .report_words import conclusion, gaps, where_it_loses


# words of `examples/ablations.py` that a reader may not know
RECIPE_WORDS = {
    "injection": "*injection* is reading the left neighbour in every layer",
    "refinement": "*refinement* is choosing each token with regard to the one chosen before it, among the *K* likeliest",
    "guidance": "*guidance* overstates in greedy drafts what the chosen neighbour changes",
    "supervision": "*supervision* teaches every layer, not only the last, where the right token lies",
    "space": "the *space* is a low-rank image of the target's output embeddings in which slots tell each other what they predict",
    "soft-token": "with *soft-token* features slots pass on the average token they predict",
    "gamma": "*gamma* says how slowly the weight of later slots falls in training",
    "D-PACE": "*D-PACE* weighs slots by how far the drafter gets",
    "KL": "*KL* teaches the target's whole distribution, *cross-entropy* the tokens of stored answers",
    "base": "the *base* cross-entropy is that of the slots before refinement",
}


def build(
    runs: list[Run],
    trainings: list[dict] | None = None,
    title: str | None = None,
    ours: str | None = None,
    goals: list[Goal] | None = None,
    ablations: dict | None = None,
) -> list[Block]:
    """All blocks of a report.

    Args:
        runs: the first one with drafters carries the conclusion and the comparison by set and slot; those of a server or
            another dtype add their accepted lengths and gains, and all give their speeds.
        trainings: `metrics.json` contents; the first one is what the others are compared with.
        ours: the drafter that tables compare with all others, as called on the page; the longest accepted one by default.
        goals: gains to reach; judged by the first run, at its lowest temperature.
        ablations: `ablations.json` contents.
    """
    trainings, goals, blocks = trainings or [], goals or [], []
    methods = [cell["method"] for run in runs for cell in [*run.ranked(), *run.cells]]
    styles = styles_of(methods + [report["name"] for report in trainings])
    drafting = sorted((run for run in runs if run.drafters()), key=lambda run: run.is_served)
    main = drafting[0] if drafting else None
    target = (main or runs[0]).summary["settings"].get("target", "the target") if runs else "the target"
    blocks.append(Block("h1", title or f"Which drafter for {target}?"))
    if main is not None:
        # a server's clock says most about use
        timed = next((run for run in reversed(drafting) if not run.is_crowded), None)
        blocks += [Block("lead", sentence) for sentence in conclusion(main, timed, goals, trainings)]
        if missing := gaps(main):
            blocks.append(Block("lead", missing))
        ours = ours if any(cell["method"] == ours for cell in main.drafters()) else main.ranked()[0]["method"]
        blocks += explanation(main, trainings) + accepted_lengths(main, styles, ours, goals)
        for run in drafting[1:]:
            # one that only took the time of the same decoding has nothing new to say about lengths
            if run.is_served or run.summary["settings"].get("dtype") != main.summary["settings"].get("dtype"):
                blocks += lengths_again(run, main, ours)
    for run in runs:
        if not run.is_crowded:
            blocks += speeds(run, styles, sum(not other.is_crowded for other in runs) > 1)
    if ablations and len(ablations["rows"]) > 1:
        blocks += changes(ablations)
    if trainings:
        blocks += training(trainings, styles)
    return blocks + limits(runs)


def explanation(run: Run, trainings: list[dict]) -> list[Block]:
    settings, arguments = run.summary["settings"], run.summary.get("arguments", {})
    counts = sorted({part["requests"] for cell in run.drafters() for part in cell["sets"].values()})
    each = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}" if counts else "no"
    thinking = {"off": "thinking off", "on": "thinking on"}
    batch, methods = settings.get("batch_size"), table_methods(run, trainings)
    sizes = ", ".join(f"{size - 1} of {size}" for size in run.block_sizes if size)
    crowded = (
        " Several processes shared each device here, which changes neither texts nor accepted lengths but all times, so this run's are "
        "left out."
        if run.is_crowded
        else ""
    )
    return [
        Block("h2", "How to read this page"),
        Block(
            "p",
            "A large model, the *target*, normally writes one token per pass. In *speculative decoding* a small *drafter* proposes a block of "
            "tokens, and the target checks the whole block in one pass: it keeps the proposals up to the first one it would not have written, "
            "and adds one token of its own. But for rounding the text stays the target's; only the number of passes shrinks. **Accepted length**, or "
            "tokens per pass, is the number of tokens kept per pass, the target's own token included: 1 means that drafting was useless, the block "
            f"size is the most possible. A **block** is one known token and the positions after it, its **slots**, that the drafter fills{f' ({sizes})' if sizes else ''}. "
            "**Speed** is another thing: drafting and checking cost time too.",
        ),
        # a server does not say what its drafter is
        *([Block("table", rows=methods)] if len(methods[0]) > 1 else []),
        Block(
            "p",
            f"**What was measured.** Target: {settings.get('target')}, {settings.get('dtype') or 'in the server dtype'}, on {run.device}"
            + (f", {batch} prompt{'s' if batch != 1 else ''} at a time" if batch else "")
            + f". {each} prompts of each set, first turn only, the target's chat template with "
            f"{thinking.get(settings.get('thinking'), 'its own thinking mode')}, at most {settings.get('max_new_tokens')} new tokens. Temperature "
            "0 is greedy: the target takes its likeliest token. At temperature 1 it samples, and drafts are accepted by rejection sampling, which "
            f"keeps its distribution. Intervals are 95 % bootstrap intervals over prompts ({arguments.get('num_resamples', 1000):,} resamples): "
            "another choice of prompts would mostly have landed inside." + crowded,
        ),
    ]


def accepted_lengths(run: Run, styles, ours: str, goals: list[Goal]) -> list[Block]:
    size = run.main_block_size
    blocks = [
        Block("h2", "Accepted length on every benchmark"),
        Block(
            "figure",
            f"Tokens per pass with blocks of {size}. Small markers are sets, large ones the mean of sets; whiskers are 95 % intervals. Higher is better. Every panel has "
            "a scale of its own; drafters stand in the order of their means.",
            name="accepted_length",
            drawing=figure_sets(run, styles),
        ),
    ]
    for temperature in run.temperatures:
        if run.drafters(temperature):
            blocks.append(
                Block(
                    "p",
                    f"Tokens per pass at temperature {temperature:g}; the best of each block size in bold. Sets are means over passes; “by answer” is "
                    "the mean over answers, which weighs short ones more:",
                )
            )
            blocks.append(Block("table", rows=table_lengths(run, temperature)))
    compared = table_gains(run, ours)
    if len(compared) > 1:
        blocks += [
            Block("h2", f"Where {ours} wins and loses"),
            Block(
                "p",
                "Gain in accepted length, the mean of sets, on the same prompts (95 % intervals from resampling prompts in pairs):",
            ),
            Block("table", rows=compared),
        ]
        for temperature in run.temperatures:
            if len(rows := table_set_gains(run, ours, temperature)) > 1 and len(rows[0]) > 1:
                words = f"The same by set, at temperature {temperature:g} with blocks of {size}; losses in bold. Some per cent of a single set are noise:"
                blocks += [Block("p", words), Block("table", rows=rows)]
        blocks += [Block("p", sentence) for sentence in where_it_loses(run, ours, goals)]
    slots = figure_slots(run, styles)
    if slots:
        blocks += [
            Block("h2", "Where in the block proposals fail"),
            Block(
                "figure",
                "Share of proposals accepted at each slot, among the passes that accepted everything before it; bands are 95 % intervals. Early slots "
                "count most, since every pass reaches them. The last slots are reached only where the text is easy, by a weak drafter only where "
                f"it is easiest, so there a high line is no merit. Slots reached in fewer than {FEWEST_ROUNDS} passes are left out.",
                name="slots",
                drawing=slots,
            ),
        ]
    return blocks


def lengths_again(run: Run, main: Run, ours: str) -> list[Block]:
    """Accepted lengths and gains of a later run, beside which the first one's can be held."""
    here, there = run.summary["settings"].get("dtype"), main.summary["settings"].get("dtype")
    words = f"Drafters measured once more, {here or 'in the server dtype'}, on {run.device}{', in a server' if run.is_served else ''}."
    if here == "float32" != there and any(cell["temperature"] == 0 for cell in run.drafters()):
        words += (
            f" In {there} greedy texts part where two tokens are nearly tied, and then drafters are compared on other texts; in float32, but for "
            "exact ties, all decode the same text to a prompt, so that gains in pairs are sharper."
        )
    blocks = [Block("h2", f"Accepted length in another run: {run.name}"), Block("p", words)]
    for temperature in run.temperatures:
        if run.drafters(temperature):
            blocks.append(Block("p", f"Tokens per pass at temperature {temperature:g}:"))
            blocks.append(Block("table", rows=table_lengths(run, temperature)))
    compared = table_gains(run, ours)
    if len(compared) > 1:
        blocks += [Block("p", "Gain in accepted length, as above:"), Block("table", rows=compared)]
    return blocks


def speeds(run: Run, styles, is_one_of_several: bool) -> list[Block]:
    title = f"Speed in the server on {run.device}" if run.is_served else f"Speed on {run.device}"
    blocks = [Block("h2", title + (f" ({run.name})" if is_one_of_several else ""))]
    if run.is_served:
        caption = (
            "Tokens per second of all requests together, and as a multiple of the target alone, against the number of requests under way at "
            "the same time. Higher is better."
        )
        figure = figure_concurrency(run, styles)
        blocks.append(Block("figure", caption, name=f"concurrency_{run.name}", drawing=figure))
        for temperature in run.temperatures:
            words = f"Tokens per second at temperature {temperature:g}; in brackets the multiple of the target alone, the fastest in bold:"
            blocks += [Block("p", words), Block("table", rows=table_loads(run, temperature))]
    else:
        caption = "Tokens per second, prefill included, all methods in the same process on the same prompts. Longer is better."
        blocks.append(Block("figure", caption, name=f"speed_{run.name}", drawing=figure_speed(run, styles)))
        blocks.append(Block("table", rows=table_speed(run)))
    if any(cell["kind"] == "prompt_lookup" for cell in run.cells):
        words = (
            "Prompt lookup is Transformers' own drafting without a model: it proposes what followed the last words earlier in the text. Its "
            "first pass includes the prefill."
        )
        blocks.append(Block("p", words))
    return blocks


def changes(ablations: dict) -> list[Block]:
    """What single changes to the recipe do."""
    rows = [row for row in ablations["rows"].values() if row.get("evaluation")]
    name, title = next(iter(evaluations(rows).items()))
    steps = rows[0].get("steps")
    bars = [(row["what"], row["evaluation"][name]) for row in rows if name in row["evaluation"]]
    return [
        Block("h2", "What single changes to the recipe do"),
        Block(
            "figure",
            f"Each bar is a drafter trained with one change to {rows[0]['what']}{f' ({steps:,} steps)' if steps else ''}, or that drafter decoded with "
            f"one: {title}, in brackets, and the change. One run each: small differences say nothing, and short training does not rank long "
            "training. A decoding row with the recipe's own setting is a second evaluation of the same drafter: its bar is what evaluating again does.",
            name="ablations",
            drawing=figure_ablations(bars),
        ),
        Block("table", rows=table_ablations(ablations)),
        *(
            [Block("p", f"Words of the recipe: {'; '.join(known)}.")]
            if (known := glossary(row["what"] for row in rows))
            else []
        ),
    ]


def glossary(texts) -> list[str]:
    """What words of a recipe mean, those that occur in `texts`."""
    whole = " ".join(texts)
    return [meaning for word, meaning in RECIPE_WORDS.items() if re.search(rf"\b{word}\b", whole)]


def training(trainings: list[dict], styles) -> list[Block]:
    blocks = [Block("h2", "Training: what was equal and what was not" if len(trainings) > 1 else "Training")]
    without = [report["name"] for report in trainings if not any("loss_base" in entry for entry in report["log"])]
    note = f" {', '.join(without)}: by a loss of another kind, so not on the right." if without else ""
    if len(trainings) > 1:
        words = equalised(trainings)[0] + " Tokens are counted with prompts and padding. "
        words += "“Not recorded” means that the run's file does not hold it. The loss of a drafter from another package is that package's own."
        blocks.append(Block("p", words))
    blocks += [
        Block("table", rows=table_training(trainings)),
        Block(
            "p",
            "Tokens per pass here are walked along stored answers of the target, as decoding would go through them: other answers than those "
            "decoded above, so compare within this table.",
        ),
        Block(
            "figure",
            "Left: tokens per pass estimated on training batches, each block on its own, by each drafter's own measure; the table's numbers "
            f"are of whole answers. Right: cross-entropy of the slots' own predictions, lower is better.{note}",
            name="training",
            drawing=figure_training(trainings, styles),
        ),
    ]
    return blocks


def limits(runs: list[Run]) -> list[Block]:
    timed = any(not run.is_crowded for run in runs)
    blocks = [
        Block("h2", "What these numbers do not say"),
        Block(
            "p",
            "They hold for this target, its chat template and these kinds of prompts; other prompts, thinking modes and languages can halve an "
            f"accepted length.{' Speeds hold for this machine and software.' * timed} Intervals are over prompts; another seed of training is not in "
            "them. Accepted lengths from papers that count accepted drafts without the "
            "target's own token are one lower by definition, and drafters trained on more data are not comparable with these.",
        ),
    ]
    for run in runs:
        shown = {k: run.summary.get(k) for k in ("settings", "arguments", "versions", "drafters", "seconds")}
        blocks.append(Block("details", json.dumps(shown, indent=1, default=str), name=f"Configuration of {run.name}"))
    return blocks


__all__ = [
    "Block",
    "Goal",
    "Run",
    "build",
    "conclusion",
    "load_ablations",
    "load_run",
    "load_training",
    "to_html",
    "to_markdown",
    "write",
]
