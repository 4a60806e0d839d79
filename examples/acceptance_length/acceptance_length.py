"""Accepted length of speculative decoding: tokens committed per verification round, with intervals over requests."""

# one import per line: the loader of `evaluate` reads them line by line
import datasets
import evaluate
import numpy as np


_DESCRIPTION = """\
Accepted length of speculative decoding: how many tokens one verification pass of the target commits on average, the target's own
token included. 1 means that no draft was ever accepted; the most is the block size. Pooled (tokens / rounds) and as the mean of the
requests' own means, with the conditional acceptance of every slot, and bootstrap confidence intervals over requests.
"""

_KWARGS_DESCRIPTION = """\
Args:
    predictions (list of list of int): for every request, the tokens that each round committed, the target's own token included. The
        token of the prefill belongs to no round.
    block_size (int, optional): slots of a block, the anchor included, so that a round commits at most this many tokens. Default:
        the largest round seen.
    slot_reached, slot_accepted (list of int, optional): counts of every predicted slot as the decoder kept them, in place of those
        derived from `predictions`. The last round of a request is only partly known from its length: whether the slot after the
        last committed draft was accepted cannot be told there, so that slot is not counted.
    confidence (float): of the intervals. Default 0.95.
    num_resamples (int): of the bootstrap; 0 leaves the intervals out. Default 1000.
    seed (int): of the bootstrap. Default 0.
Returns:
    accepted_length (float): tokens / rounds over all requests.
    accepted_length_per_request (float): mean of every request's tokens / rounds.
    slot_acceptance (list of float): of predicted slots 1, 2, ..., the share of rounds in which the slot was accepted among those in
        which all slots before it were; None where a slot was never reached.
    slot_reached, slot_accepted (list of int): the counts behind it.
    accepted_length_interval, accepted_length_per_request_interval (list of two floats), slot_acceptance_interval (list of those).
    requests, requests_without_rounds, rounds, tokens (int): what was counted.
Examples:
    >>> metric = evaluate.load("acceptance_length")
    >>> results = metric.compute(predictions=[[4, 1, 3], [2, 2]], block_size=4, num_resamples=0)
    >>> round(results["accepted_length"], 2), round(results["accepted_length_per_request"], 2)
    (2.4, 2.33)
"""

_CITATION = """\
@inproceedings{leviathan2023fast,
    title={Fast Inference from Transformers via Speculative Decoding},
    author={Leviathan, Yaniv and Kalman, Matan and Matias, Yossi},
    booktitle={International Conference on Machine Learning},
    year={2023}
}
"""


def slot_counts(lengths, num_slots):
    """How often every predicted slot was reached and accepted in one request.

    Args:
        lengths: `[rounds]` tokens committed.
        num_slots: predicted slots of a block.

    Returns:
        Two int64 arrays `[num_slots]`.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    slots = np.arange(num_slots)
    accepted = slots < lengths[:, None] - 1
    # the round was ended by the first slot that was not accepted, except in the last one, which the end of the text may have cut
    reached = slots < lengths[:, None]
    reached[-1:] = accepted[-1:]
    return reached.sum(0), accepted.sum(0)


def _ratio(numerator, denominator):
    with np.errstate(divide="ignore", invalid="ignore"):
        return numerator / denominator


def _interval(samples, confidence):
    """Percentile interval `[2]` along the first axis, over the resamples in which the quantity exists."""
    samples = samples[~np.isnan(samples)]
    if not len(samples):
        return None
    tail = (1 - confidence) / 2
    return [float(value) for value in np.quantile(samples, [tail, 1 - tail])]


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class AcceptanceLength(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            module_type="metric",
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features({"predictions": datasets.Sequence(datasets.Value("int32"))}),
            reference_urls=["https://arxiv.org/abs/2211.17192"],
        )

    def _compute(
        self,
        predictions,
        block_size=None,
        slot_reached=None,
        slot_accepted=None,
        confidence=0.95,
        num_resamples=1000,
        seed=0,
    ):
        rounds_of = [np.asarray(lengths, dtype=np.int64) for lengths in predictions]
        used = [lengths for lengths in rounds_of if len(lengths)]
        if not used:
            raise ValueError(f"predictions must hold at least one round, got {len(rounds_of)} requests without any")
        smallest, largest = min(map(np.min, used)), max(map(np.max, used))
        if smallest < 1:
            raise ValueError(f"every round commits at least one token, got a round of {smallest} in predictions")
        if block_size is not None and largest > block_size:
            raise ValueError(f"a round commits at most block_size={block_size} tokens, got a round of {largest}")
        if not 0 < confidence < 1:
            raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
        num_slots = int(largest if block_size is None else block_size) - 1
        tokens = np.array([lengths.sum() for lengths in used])
        rounds = np.array([len(lengths) for lengths in used])
        counts = np.array([slot_counts(lengths, num_slots) for lengths in used])  # [requests, 2, slots]
        exact = slot_reached is not None or slot_accepted is not None
        if exact:
            if slot_reached is None or slot_accepted is None or len(slot_reached) != len(slot_accepted):
                raise ValueError("slot_reached and slot_accepted must be given together and have the same length")
            reached, accepted = np.asarray(slot_reached), np.asarray(slot_accepted)
        else:
            reached, accepted = counts.sum(0)
        result = {
            "accepted_length": float(tokens.sum() / rounds.sum()),
            "accepted_length_per_request": float((tokens / rounds).mean()),
            "slot_acceptance": [float(a / r) if r else None for a, r in zip(accepted, reached)],
            "slot_reached": reached.tolist(),
            "slot_accepted": accepted.tolist(),
            "requests": len(rounds_of),
            "requests_without_rounds": len(rounds_of) - len(used),
            "rounds": int(rounds.sum()),
            "tokens": int(tokens.sum()),
        }
        if num_resamples:
            size = len(used)
            # how often each request is drawn is all that a resample needs: [resamples, requests]
            drawn = np.random.default_rng(seed).multinomial(size, np.full(size, 1 / size), size=num_resamples)
            result["accepted_length_interval"] = _interval((drawn @ tokens) / (drawn @ rounds), confidence)
            result["accepted_length_per_request_interval"] = _interval(drawn @ (tokens / rounds) / size, confidence)
            if not exact:  # whose counts are not known by request
                shares = _ratio(drawn @ counts[:, 1], drawn @ counts[:, 0])
                result["slot_acceptance_interval"] = [_interval(column, confidence) for column in shares.T]
        return result
