"""Figures of a report as SVG text and small PNG images. Needs matplotlib (`pip install dspine[eval]`)."""

import io
from dataclasses import dataclass

from .report_data import FEWEST_ROUNDS, SET_NAMES, Run


# distinguishable in grey and for the colour-blind (Okabe and Ito), on white and on black; every method has its own marker, too
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#a6761d", "#7570b3")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
KNOWN = ("DSpine", "DFlash", "DSpark", "Domino", "DFlash 2", "DSpine small")
BASELINES = {"target alone": "#7a7a7a", "prompt lookup": "#a5a5a5"}
# replaced by the page's own colours where a figure stands in it; see `report_render.py`
INK, GRID, PAPER = "#1b1c1e", "#dcdddf", "#fdfdfe"
LARGEST_PNG = 60_000


@dataclass
class Drawing:
    svg: str
    png: bytes


def _axes(rows: int = 1, columns: int = 1, height: float = 3.3, width: float = 8.6, sharey: bool = True):
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    plt.rcParams.update(dict.fromkeys(ink, INK))
    plt.rcParams.update(
        {
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.facecolor": "none",
            "axes.titlesize": 10,
            "figure.facecolor": PAPER,
            "grid.color": GRID,
            "grid.linewidth": 0.6,
            "axes.axisbelow": True,
            "svg.hashsalt": "dspine",  # the same figure has the same bytes
            "svg.fonttype": "path",
        }
    )
    return plt.subplots(
        rows, columns, figsize=(width, height * rows), squeeze=False, sharey=sharey, layout="constrained"
    )


def _drawn(figure) -> Drawing:
    """The figure as SVG, and as a PNG of few colours in the largest size that stays small."""
    import matplotlib.pyplot as plt
    from PIL import Image

    sink = io.StringIO()
    figure.savefig(sink, format="svg", metadata={"Date": None})
    text = sink.getvalue()
    for dpi in (150, 130, 110, 90, 70, 50):
        raw, png = io.BytesIO(), io.BytesIO()
        figure.savefig(raw, format="png", dpi=dpi)
        Image.open(raw).convert("RGB").quantize(48).save(png, "png", optimize=True)
        if png.tell() <= LARGEST_PNG:
            break
    plt.close(figure)
    return Drawing(text[text.index("<svg") :], png.getvalue())


def _legend(figure, axes) -> None:
    """One legend above the panels, where it hides nothing, in as many rows as names need."""
    entries = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            entries.setdefault(label, handle)
    for columns in range(min(len(entries), 7), 0, -1):
        legend = figure.legend(
            entries.values(), entries.keys(), loc="outside upper center", ncols=columns, frameon=False
        )
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()


def styles_of(methods) -> dict[str, dict]:
    """Colour and marker of every method: the same in all figures, and for known ones in all reports."""
    styles = {name: {"color": colour, "marker": "."} for name, colour in BASELINES.items()}
    places = {name: i for i, name in enumerate(KNOWN)}
    for name in methods:
        if name not in styles:
            # "DSpine small (3 layers)" looks like "DSpine small"
            i = places.setdefault(name, places.get(name.partition(" (")[0], len(places)))
            styles[name] = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
    return styles


def _degrees(temperature: float) -> str:
    return f"temperature {temperature:g}" + (" (greedy)" if temperature == 0 else "")


def figure_sets(run: Run, styles: dict[str, dict]) -> Drawing:
    """Accepted length per set with intervals, one panel per temperature, at the main block size."""
    size = run.main_block_size
    temperatures = [t for t in run.temperatures if run.drafters(t, size)]
    figure, axes = _axes(len(temperatures), height=3.1, sharey=False)
    for axis, temperature in zip(axes.flat, temperatures):
        cells = run.ranked(temperature, size)
        names = run.sets(cells)
        for i, cell in enumerate(cells):
            shift = (i - (len(cells) - 1) / 2) * min(0.18, 0.72 / len(cells))
            for place, name in enumerate([*names, None]):
                part = cell["mean_of_sets"] if name is None else cell["sets"].get(name, {})
                value = part.get("accepted_length")
                if value is None:
                    continue
                low, high = part.get("accepted_length_interval") or (value, value)
                axis.errorbar(
                    place + shift + (0.35 if name is None else 0),
                    value,
                    yerr=[[max(value - low, 0)], [max(high - value, 0)]],
                    linestyle="none",
                    markersize=7 if name is None else 5,
                    capsize=2.5,
                    label=cell["method"],
                    **styles[cell["method"]],
                )
        for edge in range(1, len(names)):
            axis.axvline(edge - 0.5, color=GRID, linewidth=0.6)
        axis.axvline(len(names) - 0.3, color=INK, linewidth=0.8)
        labels = [SET_NAMES.get(name, name) for name in names]
        axis.set_xticks([*range(len(names)), len(names) + 0.35], [*labels, "mean of sets"], fontsize=9)
        axis.set_title(_degrees(temperature))
        axis.set_ylim(bottom=1)
        axis.set_ylabel("tokens per pass")
        axis.grid(axis="x", visible=False)
    _legend(figure, axes)
    return _drawn(figure)


def figure_slots(run: Run, styles: dict[str, dict]) -> Drawing | None:
    """Conditional acceptance by slot, with bootstrap bands; slots that were hardly ever reached are left out. None without data."""
    size = run.main_block_size
    parts = {t: [c for c in run.ranked(t, size) if c.get("all", {}).get("slot_acceptance")] for t in run.temperatures}
    parts = {temperature: cells for temperature, cells in parts.items() if cells}
    if not parts:
        return None
    figure, axes = _axes(1, len(parts), height=3.6, width=max(4.3 * len(parts), 6), sharey=False)
    for axis, (temperature, cells) in zip(axes.flat, parts.items()):
        for cell in cells:
            part, style = cell["all"], styles[cell["method"]]
            slots = [k for k, n in enumerate(part["slot_reached"]) if n >= FEWEST_ROUNDS]
            values = [part["slot_acceptance"][k] for k in slots]
            axis.plot([k + 1 for k in slots], values, markersize=4.5, linewidth=1.3, label=cell["method"], **style)
            if slots and part.get("slot_acceptance_interval"):
                bands = [part["slot_acceptance_interval"][k] or [v, v] for k, v in zip(slots, values)]
                axis.fill_between([k + 1 for k in slots], *zip(*bands), color=style["color"], alpha=0.12, linewidth=0)
        axis.set_title(_degrees(temperature))
        axis.set_xlabel("position in the block (slot)")
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes.flat[0].set_ylabel("share accepted, if all before were")
    _legend(figure, axes)
    return _drawn(figure)


def figure_speed(run: Run, styles: dict[str, dict]) -> Drawing:
    """Tokens per second of every method, as bars; one panel per temperature."""
    temperatures = run.temperatures
    most = max(len([c for c in run.cells if c["temperature"] == t]) for t in temperatures)
    width = 4.6 * len(temperatures) + 0.6
    figure, axes = _axes(1, len(temperatures), height=0.9 + 0.3 * most, width=width, sharey=False)
    for axis, temperature in zip(axes.flat, temperatures):
        cells = [cell for cell in run.cells if cell["temperature"] == temperature and cell["tokens_per_second"]]
        cells = sorted(cells, key=lambda cell: cell["tokens_per_second"])
        labels = [c["method"] + (f", blocks of {c['block_size']}" if c["block_size"] else "") for c in cells]
        speeds = [cell["tokens_per_second"] for cell in cells]
        colours = [styles.get(cell["method"], {"color": "#7a7a7a"})["color"] for cell in cells]
        bars = axis.barh(labels, speeds, color=colours, height=0.7)
        axis.bar_label(bars, [f" {speed:,.0f}" if speed >= 100 else f" {speed:.1f}" for speed in speeds], fontsize=9)
        axis.margins(x=0.14)
        axis.grid(axis="y", visible=False)
        axis.set_title(_degrees(temperature))
        axis.set_xlabel("tokens per second")
    return _drawn(figure)


def figure_concurrency(run: Run, styles: dict[str, dict]) -> Drawing:
    """A server's tokens per second, and as multiples of the target alone, against requests under way; one row per temperature."""
    ratios = any(cell["speed_up"].get("target") for cell in run.cells)
    figure, axes = _axes(len(run.temperatures), 1 + ratios, height=3.6, width=5.0 + 3.6 * ratios, sharey=False)
    sizes = run.block_sizes
    for row, temperature in zip(axes, run.temperatures):
        lines: dict[tuple, list] = {}
        for cell in run.cells:
            if cell["temperature"] == temperature and cell["concurrency"] and cell["tokens_per_second"]:
                ratio = cell["speed_up"].get("target", 1.0 if cell["kind"] == "target" else float("nan"))
                point = (cell["concurrency"], cell["tokens_per_second"], ratio)
                lines.setdefault((cell["method"], cell["block_size"]), []).append(point)
        ticks = sorted({point[0] for points in lines.values() for point in points})
        for (method, size), points in lines.items():
            loads, *values = zip(*sorted(points))
            # a smaller block is dashed, in the method's colour
            dashes = "-" if size is None or size == sizes[0] else "--"
            for axis, heights in zip(row, values):
                style = {"linestyle": dashes, "markersize": 4.5, "linewidth": 1.3, **styles[method]}
                axis.plot(loads, heights, label=method if dashes == "-" else None, **style)
        for axis in row:
            axis.set_xscale("log", base=2)
            axis.set_xticks(ticks, [str(x) for x in ticks])
            axis.set_xlabel("requests at a time")
            axis.set_title(_degrees(temperature))
        row[0].set_yscale("log")
        row[0].set_ylabel("tokens per second, all requests")
        row[0].yaxis.set_major_formatter("{x:,.0f}")
        if ratios:
            row[1].set_ylabel("multiple of the target alone")
    for size in sizes[1:]:
        axes.flat[0].plot([], [], "--", color=INK, label=f"dashed: blocks of {size}")
    _legend(figure, axes)
    return _drawn(figure)


def figure_training(trainings: list[dict], styles: dict[str, dict]) -> Drawing:
    """Accepted length of training batches over steps, and the loss of the slots' own predictions where a run has it."""
    panels = (("accepted_length_refined", "accepted_length_base"), ("loss_base",))
    figure, axes = _axes(1, 2, sharey=False)
    for report in trainings:
        for axis, names in zip(axes.flat, panels):
            name = next((name for name in names if any(name in entry for entry in report["log"])), None)
            if name is not None:
                points = [(entry["step"], entry[name]) for entry in report["log"] if name in entry]
                axis.plot(*zip(*points), linewidth=1.3, color=styles[report["name"]]["color"], label=report["name"])
    axes.flat[0].set_ylabel("tokens per pass, estimated")
    axes.flat[1].set_ylabel("cross-entropy of the slots")
    axes.flat[1].set_yscale("log")
    for which in ("set_major_formatter", "set_minor_formatter"):
        getattr(axes.flat[1].yaxis, which)("{x:g}")
    for axis in axes.flat:
        axis.set_xlabel("training step")
    _legend(figure, axes)
    return _drawn(figure)


def figure_ablations(rows: list[tuple[str, float]]) -> Drawing:
    """What each change to the recipe does to accepted length: bars around the recipe's own.

    Args:
        rows: names and accepted lengths, the recipe first.
    """
    recipe, rows = rows[0][1], sorted(rows[1:], key=lambda row: row[1])
    figure, axes = _axes(height=0.8 + 0.29 * len(rows))
    axis, shares = axes[0, 0], [100 * (value / recipe - 1) for _, value in rows]
    colours = [COLOURS[0] if share >= 0 else COLOURS[1] for share in shares]
    axis.barh([name for name, _ in rows], shares, color=colours, height=0.65)
    for place, (share, (_, value)) in enumerate(zip(shares, rows)):
        axis.annotate(f" {share:+.1f} % ({value:.2f})", (max(share, 0), place), va="center", fontsize=9)
    axis.axvline(0, color=INK, linewidth=0.8)
    axis.margins(x=0.16)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel(f"change in accepted length against the recipe ({recipe:.2f}), %")
    return _drawn(figure)


__all__ = [
    "Drawing",
    "figure_ablations",
    "figure_concurrency",
    "figure_sets",
    "figure_slots",
    "figure_speed",
    "figure_training",
    "styles_of",
]
