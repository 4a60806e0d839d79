"""Tables of a report: rows of text, the first one the titles."""

import re

from .report_data import SET_NAMES, Run, shown
from .report_words import percent, with_interval


def table_lengths(run: Run, temperature: float) -> list[list[str]]:
    """Accepted length per set and mean, all block sizes; the longest of a block size in bold."""
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
        alike = [c for c in cells if c["block_size"] == cell["block_size"]]
        several = len(alike) > 1
        most = {n: max(c["sets"].get(n, {}).get("accepted_length") or 0 for c in alike) for n in names}
        rows.append(
            [
                cell["method"],
                str(cell["block_size"] or ""),
                *(
                    "" if value is None else f"**{value:.2f}**" if value == most[name] and several else f"{value:.2f}"
                    for name, value in zip(names, values)
                ),
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
            "against Transformers' loop",
            "greedy texts equal",
        ]
    ]
    order = {"target": 0, "prompt_lookup": 1, "assisted": 2, "drafter": 3}
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
        ratios = [cell["speed_up"].get(name) for name in ("target", "prompt_lookup", "assisted")]
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
    """The longest-accepted drafter of every temperature, block size and load against all others."""
    rows = [["drafter", "against", "T", "block", "gain in accepted length", "95 % interval", "prompts compared"]]
    names = ("temperature", "block_size", "concurrency")
    best = {}
    for cell in run.ranked():
        best.setdefault(tuple(cell[name] for name in names), cell["method"])
    gains = [part for part in run.summary.get("gains", []) if best[tuple(part[n] for n in names)] == part["method"]]
    for part in sorted(gains, key=lambda p: (p["temperature"], -(p["block_size"] or 0), p["accepted_length"])):
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
        if report.get("peer"):
            words.append(f"{report['peer']['kind']} of {report['peer']['package']}: model and loss of its own")
            continue
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


__all__ = ["differences", "table_gains", "table_lengths", "table_speed", "table_training"]
