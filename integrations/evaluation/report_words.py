"""Sentences of a report: which drafter to use and why, whether goals are met, where it loses, what load does. They follow from the numbers."""

import math

from .report_data import FEWEST_ROUNDS, SET_NAMES, Goal, Run, tokens_seen


# a difference in speed that is not worth a word
CLOSE = 0.02


def span(interval) -> str:
    return "" if not interval else f"{interval[0]:.2f} to {interval[1]:.2f}"


def percent(share: float) -> str:
    return f"{round(share, 3) + 0.0:+.1%}".replace("%", " %").replace("-", "−")


def with_interval(value: float, interval) -> str:
    return f"{value:.2f}" + (f" ({span(interval)})" if interval else "")


def gained(part: dict) -> str:
    """A gain with its interval, e.g. `+8.1 % (+6.9 to +9.3)`."""
    low, high = part.get("accepted_length_interval") or (None, None)
    text = percent(part["accepted_length"])
    return text + ("" if low is None else f" ({percent(low)} to {percent(high)})".replace(" %", ""))


def listed(parts: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def ranges(numbers: list[int]) -> str:
    """Numbers in words, neighbours together: `1 to 4, 6 and 9`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return listed(
        [
            f"{p[0]} to {p[-1]}" if len(p) > 2 else listed([str(n) for n in p]) if len(p) == 1 else f"{p[0]}, {p[1]}"
            for p in parts
        ]
    )


def is_unclear(part: dict | None) -> bool:
    """Whether a gain's interval holds zero."""
    interval = part and part.get("accepted_length_interval")
    return bool(interval) and interval[0] <= 0 <= interval[1]


def in_blocks(cell: dict) -> str:
    return f"blocks of {cell['block_size']}" if cell["block_size"] else "blocks of the server's size"


def fastest(run: Run, temperature: float) -> tuple[list[dict], dict[int | None, dict]]:
    """The cells of the drafter and block size that are fastest on the geometric mean over loads, and the fastest cell of every load."""
    cells = [cell for cell in run.drafters(temperature) if cell["tokens_per_second"]]
    lines, winners = {}, {}
    for cell in sorted(cells, key=lambda cell: cell["concurrency"] or 0):
        lines.setdefault((cell["method"], cell["block_size"]), []).append(cell)
        best = winners.setdefault(cell["concurrency"], cell)
        winners[cell["concurrency"]] = max(best, cell, key=lambda c: c["tokens_per_second"])
    whole = [line for line in lines.values() if len(line) == len(winners)] or list(lines.values())
    speed = lambda line: sum(math.log(cell["tokens_per_second"]) for cell in line) / len(line)  # noqa: E731
    return max(whole, key=speed, default=[]), winners


def timing(timed: Run, longest: dict) -> tuple[str, str, list[str]]:
    """What the clock says about the longest accepted drafter.

    Returns:
        the drafter to use for speed where it is another one, how the longest accepted one does, and sentences; "target" in place of the
        first where nothing is faster than the target alone.
    """
    name, temperatures = longest["method"], sorted({cell["temperature"] for cell in timed.drafters()})
    temperature = longest["temperature"] if longest["temperature"] in temperatures else temperatures[0]
    line, winners = fastest(timed, temperature)
    if not line:
        return "", "", []
    points, ratios = [], []
    for load, cell in winners.items():
        ratio = cell["speed_up"].get("target")
        ratios += [ratio] if ratio else []
        points.append(
            (f"{load}: " if load else "")
            + f"{cell['method']}, {in_blocks(cell)}"
            + (f" ({ratio:.2f} times)" if ratio else "")
        )
    where = f"In the server on {timed.device}" if timed.is_served else f"Decoding with Transformers on {timed.device}"
    loads = ", by requests at a time" if any(winners) else ""
    against = " (in brackets: how many times as fast as the target alone)" if ratios else ""
    sentences = [f"{where} at temperature {temperature:g}, the fastest drafter{against}{loads}: {'; '.join(points)}."]
    behind = {}
    for cell in timed.drafters(temperature):
        if cell["method"] == name and cell["tokens_per_second"]:
            gap = winners[cell["concurrency"]]["tokens_per_second"] / cell["tokens_per_second"] - 1
            behind[cell["concurrency"]] = min(gap, behind.get(cell["concurrency"], gap))
    worst, names = max(behind.values(), default=0), {cell["method"] for cell in winners.values()}
    if not behind:
        sentences.append(
            f"{name} was not timed there; {listed(sorted({c['method'] for c in timed.drafters()}))} were."
        )
    elif worst > CLOSE:
        sentences.append(
            f"Where another drafter is faster, {name} is up to {100 * worst:.0f} % behind: it commits more tokens per pass, but its pass costs more."
        )
    lookup = max((cell["speed_up"].get("prompt_lookup", 0) for cell in line), default=0)
    if lookup:
        verdict = ", so that was faster" if lookup < 1 else ""
        sentences.append(
            f"Against Transformers' own prompt lookup, which needs no drafter, the factor is {lookup:.2f}{verdict}."
        )
    how = (
        ""
        if not behind
        else "is the fastest" + (" at every load" if len(winners) > 1 else "")
        if names == {name}
        else "nothing measured is clearly faster"
        if worst <= CLOSE
        else "is the fastest over all loads together"
    )
    other = line[0]["method"] if behind and line[0]["method"] != name and worst > CLOSE else ""
    return "target" if ratios and max(ratios) < 1 else other, how, sentences


def against_others(run: Run, cell: dict) -> list[str]:
    """A drafter against all others in its place, the nearest first; what cannot be told apart in a sentence of its own."""
    clear, unclear = [], []
    for part in run.gains(cell):
        if is_unclear(part):
            unclear.append(f"{part['over']}, {gained(part)}")
        else:
            clear.append(f"{gained(part)} over {part['over']}")
    sentences = []
    if clear:
        sentences.append(f"On the same prompts that is {listed(clear)}; in brackets 95 % intervals.")
    if unclear:
        sentences.append(f"Within what other prompts could have changed: the difference to {listed(unclear)}.")
    return sentences


def unequal_training(trainings: list[dict], name: str) -> str:
    """That the drafter to use was trained on more tokens, or fewer, than others; empty if all saw the same."""
    seen = {report["name"]: tokens_seen(report) for report in trainings}
    own = seen.pop(name, None)
    others = sorted(value for value in seen.values() if value is not None)
    if own is None or not others or all(abs(value / own - 1) < 0.01 for value in others):
        return ""
    low, high = (f"{value / 1e6:.0f}" for value in (others[0], others[-1]))
    rest = low if low == high else f"{low} to {high}"
    return f"**Not trained alike:** {name} saw {own / 1e6:.0f} M tokens in training, the others {rest} M; the section on training has the details."


def conclusion(
    run: Run, timed: Run | None = None, goals: list[Goal] | None = None, trainings: list[dict] | None = None
) -> list[str]:
    """Which drafter to use and why, as sentences; at T=0, or the lowest temperature measured.

    Args:
        timed: the run whose clock counts; `run` itself where its processes had their devices for themselves.
        trainings: `metrics.json` of drafters, to say whether they were trained alike.
    """
    if not run.drafters():
        return ["No drafter was measured in this run."]
    timed = timed or (None if run.is_crowded else run)
    temperature = run.lowest_temperature
    firsts = [cells[0] for size in run.block_sizes if (cells := run.ranked(temperature, size))]
    longest = max(firsts, key=lambda cell: cell["mean_of_sets"]["accepted_length"])
    mean = longest["mean_of_sets"]
    several = len({cell["method"] for cell in run.drafters(temperature)}) > 1
    faster, how, clock = timing(timed, longest) if timed else ("", "", [])
    sets = "the one set measured" if mean["sets"] == 1 else f"the mean of {mean['sets']} benchmark sets"
    interval = mean.get("accepted_length_interval")
    figures = (
        f"proposing {in_blocks(longest)}, it lets the target commit **{mean['accepted_length']:.2f} tokens per pass** at temperature "
        f"{temperature:g} ({sets}{f'; 95 % interval {span(interval)}' if interval else ''}); without a drafter it is 1.00."
    )
    name = longest["method"]
    sentences = []
    if faster == "target":
        sentences.append(
            "**No drafter pays on this machine**: the target alone is faster, because a pass over a block costs it more than the tokens saved."
        )
        sentences.append(f"{'Of those measured, ' if several else ''}**{name}** drafts best: {figures}")
    elif faster:
        sentences.append(f"**Use {faster}**: it gives the most tokens per second. **{name}** drafts best: {figures}")
    elif several:
        why = "It drafts best" + (f" and {how}" if how else "")
        sentences.append(f"**Use {name}.** {why}: {figures}")
    else:
        sentences.append(f"**{name}** was measured alone: {figures}")
    sentences += against_others(run, longest) + clock
    if run.is_crowded and not clock:
        sentences.append(
            "**There is no usable measurement of speed here**, since processes shared their devices: these are counts of the target's passes. "
            "Drafting costs time too, the more the larger the drafter."
        )
    if unequal := unequal_training(trainings or [], longest["method"]):
        sentences.append(unequal)
    for other in (t for t in run.temperatures if t > temperature and run.drafters(t)):
        first = run.ranked(other, longest["block_size"])[0]
        same = "again" if first["method"] == name else "then"
        near = [part["over"] for part in run.gains(first) if is_unclear(part)]
        length = first["mean_of_sets"]["accepted_length"]
        sentences.append(
            f"At temperature {other:g}, where the target samples, the best is {same} {first['method']} with {length:.2f} tokens per pass"
            + (f", not to be told apart from {listed(near)}." if near else ".")
        )
    judged = goal_results(run, goals or [])
    for goal, part in judged:
        met = part["accepted_length"] >= goal.share
        sentences.append(
            f"**The goal for {goal.ours}, {100 * goal.share:+g} % over {rivals(goal)}, is {'met' if met else 'not met'}** (temperature {temperature:g}, {in_blocks(part)}): it is at {gained(part)}"
            + ("." if len(goal.others) == 1 else f" over the best of them, {part['over']}.")
        )
    return sentences + [exactness(run)] * bool(exactness(run))


def exactness(run: Run) -> str:
    exact = [cell["exactness"] for cell in run.cells if cell.get("exactness") and cell["kind"] == "drafter"]
    if not exact:
        return ""
    faults, compared, equal = (sum(e[name] for e in exact) for name in ("faults", "compared", "equal"))
    widest = max(e["largest_gap"] for e in exact)
    if faults:
        counts: dict[str, int] = {}
        for cell in run.cells:
            if cell["kind"] == "drafter" and (cell.get("exactness") or {}).get("faults"):
                counts[cell["method"]] = counts.get(cell["method"], 0) + cell["exactness"]["faults"]
        whose = listed([f"{number} of {name}" for name, number in counts.items()])
        return (
            f"**Careful:** {faults:,} of {compared:,} greedy answers ({whose}) leave the target's own text where no two tokens were nearly tied (up "
            f"to {widest:.2f} logits apart in fp32). A target in low precision can round that far, a faulty drafter or loop would look the same: "
            "decode these prompts in float32, where texts must agree."
        )
    if equal == compared:
        return f"The text does not change: all {compared:,} greedy answers compared are the target's own, token for token."
    return (
        f"The text does not change but for rounding: {equal:,} of {compared:,} greedy answers are the target's own token for token; the others part "
        f"where two tokens are nearly tied (at most {widest:.2f} logits apart in fp32)."
    )


def rivals(goal: Goal) -> str:
    return goal.others[0] if len(goal.others) == 1 else f"the best of {listed(list(goal.others))}"


def goal_results(run: Run, goals: list[Goal]) -> list[tuple[Goal, dict]]:
    """Every goal with the gain over its nearest rival, at the lowest temperature and the main block size."""
    cells = {cell["method"]: cell for cell in run.ranked(run.lowest_temperature, run.main_block_size)}
    parts = [
        (goal, [g for g in run.gains(cells[goal.ours]) if g["over"] in goal.others])
        for goal in goals
        if goal.ours in cells
    ]
    return [(goal, gains[0]) for goal, gains in parts if gains]


def set_gains(run: Run, ours: dict, other: dict) -> dict[str, float]:
    """Relative gain in accepted length by set; empty if one of the two was measured on prompts that the other lacks."""
    shared = next((part["requests"] for part in run.gains(ours) if part["over"] == other["method"]), None)
    if {ours["requests"], other["requests"]} != {shared}:
        return {}
    return {
        name: ours["sets"][name]["accepted_length"] / other["sets"][name]["accepted_length"] - 1
        for name in run.sets([ours])
        if all("accepted_length" in cell["sets"].get(name, {}) for cell in (ours, other))
    }


def by_slot(ours: dict, other: dict) -> str:
    """Where in the block a drafter is behind and where ahead of another, of slots where the intervals do not overlap."""
    names = ("slot_acceptance", "slot_reached", "slot_acceptance_interval")
    columns = [zip(*(cell.get("all", {}).get(name, []) for name in names)) for cell in (ours, other)]
    shares, behind, ahead = {}, [], []
    for slot, ((a, n, mine), (b, m, theirs)) in enumerate(zip(*columns), 1):
        if min(n, m) < FEWEST_ROUNDS or not mine or not theirs:
            continue
        shares[slot] = a - b
        if mine[1] < theirs[0]:
            behind.append(slot)
        elif mine[0] > theirs[1]:
            ahead.append(slot)
    if not behind and not ahead:
        return "At no single slot do the two differ clearly." if shares else ""
    clear = []
    for word, slots, extreme in (("ahead", ahead, max), ("behind", behind, min)):
        if slots:
            most = extreme(slots, key=shares.get)
            points = f"{100 * shares[most]:+.1f} points".replace("-", "−")
            most = points if len(slots) == 1 else f"most at {most}, {points}"
            clear.append(f"{word} at slot{'s' * (len(slots) > 1)} {ranges(slots)} ({most})")
    return f"By slot, where intervals do not overlap, {ours['method']} is {listed(clear)}."


def where_it_loses(run: Run, ours: str, goals: list[Goal]) -> list[str]:
    """By set and slot, against the nearest rival and the nearest one of every goal that is not met, at every temperature."""
    judged = [(goal, part) for goal, part in goal_results(run, goals) if goal.ours == ours]
    missed = [(goal, part["over"]) for goal, part in judged if part["accepted_length"] < goal.share]
    shares_to_reach = {rival: goal.share for goal, rival in missed}
    sentences = []
    for temperature in run.temperatures:
        cells = {cell["method"]: cell for cell in run.ranked(temperature, run.main_block_size)}
        cell = cells.pop(ours, None)
        order = [] if cell is None else [part["over"] for part in run.gains(cell) if part["over"] in cells]
        rivals = [next((name for name in order if name in goal.others), None) for goal, _ in missed]
        for name in dict.fromkeys(name for name in [*order[:1], *rivals] if name is not None):
            shares = set_gains(run, cell, cells[name])
            keys = sorted(shares, key=shares.get)
            if not keys:
                words = "not compared by set and slot, since each was measured on prompts that the other lacks."
                sentences.append(f"**{ours} against {name} at temperature {temperature:g}:** {words}")
                continue
            said = {key: f"{SET_NAMES.get(key, key)} ({percent(shares[key])})" for key in keys}
            lost = [said[key] for key in keys if shares[key] < 0]
            words = (
                f"it is behind on {listed(lost)}"
                if lost
                else f"it is behind on no set and gains least on {said[keys[0]]}"
            )
            goal = shares_to_reach.get(name) if temperature == run.lowest_temperature else None
            below = [key for key in keys if goal is not None and shares[key] < goal]
            if below:
                which = "every set" if len(below) == len(keys) else listed([SET_NAMES.get(key, key) for key in below])
                words += f", below the goal of {100 * goal:+g} % on {which}"
            words += f"; it gains most on {said[keys[-1]]}. {by_slot(cell, cells[name])}"
            sentences.append(f"**{ours} against {name} at temperature {temperature:g}:** {words}")
    return sentences


def gaps(run: Run) -> str:
    """What is missing of the run: drafters without a temperature or block size that others have, or with fewer prompts."""
    cells = run.drafters()
    places = {(t, size) for t in run.temperatures for size in run.block_sizes if run.drafters(t, size)}
    most = {place: max(cell["requests"] for cell in run.drafters(*place)) for place in places}
    words: dict[tuple, list[str]] = {}
    for method in dict.fromkeys(cell["method"] for cell in cells):
        for temperature, size in sorted(places, key=lambda place: (place[0], -(place[1] or 0))):
            own = [c["requests"] for c in run.drafters(temperature, size) if c["method"] == method]
            if not own or min(own) < most[temperature, size]:
                why = f"{min(own)} of {most[temperature, size]} prompts" if own else "not measured"
                where = f"temperature {temperature:g}" + (f" with blocks of {size}" if size else "")
                words.setdefault((method, why), []).append(where)
    if not words:
        return ""
    missing = "; ".join(f"{method} at {listed(where)} ({why})" for (method, why), where in words.items())
    return (
        f"**Some measurements are missing**: {missing}. Comparisons use the prompts that both drafters have; single lengths of drafters "
        "with other prompts are not comparable."
    )


__all__ = [
    "conclusion",
    "gained",
    "gaps",
    "goal_results",
    "listed",
    "percent",
    "rivals",
    "set_gains",
    "span",
    "where_it_loses",
    "with_interval",
]
