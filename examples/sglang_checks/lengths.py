"""Accepted lengths of answers that carry `tokens` and `rounds`, of one set and over sets."""

import statistics


def lengths_of(texts: list[dict]) -> dict:
    """Accepted length of answers with `tokens` (how many) and `rounds`: pooled, and the mean of the requests' own."""
    used = [text for text in texts if text["rounds"]]
    if not used:
        return {}
    # the token of the prefill belongs to no round
    pooled = sum(text["tokens"] - 1 for text in used) / sum(text["rounds"] for text in used)
    means = [(text["tokens"] - 1) / text["rounds"] for text in used]
    return {"accepted_length": pooled, "accepted_length_per_request": statistics.mean(means), "requests": len(used)}


def summary_of(sets: dict[str, list[dict]]) -> dict:
    """Accepted lengths by set, over all requests, and as the mean of the sets."""
    by_set = {name: lengths_of(texts) for name, texts in sets.items()}
    measured = [part for part in by_set.values() if part]
    if not measured:
        return {"sets": by_set}
    keys = ("accepted_length", "accepted_length_per_request")
    mean = {key: statistics.mean(part[key] for part in measured) for key in keys}
    return {"all": lengths_of(sum(sets.values(), [])), "mean_of_sets": mean, "sets": by_set}
