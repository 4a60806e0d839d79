"""Tables of a report: rows of text, the first one the titles."""

import re
from pathlib import PurePath

from .report_data import LINKED, PARALLEL, SET_NAMES, WAYS, Run, given_to, tokens_seen
from .report_words import gained, listed, percent, set_gains, with_interval


def table_methods(run: Run, trainings: list[dict]) -> list[list[str]]:
    """Who is compared: how each drafter proposes, its size, and whose code trained it."""
    rows = [["drafter", "how it proposes tokens", "layers", "parameters", "trained by the code of"]]
    packages = {report["name"]: report.get("peer", {}).get("package", "this project") for report in trainings}
    names = list(dict.fromkeys(cell["method"] for cell in run.ranked()))
    for name in names:
        about = run.summary["drafters"].get(name, {})
        config = about.get("config", {})
        linked = config.get("injection") or config.get("refinement")
        way = LINKED if linked else WAYS.get(about.get("kind"), PARALLEL if config else "")
        if linked and any(row[1] == LINKED for row in rows):
            way = f"as {next(row[0] for row in rows if row[1] == LINKED)}"
        size = f"{about['parameters'] / 1e6:.1f} M" if about.get("parameters") else ""
        rows.append(
            [name, way, str(config.get("num_hidden_layers", "")), size, packages.get(name, about.get("package", ""))]
        )
    return without_blank_columns(rows)


def table_lengths(run: Run, temperature: float) -> list[list[str]]:
    """Accepted length per set and mean, all block sizes; the longest of a block size in bold."""
    cells = [cell for size in run.block_sizes for cell in run.ranked(temperature, size)]
    names = run.sets(cells)
    titles = [SET_NAMES.get(name, name) for name in names]
    rows = [["drafter", "block", "mean (95 % interval)", *titles, "by answer", "prompts"]]
    even = len({cell["requests"] for cell in cells}) == 1
    for cell in cells:
        alike, mean = [c for c in cells if c["block_size"] == cell["block_size"]], cell["mean_of_sets"]
        values = [cell["sets"].get(name, {}).get("accepted_length") for name in names]
        most = [max(c["sets"].get(name, {}).get("accepted_length") or 0 for c in alike) for name in names]
        shown = [
            # what reads alike is marked alike
            "" if v is None else f"**{v:.2f}**" if f"{v:.2f}" == f"{m:.2f}" and len(alike) > 1 else f"{v:.2f}"
            for v, m in zip(values, most)
        ]
        length = with_interval(mean["accepted_length"], mean.get("accepted_length_interval"))
        block, requests = str(cell["block_size"] or ""), "" if even else str(cell["requests"])
        rows.append([cell["method"], block, length, *shown, f"{mean['accepted_length_per_request']:.2f}", requests])
    return without_blank_columns(rows)


def table_gains(run: Run, ours: str) -> list[list[str]]:
    """One drafter against all others, by temperature and block size."""
    places = [(t, size) for t in run.temperatures for size in run.block_sizes if run.drafters(t, size)]
    titles = [f"temperature {t:g}" + (f", blocks of {size}" if size else "") for t, size in places]
    rows = {}
    for i, (temperature, size) in enumerate(places):
        for cell in run.ranked(temperature, size):
            for part in run.gains(cell) if cell["method"] == ours else []:
                rows.setdefault(part["over"], [""] * len(places))[i] = gained(part)
    return without_blank_columns([[f"{ours} against", *titles], *([name, *row] for name, row in rows.items())])


def table_set_gains(run: Run, ours: str, temperature: float) -> list[list[str]]:
    """One drafter against all others by set, at the main block size; losses in bold."""
    cells = run.ranked(temperature, run.main_block_size)
    own = next((cell for cell in cells if cell["method"] == ours), None)
    names = [] if own is None else run.sets([own])
    rows = [[f"{ours} against", *(SET_NAMES.get(name, name) for name in names)]]
    for cell in cells:
        if own is not None and cell is not own:
            shares = set_gains(run, own, cell)
            if not shares:
                continue
            text = {name: percent(share) for name, share in shares.items()}
            rows.append(
                [cell["method"], *(f"**{text[n]}**" if shares.get(n, 0) < 0 else text.get(n, "") for n in names)]
            )
    return rows


def table_speed(run: Run) -> list[list[str]]:
    """Every method's speed when it had the machine for itself."""
    rows = [["method", "temperature", "block", "tokens per pass", "tokens/s"]]
    rows[0] += ["against target alone", "against prompt lookup", "against Transformers' loop", "greedy texts equal"]
    order = {"target": 0, "prompt_lookup": 1, "assisted": 2, "drafter": 3}
    for cell in sorted(run.cells, key=lambda c: (c["temperature"], order[c["kind"]], -(c["tokens_per_second"] or 0))):
        ratios = [cell["speed_up"].get(name) for name in ("target", "prompt_lookup", "assisted")]
        exact, tau = cell.get("exactness"), cell.get("mean_of_sets", {}).get("accepted_length")
        faults = f", {exact['faults']} faults" if exact and exact["faults"] else ""
        rows.append(
            [
                cell["method"],
                f"{cell['temperature']:g}",
                str(cell["block_size"] or ""),
                f"{tau:.2f}" if tau else "1" if cell["kind"] == "target" else "",
                f"{cell['tokens_per_second']:,.1f}" if cell["tokens_per_second"] else "",
                *(f"{ratio:.2f}x" if ratio else "" for ratio in ratios),
                f"{exact['equal']} of {exact['compared']}{faults}" if exact else "",
            ]
        )
    return without_blank_columns(rows)


def table_loads(run: Run, temperature: float) -> list[list[str]]:
    """Tokens per second in a server, by method and requests at a time; the fastest of a load in bold."""
    cells = [cell for cell in run.cells if cell["temperature"] == temperature and cell["tokens_per_second"]]
    loads = sorted({cell["concurrency"] for cell in cells})
    most = {load: max(c["tokens_per_second"] for c in cells if c["concurrency"] == load) for load in loads}
    lines: dict[tuple, dict] = {}
    for cell in sorted(cells, key=lambda c: (c["kind"] == "drafter", c["method"], -(c["block_size"] or 0))):
        lines.setdefault((cell["method"], str(cell["block_size"] or "")), {})[cell["concurrency"]] = cell
    rows = [
        [
            "method",
            "block",
            "tokens per pass",
            *(f"{load} request{'s' if load > 1 else ''} at a time" for load in loads),
        ]
    ]
    for key, line in lines.items():
        lengths = [c["mean_of_sets"]["accepted_length"] for c in line.values() if c.get("mean_of_sets")]
        low, high = (f"{value(lengths, default=1):.2f}" for value in (min, max))
        row = [*key, low if low == high else f"{low} to {high}"]
        for load in loads:
            cell = line.get(load)
            ratio = cell and cell["speed_up"].get("target")
            text = f"{cell['tokens_per_second']:,.0f}" if cell else ""
            text = f"**{text}**" if cell and cell["tokens_per_second"] == most[load] else text
            row.append(text + (f" ({ratio:.2f}x)" if ratio else ""))
        rows.append(row)
    return without_blank_columns(rows)


def without_blank_columns(rows: list[list[str]]) -> list[list[str]]:
    keep = [i for i in range(len(rows[0])) if not i or any(row[i] for row in rows[1:])]
    return [[row[i] for i in keep] for row in rows]


# ---- training -------------------------------------------------------------------------------------------------------------------

IGNORED = {
    "architectures",
    "auto_map",
    "dtype",
    "transformers_version",
    "target_name_or_path",
    "injection_layers",
    "layer_types",
}
IGNORED |= {"model_type", "use_cache", "target_revision"}
# told by `settings`
IGNORED |= {
    "block_size",
    "num_hidden_layers",
    "intermediate_size",
    "learning_rate",
    "decay_gamma",
    "seed",
    "max_steps",
}


def settings(report: dict) -> dict[str, str]:
    """What a training run was given, in words; what its `metrics.json` does not hold is left out.

    Tokens are counted with prompts and padding: `tokens_per_batch` a step.
    """
    given, batches = given_to(report)
    drafter, peer = report.get("drafter", {}), report.get("peer")
    seen = tokens_seen(report)
    has_rank = peer["kind"] != "dflash" if peer else drafter.get("injection") or drafter.get("refinement")
    rank = (peer or {}).get("rank", drafter.get("transfer_rank")) if has_rank else "none" if drafter else None
    tokens, blocks = given.get("tokens_per_batch"), given.get("max_anchors")
    result = {
        "steps": f"{report['steps']:,}",
        "tokens per step": tokens and f"{tokens * batches:,}",
        "tokens seen": seen and f"{seen / 1e6:.0f} M",
        "blocks per step": blocks and f"{blocks * batches:,}",
        "block size": drafter.get("block_size"),
        "layers": drafter.get("num_hidden_layers"),
        "MLP width": drafter.get("intermediate_size"),
        "rank of the head": rank,
        "parameters": f"{report['drafter_parameters'] / 1e6:.1f} M",
        "learning rate": given.get("learning_rate"),
        "decay of slot weights (gamma)": given.get("decay_gamma"),
        "seed": given.get("seed"),
    }
    return {k: f"{v:g}" if isinstance(v, float) else str(v) for k, v in result.items() if v is not None}


def equalised(reports: list[dict]) -> tuple[str, list[str]]:
    """Sentences on what all runs had in common, and the names of the settings that they did not or that not all recorded."""
    every = [settings(report) for report in reports]
    names = list(dict.fromkeys(name for part in every for name in part))
    same = [name for name in names if len({part.get(name) for part in every}) == 1]
    words = f"Equal settings of all {len(reports)} runs: {listed([f'{name} {every[0][name]}' for name in same])}."
    files = [[PurePath(path).name for path in r.get("arguments", {}).get("data", {}).get("data", [])] for r in reports]
    silent = [report["name"] for report, part in zip(reports, files) if not part]
    known = [part for part in files if part]
    if known and all(part == known[0] for part in known):
        words += f" Data files: {', '.join(known[0])}" + (
            f"; those of {listed(silent)} are not on record." if silent else "."
        )
    return words, [name for name in names if name not in same]


def differences(reports: list[dict]) -> list[str]:
    """For every training run, what else sets it apart from the first one, in words."""

    def flat(report):
        result = {k: v for k, v in report.get("drafter", {}).items() if k not in IGNORED}
        for part in ("loss", "start", "training"):
            result |= {k: v for k, v in report.get("arguments", {}).get(part, {}).items() if k not in IGNORED}
        return result

    first, words = flat(reports[0]), []
    for report in reports:
        if report.get("peer"):
            words.append(f"model and loss of {report['peer']['package']}")
            continue
        here = flat(report)
        unlike = [k for k in sorted({*first, *here}) if here.get(k) != first.get(k)]
        plain, own = (not (part.get("injection") or part.get("refinement")) for part in (here, first))
        about = []
        if plain and not own:
            # a drafter without either has no guidance and no rank to set
            linking = ("injection", "refinement", "refinement_guidance", "transfer_rank")
            unlike = [k for k in unlike if k not in linking]
            about = ["no injection, no refinement"]
        words.append(", ".join(about + [f"{k} = {here.get(k)}" for k in unlike]))
    return words


def evaluations(reports: list[dict]) -> dict[str, str]:
    """Names of the evaluations' accepted lengths, and what they are called."""
    ending, known = "_accepted_length", {"greedy": "greedy answers", "t1": "answers sampled at temperature 1"}
    names = dict.fromkeys(k for report in reports for k in report["evaluation"] if k.endswith(ending))
    titles = {name: re.sub(r"^eval_?", "", name.removesuffix(ending)) for name in names}
    return {
        name: "tokens per pass" + (f", {known.get(title, title)}" if title else "") for name, title in titles.items()
    }


def table_training(reports: list[dict]) -> list[list[str]]:
    """What differs between runs, and the accepted length walked on every evaluation set."""
    names, (_, unequal) = evaluations(reports), equalised(reports)
    rows = [["run", *unequal, *names.values(), "what else differs"]]
    first = reports[0]["evaluation"]
    for report, words in zip(reports, differences(reports)):
        values = []
        for name in names:
            value = report["evaluation"].get(name)
            text = "" if value is None else f"{value:.2f}"
            if value is not None and report is not reports[0] and first.get(name):
                text += f" ({percent(value / first[name] - 1)})"
            values.append(text)
        has = settings(report)
        rows.append([report["name"], *(has.get(name, "not recorded") for name in unequal), *values, words])
    return without_blank_columns(rows)


def table_ablations(ablations: dict) -> list[list[str]]:
    """Every row of `ablations.json` against the first one, which is the recipe."""
    rows = list(ablations["rows"].values())
    names = evaluations(rows)
    table = [["change", *names.values(), "steps"]]
    for row in rows:
        values = []
        for name in names:
            value, recipe = row["evaluation"].get(name), rows[0]["evaluation"].get(name)
            text = "" if value is None else f"{value:.2f}"
            values.append(
                text + (f" ({percent(value / recipe - 1)})" if value and recipe and row is not rows[0] else "")
            )
        table.append([row["what"], *values, f"{row['steps']:,}" if row.get("steps") else "decoding only"])
    return table


__all__ = [
    "equalised",
    "evaluations",
    "table_ablations",
    "table_gains",
    "table_lengths",
    "table_loads",
    "table_methods",
    "table_set_gains",
    "table_speed",
    "table_training",
]
