"""Sentences of a report: which drafter to use and why, where it gains, and what load does to it. They follow from the numbers alone."""

from .report_data import FEWEST_ROUNDS, SET_NAMES, Run


def span(interval) -> str:
    return "" if not interval else f"{interval[0]:.2f} to {interval[1]:.2f}"


def percent(share: float) -> str:
    return f"{share:+.1%}".replace("%", " %")


def with_interval(value: float, interval) -> str:
    return f"{value:.2f}" + (f" ({span(interval)})" if interval else "")


def counterpart(cell: dict, timed: Run | None) -> dict | None:
    """The cell of the same drafter, temperature and block size in another run, or the same drafter's first one there."""
    cells = [] if timed is None else [c for c in timed.drafters() if c["method"] == cell["method"]]
    names = ("temperature", "block_size")
    return next((c for c in cells if all(c[n] == cell[n] for n in names)), cells[0] if cells else None)


def gain_sentences(run: Run, cell: dict) -> list[str]:
    """A drafter against all others at its temperature and block size, the nearest first; what cannot be told apart in a sentence of
    its own."""
    names = ("method", "temperature", "block_size", "concurrency")
    gains = [g for g in run.summary.get("gains", []) if all(g[name] == cell[name] for name in names)]
    clear, unclear = [], []
    for gained in sorted(gains, key=lambda g: g["accepted_length"]):
        share, interval = gained["accepted_length"], gained.get("accepted_length_interval")
        words = f"{abs(share):.1%} {'more' if share >= 0 else 'less'} than {gained['over']}".replace("%", " %")
        words += f" ({percent(interval[0])} to {percent(interval[1])})" if interval else ""
        (unclear if interval and interval[0] <= 0 <= interval[1] else clear).append(words)
    sentences = []
    if clear:
        sentences.append(f"That is {', '.join(clear)}: 95 % intervals, on the same prompts.")
    if unclear:
        sentences.append(f"These few prompts cannot tell apart from no difference: {', '.join(unclear)}.")
    return sentences


def conclusion(run: Run, timed: Run | None = None) -> list[str]:
    """Which drafter to use and why, as sentences; at T=0, or the lowest temperature measured.

    Args:
        timed: the run whose clock counts where `run` had its processes share devices.
    """
    if not run.is_crowded:
        timed = run
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
    clocked = counterpart(longest, timed)
    rivals = [] if clocked is None else timed.drafters(clocked["temperature"])
    rivals = [cell for cell in rivals if (cell["concurrency"] or 1) == (clocked["concurrency"] or 1)]
    fastest = max(rivals, key=lambda cell: cell["tokens_per_second"] or 0, default=None)
    mean, sets = longest["mean_of_sets"], longest["mean_of_sets"]["sets"]
    where = f"at temperature {temperature:g}"
    over = "on the one set measured" if sets == 1 else f"averaged over {sets} benchmark sets"
    block = f"in blocks of {longest['block_size']}" if longest["block_size"] else "per block"
    sentences = []
    several = len({cell["method"] for cell in cells}) > 1
    ratios = [cell["speed_up"]["target"] for cell in rivals if cell["speed_up"].get("target")]
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
    sentences += gain_sentences(run, longest)
    speed_up = clocked and clocked["speed_up"].get("target")
    if speed_up:
        device = timed.summary["versions"].get("device", "this machine")
        verdict = (
            f"{speed_up:.2f} times as fast as" if speed_up >= 1 else f"slower than ({speed_up:.2f} times the speed of)"
        )
        sentences.append(f"Measured on {device}, decoding with it is {verdict} the target alone.")
        lookup = clocked["speed_up"].get("prompt_lookup")
        if lookup:
            sentences.append(
                f"Against Transformers' own prompt lookup, which needs no drafter, the factor is {lookup:.2f}{', so that was faster' if lookup < 1 else ''}."
            )
    if fastest is not clocked and fastest["tokens_per_second"] and clocked["tokens_per_second"]:
        margin = fastest["tokens_per_second"] / clocked["tokens_per_second"] - 1
        if margin > 0.02:
            sentences.append(
                f"The fastest drafter was {fastest['method']} in blocks of {fastest['block_size']}, ahead by {100 * margin:.0f} % in tokens per second"
                + (
                    ": where a pass over more slots costs noticeably more, shorter blocks win although fewer tokens are accepted."
                    if (fastest["block_size"] or 0) < (clocked["block_size"] or 0)
                    else "."
                )
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


__all__ = ["conclusion", "counterpart", "load_sentence", "percent", "span", "weakest", "with_interval"]
