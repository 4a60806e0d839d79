"""Results into a page that reads by itself: Markdown with figures beside it, and one HTML file with the figures inside.

A report is a list of blocks (headings, paragraphs, tables, figures, folded details) that two short renderers write out. Every number
comes from `summary.json` of a benchmark run or `metrics.json` of a training run; nothing is computed from anything else.
"""

import html
import io
import json
import re
from dataclasses import dataclass, field
from pathlib import Path


# distinguishable in grey and for the colour-blind (Okabe and Ito); baselines are grey
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
BASELINE_COLOURS = {"target": "#555555", "prompt_lookup": "#999999"}
NAMES = {"target": "target alone", "prompt_lookup": "prompt lookup"}
SET_NAMES = {
    "gsm8k": "GSM8K",
    "math500": "MATH-500",
    "humaneval": "HumanEval",
    "mbpp": "MBPP",
    "livecodebench": "LiveCodeBench",
    "mt-bench": "MT-Bench",
    "arena-hard-v2": "Arena-Hard",
}
# slots reached less often than this say nothing
FEWEST_ROUNDS = 20


@dataclass
class Block:
    """One piece of the page. `kind`: "h1", "h2", "p", "lead", "table", "figure" or "details"."""

    kind: str
    text: str = ""
    rows: list[list[str]] = field(default_factory=list)
    name: str = ""
    svg: str = ""


@dataclass
class Run:
    """A results folder's summary, under the name it has in the report."""

    name: str
    summary: dict

    @property
    def cells(self) -> list[dict]:
        return self.summary["cells"]

    @property
    def is_served(self) -> bool:
        return self.summary["settings"].get("backend") == "sglang"

    def drafters(self, temperature: float | None = None, block_size: int | None = None) -> list[dict]:
        return [
            cell
            for cell in self.cells
            if cell["kind"] == "drafter"
            and cell.get("mean_of_sets")
            and temperature in (None, cell["temperature"])
            and block_size in (None, cell["block_size"])
        ]

    @property
    def temperatures(self) -> list[float]:
        return sorted({cell["temperature"] for cell in self.cells})

    @property
    def main_block_size(self) -> int | None:
        """The block size that the main comparison uses: the largest that most drafters have."""
        sizes = [cell["block_size"] for cell in self.drafters()]
        return max(sizes, key=lambda size: (sizes.count(size), size or 0), default=None)


def load_run(path: str | Path, name: str | None = None) -> Run:
    """A results folder or its `summary.json`.

    Raises:
        FileNotFoundError: there is no summary; the message says how to get one.
        ValueError: the file is no summary of a benchmark run.
    """
    path = Path(path)
    file = path / "summary.json" if path.is_dir() or not path.suffix else path
    if not file.is_file():
        raise FileNotFoundError(
            f"no {file.name} in {file.parent}: examples/benchmark.py writes it at the end of a run"
        )
    summary = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(summary, dict) or "cells" not in summary or "settings" not in summary:
        raise ValueError(f"{file} is no summary of examples/benchmark.py: it has no cells")
    return Run(name or file.parent.resolve().name, summary)


def load_training(path: str | Path) -> dict:
    """`metrics.json` of a training run, or the folder it is in.

    Raises:
        FileNotFoundError, ValueError: it is not there, or is something else.
    """
    path = Path(path)
    file = path / "metrics.json" if path.is_dir() else path
    report = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(report, dict) or "log" not in report:
        raise ValueError(f"{file} is no metrics.json of examples/train.py: it has no log")
    return report


# ---- words ----------------------------------------------------------------------------------------------------------------------


def shown(method: str) -> str:
    return NAMES.get(method, method)


def span(interval) -> str:
    return "" if not interval else f"{interval[0]:.2f} to {interval[1]:.2f}"


def percent(share: float) -> str:
    return f"{share:+.1%}".replace("%", " %")


def with_interval(value: float, interval) -> str:
    return f"{value:.2f}" + (f" ({span(interval)})" if interval else "")


def conclusion(run: Run) -> list[str]:
    """Which drafter to use and why, as sentences; at T=0, or the lowest temperature measured."""
    if not run.drafters():
        return ["No drafter was measured in this run."]
    temperature = run.drafters()[0]["temperature"] if 0.0 not in run.temperatures else 0.0
    cells = run.drafters(temperature)
    if not cells:
        temperature = min(cell["temperature"] for cell in run.drafters())
        cells = run.drafters(temperature)
    lowest = min(cell["concurrency"] or 1 for cell in cells)
    cells = [cell for cell in cells if (cell["concurrency"] or 1) == lowest]
    longest = max(cells, key=lambda cell: cell["mean_of_sets"]["accepted_length"])
    fastest = max(cells, key=lambda cell: cell["tokens_per_second"] or 0)
    mean, sets = longest["mean_of_sets"], longest["mean_of_sets"]["sets"]
    where = f"at temperature {temperature:g}"
    over = "on the one set measured" if sets == 1 else f"averaged over {sets} benchmark sets"
    block = f"in blocks of {longest['block_size']}" if longest["block_size"] else "per block"
    sentences = []
    several = len({cell["method"] for cell in cells}) > 1
    ratios = [cell["speed_up"]["target"] for cell in cells if cell["speed_up"].get("target")]
    if ratios and max(ratios) < 1:
        sentences.append(
            "**No drafter pays on this machine**: the target alone is faster, because a pass over a block costs it more than the tokens saved."
        )
        opening = (
            f"Of those measured, **{longest['method']}** drafts best:" if several else f"**{longest['method']}**:"
        )
    else:
        opening = (
            f"**Use {longest['method']}.** It drafts best:"
            if several
            else f"**{longest['method']}** was measured alone:"
        )
    sentences.append(
        f"{opening} drafting {block} {where}, it lets the target commit **{mean['accepted_length']:.2f} tokens per pass** "
        f"({over}; 95 % interval {span(mean.get('accepted_length_interval'))}), where the target alone commits one."
    )
    for gained in run.summary.get("gains", []):
        same = all(gained[name] == longest[name] for name in ("method", "temperature", "block_size", "concurrency"))
        if not same:
            continue
        low, high = gained.get("accepted_length_interval") or (None, None)
        share = gained["accepted_length"]
        words = f"That is {abs(share):.1%} {'more' if share >= 0 else 'less'} than {gained['over']}".replace("%", " %")
        if low is not None:
            words += f" (interval {percent(low)} to {percent(high)}, same prompts)"
            if low <= 0 <= high:
                words += ", which these few prompts cannot tell apart from no difference"
        sentences.append(words + ".")
    speed_up = longest["speed_up"].get("target")
    if speed_up:
        device = run.summary["versions"].get("device", "this machine")
        verdict = (
            f"{speed_up:.2f} times as fast as" if speed_up >= 1 else f"slower than ({speed_up:.2f} times the speed of)"
        )
        sentences.append(f"Measured on {device}, decoding with it is {verdict} the target alone.")
        lookup = longest["speed_up"].get("prompt_lookup")
        if lookup:
            sentences.append(
                f"Against Transformers' own prompt lookup, which needs no drafter, the factor is {lookup:.2f}."
            )
    if fastest is not longest and fastest["tokens_per_second"] and longest["tokens_per_second"]:
        margin = fastest["tokens_per_second"] / longest["tokens_per_second"] - 1
        if margin > 0.02:
            sentences.append(
                f"The fastest drafter was {fastest['method']} in blocks of {fastest['block_size']}, ahead by {100 * margin:.0f} % in tokens per second: "
                "where a pass over more slots costs noticeably more, shorter blocks win although fewer tokens are accepted."
            )
    exact = [cell["exactness"] for cell in run.cells if cell.get("exactness") and cell["kind"] == "drafter"]
    if exact:
        faults, compared = sum(e["faults"] for e in exact), sum(e["compared"] for e in exact)
        equal = sum(e["equal"] for e in exact)
        if faults:
            sentences.append(
                f"**Careful:** {faults} of {compared} greedy texts leave the target's own text at no near-tie; these numbers are not to be trusted "
                "until that is explained."
            )
        elif equal == compared:
            sentences.append(
                f"The text does not change: all {compared} greedy answers compared are the target's own, token for token."
            )
        else:
            sentences.append(
                f"The text does not change: {equal} of {compared} greedy answers are the target's own token for token; the others part where two "
                f"tokens are nearly tied (at most {max(e['largest_gap'] for e in exact):.2f} logits apart in fp32)."
            )
    return sentences


def weakest(run: Run, temperature: float) -> str:
    """Where the best drafter gains least on the second best: by set and by slot."""
    size = run.main_block_size
    cells = sorted(run.drafters(temperature, size), key=lambda cell: -cell["mean_of_sets"]["accepted_length"])
    if len(cells) < 2 or cells[0]["method"] == cells[1]["method"]:
        return ""
    first, second = cells[:2]
    gains = {
        name: part["accepted_length"] / second["sets"][name]["accepted_length"] - 1
        for name, part in first["sets"].items()
        if "accepted_length" in part and "accepted_length" in second["sets"].get(name, {})
    }
    if not gains:
        return ""
    most, least = max(gains, key=gains.get), min(gains, key=gains.get)
    text = (
        f"At temperature {temperature:g}, {first['method']} gains most over {second['method']} on {SET_NAMES.get(most, most)} "
        f"({percent(gains[most])}) and least on {SET_NAMES.get(least, least)} ({percent(gains[least])})."
    )
    slots = [
        (k + 1, a - b)
        for k, (a, b, n, m) in enumerate(
            zip(
                first["all"].get("slot_acceptance", []),
                second["all"].get("slot_acceptance", []),
                first["all"].get("slot_reached", []),
                second["all"].get("slot_reached", []),
            )
        )
        if min(n, m) >= FEWEST_ROUNDS and a is not None and b is not None
    ]
    if len(slots) > 1:
        best, worst = max(slots, key=lambda pair: pair[1]), min(slots, key=lambda pair: pair[1])
        text += (
            f" By slot, the difference in acceptance is largest at slot {best[0]} ({100 * best[1]:+.0f} points) and smallest at slot "
            f"{worst[0]} ({100 * worst[1]:+.0f} points)."
        )
    return text


# ---- figures --------------------------------------------------------------------------------------------------------------------


def _axes(columns: int = 1, height: float = 3.3, width: float = 8.6, sharey: bool = True):
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#dddddd",
            "grid.linewidth": 0.6,
            "axes.axisbelow": True,
            "svg.hashsalt": "dspine",  # the same figure has the same bytes
            "svg.fonttype": "path",
        }
    )
    figure, axes = plt.subplots(
        1, columns, figsize=(width, height), squeeze=False, sharey=sharey, layout="constrained"
    )
    return figure, axes[0]


def _svg(figure) -> str:
    import matplotlib.pyplot as plt

    sink = io.StringIO()
    figure.savefig(sink, format="svg", metadata={"Date": None})
    plt.close(figure)
    text = sink.getvalue()
    return text[text.index("<svg") :]


def colours_of(methods) -> dict[str, str]:
    """One colour per drafter, in order of appearance; baselines keep their greys."""
    names = [name for name in dict.fromkeys(methods) if name not in BASELINE_COLOURS]
    return BASELINE_COLOURS | {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}


def _bars(interval, value):
    low, high = interval or (value, value)
    return [[max(value - low, 0)], [max(high - value, 0)]]


def figure_sets(run: Run, colours: dict[str, str]) -> str:
    """Accepted length per set with intervals, one panel per temperature."""
    size = run.main_block_size
    temperatures = [t for t in run.temperatures if run.drafters(t, size)]
    figure, axes = _axes(len(temperatures), height=3.7, width=5.0 + 4.4 * (len(temperatures) - 1) + 1.2)
    for axis, temperature in zip(axes, temperatures):
        cells = run.drafters(temperature, size)
        cells = [cell for cell in cells if cell["concurrency"] == cells[0]["concurrency"]]
        names = list(dict.fromkeys(name for cell in cells for name in cell["sets"]))
        names = sorted(names, key=lambda name: list(SET_NAMES).index(name) if name in SET_NAMES else 99)
        for i, cell in enumerate(cells):
            shift = (i - (len(cells) - 1) / 2) * min(0.18, 0.7 / len(cells))
            for place, name in enumerate([*names, None]):
                part = cell["mean_of_sets"] if name is None else cell["sets"].get(name, {})
                value = part.get("accepted_length")
                if value is None:
                    continue
                axis.errorbar(
                    place + shift + (0.35 if name is None else 0),
                    value,
                    yerr=_bars(part.get("accepted_length_interval"), value),
                    fmt="D" if name is None else "o",
                    markersize=7 if name is None else 5,
                    capsize=2.5,
                    color=colours[cell["method"]],
                    label=cell["method"] if place == 0 else None,
                )
        axis.axvline(len(names) - 0.32, color="#bbbbbb", linewidth=0.8)
        labels = [SET_NAMES.get(name, name) for name in names]
        axis.set_xticks([*range(len(names)), len(names) + 0.35], [*labels, "mean"], rotation=35, ha="right")
        axis.set_title(f"temperature {temperature:g}", fontsize=10)
        axis.set_ylim(bottom=1)
        axis.grid(axis="x", visible=False)
    axes[0].set_ylabel("tokens committed per pass")
    axes[0].legend(frameon=False)
    return _svg(figure)


def figure_slots(run: Run, colours: dict[str, str]) -> str:
    """Conditional acceptance by slot, with bootstrap bands; slots that were hardly ever reached are left out. Empty without data."""
    size = run.main_block_size
    temperatures = [t for t in run.temperatures if run.drafters(t, size)]
    figure, axes = _axes(len(temperatures), width=4.6 * max(len(temperatures), 1) + 1.0)
    drawn = False
    for axis, temperature in zip(axes, temperatures):
        cells = run.drafters(temperature, size)
        for cell in cells:
            if cell["concurrency"] != cells[0]["concurrency"] or "slot_acceptance" not in cell.get("all", {}):
                continue
            part = cell["all"]
            slots = [k for k, n in enumerate(part["slot_reached"]) if n >= FEWEST_ROUNDS]
            if not slots:
                continue
            drawn = True
            colour = colours[cell["method"]]
            values = [part["slot_acceptance"][k] for k in slots]
            axis.plot([k + 1 for k in slots], values, "o-", markersize=4, color=colour, label=cell["method"])
            bands = part.get("slot_acceptance_interval")
            if bands:
                bands = [bands[k] or [v, v] for k, v in zip(slots, values)]
                axis.fill_between([k + 1 for k in slots], *zip(*bands), color=colour, alpha=0.15, linewidth=0)
        axis.set_title(f"temperature {temperature:g}", fontsize=10)
        axis.set_xlabel("slot of the block")
        axis.set_ylim(0, 1)
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel("accepted, if all before it were")
    if drawn:
        axes[0].legend(frameon=False, loc="lower left")
    svg = _svg(figure)
    return svg if drawn else ""


def figure_speed(run: Run, colours: dict[str, str]) -> str:
    """Tokens per second of every method, as bars; one panel per temperature."""
    temperatures = run.temperatures
    most = max(len([c for c in run.cells if c["temperature"] == t]) for t in temperatures)
    figure, axes = _axes(
        len(temperatures), height=0.9 + 0.36 * most, width=4.6 * len(temperatures) + 0.6, sharey=False
    )
    for axis, temperature in zip(axes, temperatures):
        cells = [cell for cell in run.cells if cell["temperature"] == temperature and cell["tokens_per_second"]]
        cells = sorted(cells, key=lambda cell: cell["tokens_per_second"])
        labels = [shown(c["method"]) + (f", block {c['block_size']}" if c["block_size"] else "") for c in cells]
        speeds = [cell["tokens_per_second"] for cell in cells]
        bars = axis.barh(labels, speeds, color=[colours.get(cell["method"], "#777777") for cell in cells], height=0.7)
        axis.bar_label(bars, [f" {speed:,.0f}" if speed >= 100 else f" {speed:.1f}" for speed in speeds], fontsize=9)
        axis.margins(x=0.14)
        axis.grid(axis="y", visible=False)
        axis.set_title(f"temperature {temperature:g}", fontsize=10)
        axis.set_xlabel("tokens per second")
    return _svg(figure)


def figure_concurrency(run: Run, colours: dict[str, str]) -> str:
    """Tokens per second of a server against requests under way, one panel per temperature."""
    figure, axes = _axes(len(run.temperatures), width=4.6 * len(run.temperatures) + 1.0, sharey=False)
    for axis, temperature in zip(axes, run.temperatures):
        lines: dict[tuple, list] = {}
        for cell in run.cells:
            if cell["temperature"] == temperature and cell["concurrency"] and cell["tokens_per_second"]:
                point = (cell["concurrency"], cell["tokens_per_second"])
                lines.setdefault((cell["method"], cell["block_size"]), []).append(point)
        sizes = {size for _, size in lines if size}
        ticks = sorted({x for points in lines.values() for x, _ in points})
        for (method, size), points in lines.items():
            name = shown(method) + (f", block {size}" if size and len(sizes) > 1 else "")
            axis.plot(*zip(*sorted(points)), "o-", markersize=4, color=colours.get(method, "#777777"), label=name)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [str(x) for x in ticks])
        axis.set_ylim(bottom=0)
        axis.set_xlabel("requests at a time")
        axis.set_title(f"temperature {temperature:g}", fontsize=10)
    axes[0].set_ylabel("tokens per second, all requests")
    axes[0].legend(frameon=False)
    return _svg(figure)


def figure_training(trainings: list[dict], colours: dict[str, str]) -> str:
    """Loss of the slots' own predictions, which all drafters share, and accepted length of training batches, over steps."""
    figure, axes = _axes(2, sharey=False)
    for report in trainings:
        log = [entry for entry in report["log"] if "loss" in entry]
        colour = colours.get(report["name"], "#777777")
        panels = (("loss_base", "loss"), ("accepted_length_refined", "accepted_length_base"))
        for axis, names in zip(axes, panels):
            name = next((name for name in names if log and name in log[-1]), None)
            if name is not None:
                points = [(entry["step"], entry[name]) for entry in log if name in entry]
                axis.plot(*zip(*points), linewidth=1.2, color=colour, label=report["name"])
    axes[0].set_ylabel("cross-entropy of the slots")
    axes[1].set_ylabel("accepted length in training")
    for axis in axes:
        axis.set_xlabel("step")
    axes[1].legend(frameon=False, loc="lower right")
    axes[0].set_yscale("log")
    axes[0].yaxis.set_major_formatter("{x:g}")
    axes[0].yaxis.set_minor_formatter("{x:g}")
    return _svg(figure)


# ---- tables ---------------------------------------------------------------------------------------------------------------------


def load_sentence(run: Run) -> str:
    """How the longest-accepted drafter's speed-up changes with load, in a server; empty if no baseline was served."""
    cells = [cell for cell in run.drafters(min(run.temperatures)) if cell["speed_up"].get("target")]
    if not cells:
        return ""
    best = max(cells, key=lambda cell: cell["mean_of_sets"]["accepted_length"])
    line = sorted(
        (cell["concurrency"], cell["speed_up"]["target"])
        for cell in cells
        if cell["method"] == best["method"] and cell["block_size"] == best["block_size"]
    )
    points = ", ".join(f"{ratio:.2f} times at {load}" for load, ratio in line)
    paying = [load for load, ratio in line if ratio > 1]
    if len(paying) == len(line):
        verdict = "Drafting pays at every load measured."
    elif paying:
        verdict = f"Drafting pays up to {max(paying)} requests at a time; beyond that the machine is busy without it."
    else:
        verdict = (
            "Drafting does not pay in this server with this target: a pass with a draft costs more than it saves."
        )
    return (
        f"At temperature {min(run.temperatures):g}, the server with {best['method']} runs at the following multiples of the target alone, by "
        f"requests at a time: {points}. {verdict}"
    )


def table_lengths(run: Run, temperature: float) -> list[list[str]]:
    """Accepted length per set and mean, all block sizes."""
    cells = sorted(
        run.drafters(temperature),
        key=lambda cell: (-(cell["block_size"] or 0), -cell["mean_of_sets"]["accepted_length"]),
    )
    if cells:
        cells = [cell for cell in cells if cell["concurrency"] == cells[0]["concurrency"]]
    names = [name for name in SET_NAMES if any(name in cell["sets"] for cell in cells)]
    names += sorted({name for cell in cells for name in cell["sets"]} - set(names))
    rows = [
        ["drafter", "block", *(SET_NAMES.get(name, name) for name in names), "mean (interval)", "mean, per request"]
    ]
    for cell in cells:
        values = [cell["sets"].get(name, {}).get("accepted_length") for name in names]
        mean = cell["mean_of_sets"]
        rows.append(
            [
                cell["method"],
                str(cell["block_size"] or ""),
                *("" if value is None else f"{value:.2f}" for value in values),
                with_interval(mean["accepted_length"], mean.get("accepted_length_interval")),
                f"{mean['accepted_length_per_request']:.2f}",
            ]
        )
    return rows


def table_speed(run: Run) -> list[list[str]]:
    served = any(cell["concurrency"] for cell in run.cells)
    rows = [
        [
            "method",
            "T",
            "block",
            *(["requests at a time"] if served else []),
            "tokens per pass",
            "tokens/s",
            "against target alone",
            "against prompt lookup",
            "greedy texts equal",
        ]
    ]
    order = {"target": 0, "prompt_lookup": 1, "drafter": 2}
    for cell in sorted(
        run.cells,
        key=lambda c: (
            c["temperature"],
            c["concurrency"] or 0,
            order[c["kind"]],
            c["method"],
            -(c["block_size"] or 0),
        ),
    ):
        ratios = [cell["speed_up"].get(name) for name in ("target", "prompt_lookup")]
        exact, tau = cell.get("exactness"), cell.get("mean_of_sets", {}).get("accepted_length")
        faults = f", {exact['faults']} faults" if exact and exact["faults"] else ""
        rows.append(
            [
                shown(cell["method"]),
                f"{cell['temperature']:g}",
                str(cell["block_size"] or ""),
                *([str(cell["concurrency"])] if served else []),
                f"{tau:.2f}" if tau else "1" if cell["kind"] == "target" else "",
                f"{cell['tokens_per_second']:,.1f}" if cell["tokens_per_second"] else "",
                *(f"{ratio:.2f}x" if ratio else "" for ratio in ratios),
                f"{exact['equal']} of {exact['compared']}{faults}" if exact else "",
            ]
        )
    return without_blank_columns(rows)


def without_blank_columns(rows: list[list[str]]) -> list[list[str]]:
    keep = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    return [[row[i] for i in keep] for row in rows]


def table_gains(run: Run) -> list[list[str]]:
    rows = [["drafter", "against", "T", "block", "gain in accepted length", "95 % interval", "prompts compared"]]
    for part in run.summary.get("gains", []):
        if part["accepted_length"] < 0:
            continue  # the same pair the other way round is there too
        interval = part.get("accepted_length_interval")
        rows.append(
            [
                part["method"],
                part["over"],
                f"{part['temperature']:g}",
                str(part["block_size"] or ""),
                percent(part["accepted_length"]),
                f"{percent(interval[0])} to {percent(interval[1])}" if interval else "",
                str(part["requests"]),
            ]
        )
    return rows


IGNORED = {
    "architectures",
    "auto_map",
    "dtype",
    "transformers_version",
    "target_name_or_path",
    "injection_layers",
    "model_type",
}


def differences(reports: list[dict]) -> list[str]:
    """For every training run, what sets it apart from the first one, in words."""

    def flat(report):
        result = {k: v for k, v in report.get("drafter", {}).items() if k not in IGNORED}
        for part in ("loss", "start", "training"):
            result |= report.get("arguments", {}).get(part, {})
        return result

    first = flat(reports[0])
    words = []
    for report in reports:
        here = flat(report)
        apart = [f"{k} = {here.get(k)}" for k in sorted({*first, *here}) if here.get(k) != first.get(k)]
        words.append(", ".join(apart) or ("the reference" if report is reports[0] else "the same settings"))
    return words


def table_training(reports: list[dict]) -> list[list[str]]:
    """Ablations: what differs, and the accepted length walked on every evaluation set."""
    ending = "_accepted_length"
    names = list(dict.fromkeys(k for report in reports for k in report["evaluation"] if k.endswith(ending)))
    titles = [re.sub(r"^eval_?", "", name.removesuffix(ending)) or "evaluation" for name in names]
    rows = [["run", "differs in", "steps", "parameters", *(f"accepted length, {title}" for title in titles)]]
    first = reports[0]["evaluation"]
    for report, words in zip(reports, differences(reports)):
        values = []
        for name in names:
            value = report["evaluation"].get(name)
            gain = (
                ""
                if value is None or report is reports[0] or not first.get(name)
                else f" ({percent(value / first[name] - 1)})"
            )
            values.append("" if value is None else f"{value:.3f}{gain}")
        rows.append(
            [report["name"], words, f"{report['steps']:,}", f"{report['drafter_parameters'] / 1e6:.1f} M", *values]
        )
    return rows


# ---- the page -------------------------------------------------------------------------------------------------------------------


def build(runs: list[Run], trainings: list[dict] | None = None, title: str | None = None) -> list[Block]:
    """All blocks of a report.

    Args:
        runs: the first one with drafters carries the conclusion and the comparison by set and slot; all give their speeds.
        trainings: `metrics.json` contents; the first one is what the others are compared with.
    """
    trainings = trainings or []
    methods = [cell["method"] for run in runs for cell in run.cells] + [report["name"] for report in trainings]
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
        blocks.append(Block("lead", " ".join(conclusion(main))))
        blocks += explanation(main)
        blocks += accepted_lengths(main, colours)
    for run in runs:
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
            f"({arguments.get('num_resamples', 1000):,} resamples): another choice of prompts would mostly have landed inside.",
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
                "p", "One drafter against another, on the same prompts (intervals from resampling prompts in pairs):"
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


# ---- renderers ------------------------------------------------------------------------------------------------------------------

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; color: #1c1c1c; background: #fff;
  max-width: 62rem; margin: 2.5rem auto 4rem; padding: 0 1.5rem; }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0 0 1rem; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .6rem; padding-top: .4rem; border-top: 1px solid #ddd; }
.lead { font-size: 1.08rem; background: #f3f7fb; border-left: 4px solid #0072B2; padding: .8rem 1.1rem; margin: 0 0 1rem; }
figure { margin: 1rem 0; overflow-x: auto; }
figure svg { max-width: 100%; height: auto; display: block; }
figcaption { color: #555; font-size: .9rem; margin-top: .3rem; }
.scroll { overflow-x: auto; margin: .6rem 0 1.2rem; }
table { border-collapse: collapse; font-size: .84rem; font-variant-numeric: tabular-nums; }
th, td { padding: .32rem .5rem; border-bottom: 1px solid #e3e3e3; text-align: right; vertical-align: top; }
th { font-weight: 600; border-bottom: 2px solid #bbb; vertical-align: bottom; }
td { white-space: nowrap; } td.long { white-space: normal; min-width: 14rem; }
th:first-child, td:first-child, .words, .long { text-align: left; }
details { margin: .8rem 0; } summary { cursor: pointer; color: #0072B2; }
pre { font-size: .78rem; background: #f6f6f6; padding: .8rem; overflow-x: auto; }
"""


def _inline(text: str) -> str:
    """Escaped text with **bold** and *emphasis*."""
    text = html.escape(text, quote=False)
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text)
    return re.sub(r"(?<!\*)\*([^*]+)\*(?!\*)", r"<em>\1</em>", text)


def _is_words(column: list[str]) -> bool:
    return any(re.search(r"[A-Za-z]{3}", re.sub(r"\bto\b|\bof\b|faults?", "", cell)) for cell in column)


def to_html(blocks: list[Block]) -> str:
    """One page, figures inside, nothing loaded from anywhere."""
    title = next((block.text for block in blocks if block.kind == "h1"), "Report")
    parts = [
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, '
        f'initial-scale=1">\n<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>'
    ]
    for number, block in enumerate(blocks):
        match block.kind:
            case "h1" | "h2":
                parts.append(f"<{block.kind}>{_inline(block.text)}</{block.kind}>")
            case "p":
                parts.append(f"<p>{_inline(block.text)}</p>")
            case "lead":
                parts.append(f'<p class="lead">{_inline(block.text)}</p>')
            case "figure":
                # ids of several drawings in one page must not meet
                svg = re.sub(r'(id="|url\(#|xlink:href="#|href="#)', rf"\g<1>f{number}-", block.svg)
                label = html.escape(block.text, quote=True)
                svg = svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
                parts.append(f"<figure>{svg}<figcaption>{_inline(block.text)}</figcaption></figure>")
            case "table":
                columns = [[row[i] for row in block.rows[1:]] for i in range(len(block.rows[0]))]
                kinds = [
                    " class=long"
                    if max(map(len, column), default=0) > 40
                    else " class=words"
                    if _is_words(column)
                    else ""
                    for column in columns
                ]
                lines = []
                for tag, rows in (("th", block.rows[:1]), ("td", block.rows[1:])):
                    for row in rows:
                        cells = (f"<{tag}{kind}>{_inline(cell)}</{tag}>" for cell, kind in zip(row, kinds))
                        lines.append(f"<tr>{''.join(cells)}</tr>")
                parts.append(f'<div class="scroll"><table>{"".join(lines)}</table></div>')
            case "details":
                parts.append(
                    f"<details><summary>{_inline(block.name)}</summary><pre>{html.escape(block.text)}</pre></details>"
                )
    return "\n".join([*parts, "</body>\n</html>\n"])


def to_markdown(blocks: list[Block], figures: str = "figures") -> str:
    """The same page as Markdown; figures are linked as `figures/<name>.svg`."""
    parts = []
    for block in blocks:
        match block.kind:
            case "h1":
                parts.append(f"# {block.text}")
            case "h2":
                parts.append(f"## {block.text}")
            case "p" | "lead":
                parts.append(block.text)
            case "figure":
                parts.append(f"![{block.name.replace('_', ' ')}]({figures}/{block.name}.svg)\n\n*{block.text}*")
            case "table":
                lines = ["| " + " | ".join(row) + " |" for row in block.rows]
                lines.insert(1, "| --- |" + " ---: |" * (len(block.rows[0]) - 1))
                parts.append("\n".join(lines))
            case "details":
                parts.append(f"<details>\n<summary>{block.name}</summary>\n\n```json\n{block.text}\n```\n\n</details>")
    return "\n\n".join(parts) + "\n"


def write(blocks: list[Block], folder: str | Path) -> list[Path]:
    """Writes `report.html`, `report.md` and `figures/*.svg`; returns the paths."""
    folder = Path(folder)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    paths = [folder / "report.html", folder / "report.md"]
    paths[0].write_text(to_html(blocks), encoding="utf-8")
    paths[1].write_text(to_markdown(blocks), encoding="utf-8")
    for block in blocks:
        if block.kind == "figure":
            paths.append(folder / "figures" / f"{block.name}.svg")
            paths[-1].write_text(block.svg + "\n", encoding="utf-8")
    return paths


__all__ = ["Block", "Run", "build", "conclusion", "load_run", "load_training", "to_html", "to_markdown", "write"]
