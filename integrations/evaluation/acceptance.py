"""Accepted lengths from rounds: means, slot acceptance and bootstrap intervals over requests.

The `evaluate` metric in `examples/acceptance_length` computes the same numbers in a file of its own, since a published metric cannot
import this package; a test holds the two together. What is only here: means over several sets and gains of one drafter over another,
resampled in pairs.
"""

from collections.abc import Mapping, Sequence

import numpy as np


Rounds = Sequence[Sequence[int]]  # by request, the tokens committed in every round, the target's own token included


def slot_counts(lengths: Sequence[int], num_slots: int) -> tuple[np.ndarray, np.ndarray]:
    """How often every predicted slot was reached and accepted in one request, two int64 arrays `[num_slots]`.

    A round of n tokens accepted slots 1..n-1 and rejected slot n. Of the last round only the former is known, because the end of the
    text may have cut it: the slot after its last committed draft is not counted.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    slots = np.arange(num_slots)
    accepted = slots < lengths[:, None] - 1
    reached = slots < lengths[:, None]
    reached[-1:] = accepted[-1:]
    return reached.sum(0), accepted.sum(0)


def lengths_of_histogram(histogram: Sequence[int]) -> list[int]:
    """Round lengths, in no particular order, of a server's histogram: `histogram[i]` rounds accepted i drafts."""
    return [drafts + 1 for drafts, count in enumerate(histogram) for _ in range(count)]


def draws(size: int, num_resamples: int, seed: int) -> np.ndarray:
    """How often every one of `size` requests is in each bootstrap resample, `[num_resamples, size]`."""
    return np.random.default_rng(seed).multinomial(size, np.full(size, 1 / size), size=num_resamples)


def interval(samples: np.ndarray, confidence: float = 0.95) -> list[float] | None:
    """Percentile interval of one quantity's resamples; None if it exists in none of them."""
    samples = samples[~np.isnan(samples)]
    if not len(samples):
        return None
    tail = (1 - confidence) / 2
    return [float(value) for value in np.quantile(samples, [tail, 1 - tail])]


def summarise(
    rounds: Rounds, block_size: int | None = None, confidence: float = 0.95, num_resamples: int = 1000, seed: int = 0
) -> dict:
    """Everything the metric reports, under the same keys.

    Raises:
        ValueError: no request has a round.
    """
    used = [np.asarray(lengths, dtype=np.int64) for lengths in rounds if len(lengths)]
    if not used:
        raise ValueError(f"rounds must hold at least one round, got {len(rounds)} requests without any")
    num_slots = int(max(map(np.max, used)) if block_size is None else block_size) - 1
    tokens, counts_of = np.array([lengths.sum() for lengths in used]), np.array([len(lengths) for lengths in used])
    slots = np.array([slot_counts(lengths, num_slots) for lengths in used])  # [requests, 2, slots]
    reached, accepted = slots.sum(0)
    result = {
        "accepted_length": float(tokens.sum() / counts_of.sum()),
        "accepted_length_per_request": float((tokens / counts_of).mean()),
        "slot_acceptance": [float(a / r) if r else None for a, r in zip(accepted, reached)],
        "slot_reached": reached.tolist(),
        "slot_accepted": accepted.tolist(),
        "requests": len(rounds),
        "requests_without_rounds": len(rounds) - len(used),
        "rounds": int(counts_of.sum()),
        "tokens": int(tokens.sum()),
    }
    if num_resamples:
        drawn = draws(len(used), num_resamples, seed)
        result["accepted_length_interval"] = interval((drawn @ tokens) / (drawn @ counts_of), confidence)
        per_request = drawn @ (tokens / counts_of) / len(used)
        result["accepted_length_per_request_interval"] = interval(per_request, confidence)
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = (drawn @ slots[:, 1]) / (drawn @ slots[:, 0])
        result["slot_acceptance_interval"] = [interval(column, confidence) for column in shares.T]
    return result


def _resampled(rounds: Sequence[Sequence[int]], drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pooled and per-request length of every resample; `[resamples]` each. Requests without rounds count in neither."""
    tokens = np.array([sum(lengths) for lengths in rounds], dtype=float)
    counts = np.array([len(lengths) for lengths in rounds], dtype=float)
    means = np.divide(tokens, counts, out=np.zeros_like(tokens), where=counts > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return (drawn @ tokens) / (drawn @ counts), (drawn @ means) / (drawn @ (counts > 0))


def mean_over_sets(
    sets: Mapping[str, Rounds], confidence: float = 0.95, num_resamples: int = 1000, seed: int = 0
) -> dict:
    """The unweighted mean over sets of their accepted lengths, with intervals from resampling requests within every set."""
    whole = [_resampled(rounds, np.ones((1, len(rounds)))) for rounds in sets.values()]
    parts = [_resampled(r, draws(len(r), num_resamples, seed + i)) for i, r in enumerate(sets.values())]
    result = {"sets": len(sets)}
    for which, name in enumerate(("accepted_length", "accepted_length_per_request")):
        result[name] = float(np.mean([part[which][0] for part in whole]))
        if num_resamples:
            result[f"{name}_interval"] = interval(np.mean([part[which] for part in parts], axis=0), confidence)
    return result


def gain(
    ours: Mapping[str, Mapping[object, Sequence[int]]],
    theirs: Mapping[str, Mapping[object, Sequence[int]]],
    confidence: float = 0.95,
    num_resamples: int = 1000,
    seed: int = 0,
) -> dict:
    """Relative gain of `ours` over `theirs` in the mean over sets, on the requests that both have.

    Args:
        ours, theirs: `{set: {request: rounds}}`. Both drafters are resampled with the same requests, so what makes a prompt easy for
            both cancels.

    Raises:
        ValueError: the two share no set or no request.
    """
    shared = {name: sorted(set(ours[name]) & set(theirs[name]), key=str) for name in ours if name in theirs}
    shared = {name: keys for name, keys in shared.items() if keys}
    if not shared:
        raise ValueError("the two drafters must have requests in common to be compared, got none")
    result = {"sets": len(shared), "requests": sum(map(len, shared.values()))}
    sampled, whole = [], []
    for i, (name, keys) in enumerate(shared.items()):
        drawn, once = draws(len(keys), num_resamples, seed + i), np.ones((1, len(keys)))
        pair = [[side[name][key] for key in keys] for side in (ours, theirs)]
        sampled.append([_resampled(rounds, drawn) for rounds in pair])
        whole.append([_resampled(rounds, once) for rounds in pair])
    for which, name in enumerate(("accepted_length", "accepted_length_per_request")):
        ratio = [np.mean([part[side][which] for part in whole], axis=0) for side in (0, 1)]
        result[name] = float(ratio[0][0] / ratio[1][0] - 1)
        if num_resamples:
            means = [np.mean([part[side][which] for part in sampled], axis=0) for side in (0, 1)]
            result[f"{name}_interval"] = interval(means[0] / means[1] - 1, confidence)
    return result


__all__ = ["draws", "gain", "interval", "lengths_of_histogram", "mean_over_sets", "slot_counts", "summarise"]
