"""Figures of a report as SVG text. Needs matplotlib (`pip install dspine[eval]`)."""

import io

from .report_data import FEWEST_ROUNDS, SET_NAMES, Run, shown


# distinguishable in grey and for the colour-blind (Okabe and Ito); baselines are grey
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
BASELINE_COLOURS = {"target": "#555555", "prompt_lookup": "#999999"}


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


def _legend(figure, axes) -> None:
    """One legend above the panels, where it hides nothing."""
    entries = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            entries.setdefault(label, handle)
    columns = min(len(entries), 6)
    figure.legend(entries.values(), entries.keys(), loc="outside upper center", ncols=max(columns, 1), frameon=False)


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
        cells = run.ranked(temperature, size)
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
    _legend(figure, axes)
    return _svg(figure)


def figure_slots(run: Run, colours: dict[str, str]) -> str:
    """Conditional acceptance by slot, with bootstrap bands; slots that were hardly ever reached are left out. Empty without data."""
    size = run.main_block_size
    temperatures = [t for t in run.temperatures if run.drafters(t, size)]
    figure, axes = _axes(len(temperatures), width=4.6 * max(len(temperatures), 1) + 1.0)
    drawn = False
    for axis, temperature in zip(axes, temperatures):
        cells = run.ranked(temperature, size)
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
        _legend(figure, axes)
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
    _legend(figure, axes)
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
    _legend(figure, axes[1:])
    axes[0].set_yscale("log")
    axes[0].yaxis.set_major_formatter("{x:g}")
    axes[0].yaxis.set_minor_formatter("{x:g}")
    return _svg(figure)


__all__ = [
    "colours_of",
    "figure_concurrency",
    "figure_sets",
    "figure_slots",
    "figure_speed",
    "figure_training",
]
