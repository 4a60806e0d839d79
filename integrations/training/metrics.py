"""Accepted length as serving will see it, measured on stored answers without decoding.

For a text that the target wrote greedily, a verification round accepts exactly the drafted tokens that equal the text. So every
response position is tried as an anchor in a few large packed passes, giving a table of accepted drafts per position; walking that
table from the first response token, as decoding would, gives the rounds. On greedy texts this equals real greedy decoding (up to
near-ties of low precision); on sampled texts it says how often greedy drafts match the sample.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from dspine.modeling_dspine.registry_dspine import use_implementation

from .data import PackedDataset, anchor_positions
from .masks import slot_masks
from .objective import block_labels, draft_packed


@dataclass
class WalkStatistics:
    """Sums over walks; additive, so that processes can add theirs up.

    Slots 1..B-1: `reached` counts rounds in which all earlier slots were accepted and the text went on, `accepted` those in which
    the slot was too, `recalled` those in which the right token was among the K candidates.
    """

    block_size: int
    tokens: float = 0
    rounds: float = 0
    requests: float = 0
    request_means: float = 0
    base_rounds: float = 0
    base_request_means: float = 0
    reached: np.ndarray = field(default=None)
    accepted: np.ndarray = field(default=None)
    recalled: np.ndarray = field(default=None)

    def __post_init__(self):
        for name in ("reached", "accepted", "recalled"):
            if getattr(self, name) is None:
                setattr(self, name, np.zeros(self.block_size - 1))

    def to_tensor(self) -> torch.Tensor:
        """All sums as one fp64 vector, for a reduction over processes."""
        scalars = [
            self.tokens,
            self.rounds,
            self.requests,
            self.request_means,
            self.base_rounds,
            self.base_request_means,
        ]
        return torch.from_numpy(np.concatenate([scalars, self.reached, self.accepted, self.recalled]))

    @classmethod
    def from_tensor(cls, sums: torch.Tensor, block_size: int) -> "WalkStatistics":
        values = sums.cpu().numpy()
        return cls(block_size, *values[:6].tolist(), *np.split(values[6:].copy(), 3))

    def metrics(self) -> dict[str, float]:
        """Pooled and per-request accepted length, the same with every slot's own best token (`_base`), the share of accepted
        drafts that refinement added, recall of the candidates, and conditional acceptance of every slot."""
        rounds, requests = max(self.rounds, 1), max(self.requests, 1)
        pooled, base = self.tokens / rounds, self.tokens / max(self.base_rounds, 1)
        result = {
            "accepted_length": pooled,
            "accepted_length_per_request": self.request_means / requests,
            "accepted_length_base": base,
            "accepted_length_base_per_request": self.base_request_means / requests,
            "refinement_share": (pooled - base) / (pooled - 1) if pooled > 1 else 0.0,
            "candidate_recall": float(self.recalled.sum() / max(self.reached.sum(), 1)),
            "requests": self.requests,
        }
        shares = self.accepted / np.maximum(self.reached, 1)
        return result | {f"slot_{k + 1}_acceptance": float(share) for k, share in enumerate(shares)}


def walk(accepted: np.ndarray, first: int, last: int, block_size: int) -> tuple[list[int], list[int]]:
    """Decoding rounds of a text whose response is at `first..last`: anchors and tokens committed by each.

    `accepted[i]` is the number of drafts that a block anchored at i gets right, at most `last - i`. The first token comes from the
    prefill and belongs to no round; at the end of the text there is no token of the target's own.
    """
    anchors, committed = [], []
    at = first
    while at < last:
        tokens = min(int(accepted[at]) + 1, last - at)
        anchors.append(at)
        committed.append(tokens)
        at += tokens
    return anchors, committed


@torch.no_grad()
def accepted_drafts(
    drafter,
    context_hidden_states: torch.Tensor,  # [1, L, taps * d]
    row: dict[str, torch.Tensor],
    anchors: torch.Tensor,  # [A], ascending
    chunk: int,
    flex: bool,
) -> dict[str, np.ndarray]:
    """Every anchor tried: `accepted` and `base` `[A]` (drafts right in a row, refined walk and best tokens), `counts`, `recalled`
    `[A, T]` bool (slot lies in the text; its token was a candidate). Anchors run in chunks of one fixed size."""
    config = drafter.config
    parts = {"accepted": [], "base": [], "counts": [], "recalled": []}
    for begin in range(0, anchors.shape[0], chunk):
        some = anchors[begin : begin + chunk]
        real = torch.arange(chunk, device=anchors.device) < some.shape[0]
        some = torch.cat([some, some[-1:].expand(chunk - some.shape[0])])
        tokens, counts = block_labels(
            row["input_ids"], row["document_starts"], row["loss_mask"], some, real, config.block_size
        )
        masks = slot_masks(config, some, row["document_starts"], flex)
        # master weights in fp32 beside a head in bf16: the kernels are made for one dtype
        with use_implementation("reference"):
            outputs = draft_packed(drafter, context_hidden_states, row["position_ids"], some, tokens[:, 0], masks)
            proposal = drafter.propose(outputs, tokens[:, 0])
        gold = tokens[:, 1:]
        for name, drafts in (("accepted", proposal.tokens), ("base", proposal.candidates[..., 0])):
            parts[name].append(((drafts == gold) & counts).long().cumprod(-1).sum(-1)[real])
        parts["counts"].append(counts[real])
        parts["recalled"].append((proposal.candidates == gold[..., None]).any(-1)[real])
    return {name: torch.cat(values).cpu().numpy() for name, values in parts.items()}


@torch.no_grad()
def walk_row(
    drafter,
    context_hidden_states: torch.Tensor,
    row: dict[str, torch.Tensor],
    documents: list[tuple[int, int, int]],
    chunk: int = 256,
    flex: bool = False,
    rounds: dict[int, list[int]] | None = None,
) -> WalkStatistics:
    """Walks every document `(sequence, begin, end)` of a packed row; the first response of each is the text.

    Args:
        row: tensors of the row on the drafter's device, without batch dimension.
        rounds: if given, receives the tokens committed per round by sequence number.
    """
    config = drafter.config
    mask, starts = row["loss_mask"].cpu().numpy(), row["document_starts"].cpu().numpy()
    eligible = anchor_positions(mask, starts)
    result = WalkStatistics(config.block_size)
    if not len(eligible):
        return result
    anchors = torch.from_numpy(eligible).to(row["input_ids"].device)
    tried = accepted_drafts(drafter, context_hidden_states, row, anchors, chunk, flex)
    at = np.full(len(mask), -1)
    at[eligible] = np.arange(len(eligible))
    table = {name: np.zeros(len(mask), dtype=np.int64) for name in ("accepted", "base")}
    for name, values in table.items():
        values[eligible] = tried[name]
    slots = np.arange(config.block_size - 1)
    for sequence, begin, end in documents:
        inside = np.flatnonzero(mask[begin:end])
        if len(inside) < 2 or inside[1] != inside[0] + 1:
            continue
        first = begin + int(inside[0])
        stops = np.flatnonzero(~mask[first:end])
        last = (first + int(stops[0]) if len(stops) else end) - 1
        visited, committed = walk(table["accepted"], first, last, config.block_size)
        _, base_committed = walk(table["base"], first, last, config.block_size)
        if rounds is not None:
            rounds[sequence] = committed
        result.tokens += last - first
        result.rounds += len(committed)
        result.base_rounds += len(base_committed)
        result.requests += 1
        result.request_means += (last - first) / len(committed)
        result.base_request_means += (last - first) / len(base_committed)
        picked = at[visited]
        right = tried["accepted"][picked][:, None]
        reached = (slots <= right) & tried["counts"][picked]
        result.reached += reached.sum(0)
        result.accepted += (reached & (slots < right)).sum(0)
        result.recalled += (reached & tried["recalled"][picked]).sum(0)
    return result


def walk_dataset(
    drafter,
    run_target,
    dataset: PackedDataset,
    device,
    chunk: int = 256,
    flex: bool = False,
    rank: int = 0,
    world: int = 1,
) -> WalkStatistics:
    """Walks this process's rows (`rank::world`) of a packed dataset; `run_target(row)` gives the taps `[1, L, taps * d]`."""
    sums = WalkStatistics(drafter.config.block_size).to_tensor()
    rows = len(dataset)
    for index in range(rank, -(-rows // world) * world, world):
        row = {name: torch.from_numpy(array).to(device) for name, array in dataset.row(index % rows).items()}
        # all processes run the target equally often: it may be sharded over them
        taps = run_target(row)
        if index < rows:
            sums += walk_row(drafter, taps, row, dataset.documents(index), chunk, flex).to_tensor()
    return WalkStatistics.from_tensor(sums, drafter.config.block_size)


__all__ = ["WalkStatistics", "accepted_drafts", "walk", "walk_dataset", "walk_row"]
