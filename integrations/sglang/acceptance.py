"""Which drafted tokens of a block the target keeps when requests are sampled, in plain PyTorch without a wait for the device.

A drafted token x is kept with probability min(1, p(x) / q(x)), the first rejected one is replaced by a draw from the normalised
max(p - q, 0), and a block kept whole ends with a draw from p. The output follows p exactly, whatever q was (Leviathan et al.
2023, arXiv 2211.17192, algorithm 1). Greedy rows are the special case of a one-hot p and a one-hot q.
"""

import torch

from dspine.modeling_dspine.acceptance_dspine import draw


def filter_min_p(probs: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Drops tokens less likely than `min_p` times the likeliest one.

    Args:
        probs: `[N, B, V]`, normalised.
        min_p: `[N]`, 0 keeps everything.

    Returns:
        `[N, B, V]`, normalised again.
    """
    kept = torch.where(probs >= probs.amax(-1, keepdim=True) * min_p.view(-1, 1, 1), probs, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def accept_block(
    block: torch.Tensor,  # [N, B] int64, the anchor first
    target_probs: torch.Tensor,  # [N, B, V] fp32, what the target says after each token of the block
    candidates: torch.Tensor,  # [N, B - 1, K] int64
    draft_probs: torch.Tensor,  # [N, B - 1, K] fp32, q of each slot over its candidates
    uniforms: torch.Tensor,  # [N, B] in [0, 1): one for each draft, the last for the target's own token
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepts the longest kept prefix of the drafts.

    Returns:
        How many drafts were kept `[N]` (int32) and the target's own token after them `[N]` (int64).

    Raises:
        ValueError: the shapes do not belong to one batch of blocks.
    """
    rows, size = block.shape
    if target_probs.shape[:2] != block.shape or uniforms.shape != block.shape:
        raise ValueError(
            f"target_probs and uniforms must have one row per token of the block {[rows, size]}, got {list(target_probs.shape)} and {list(uniforms.shape)}"
        )
    if candidates.shape != draft_probs.shape or candidates.shape[:2] != (rows, size - 1):
        raise ValueError(
            f"candidates and draft_probs must have shape [{rows}, {size - 1}, K], got {list(candidates.shape)} and {list(draft_probs.shape)}"
        )
    drafts = block[:, 1:]
    q = (draft_probs * (candidates == drafts[..., None])).sum(-1)
    p = target_probs[:, :-1].gather(-1, drafts[..., None])[..., 0]
    accepted = (uniforms[:, :-1] * q < p).long().cumprod(-1).sum(-1)

    at = torch.arange(rows, device=block.device)
    leftover = target_probs[at, accepted]
    slot = accepted.clamp_max(size - 2)
    minus = torch.where((accepted < size - 1)[:, None], draft_probs[at, slot], 0.0)
    reduced = leftover.scatter_add(-1, candidates[at, slot], -minus.to(leftover.dtype)).clamp_min(0)
    # rounding can empty a residual that is zero up to the last bit: then p itself is within that bit of q
    leftover = torch.where(reduced.sum(-1, keepdim=True) > 0, reduced, leftover)
    return accepted.int(), draw(leftover, uniforms[:, -1])
