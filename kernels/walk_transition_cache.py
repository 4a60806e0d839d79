"""The serial walk through a block's transition cache, one launch and one program per block.

Which successor every candidate would choose does not depend on the walk, so it is computed for several slots at once. What remains
serial is one look-up per slot among values already on chip.
"""

import torch
import triton
import triton.language as tl

from .launch import is_plain, launch_options, next_power_of_2, on_device


@triton.jit
def walk_transition_cache_fwd_kernel(
    scores,  # [N, T, K, K]
    candidates,  # [N, T, K] int64
    temperature,  # [N] or None
    uniforms,  # [N, T] or None
    base_scores,  # [N, T, K] or None
    tokens,  # [N, T] int64
    probs,  # [N, T, K] fp32
    T,
    K,
    guidance,
    SAMPLED: tl.constexpr,
    GUIDED: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    offs_row = tl.arange(0, SLOTS * BLOCK_K)
    offs_slot = tl.arange(0, SLOTS)
    offs_k = tl.arange(0, BLOCK_K)
    in_k = offs_k < K
    scale = 1.0
    is_sampled = False
    if SAMPLED:
        b_temperature = tl.load(temperature + n).to(tl.float32)
        is_sampled = b_temperature > 0
        scale = tl.where(is_sampled, b_temperature, 1.0)

    at = 0
    for first in range(0, T, SLOTS):
        # every (slot, predecessor) of this group of slots is a row
        row_slot = first + offs_row // BLOCK_K
        predecessor = offs_row % BLOCK_K
        in_row = (row_slot < T) & (predecessor < K)
        at_row = scores + (n * T + row_slot) * K * K + predecessor * K
        in_scores = in_row[:, None] & in_k[None, :]
        b_s = tl.load(at_row[:, None] + offs_k[None, :], mask=in_scores, other=float("-inf")).to(tl.float32)
        b_s = tl.where(in_row[:, None], b_s, 0.0)
        b_g = b_s
        if GUIDED:
            at_base = (n * T + row_slot)[:, None] * K + offs_k[None, :]
            b_base = tl.load(base_scores + at_base, mask=in_scores, other=float("-inf")).to(tl.float32)
            # a candidate that only fills up the K has no score to be compared with
            b_g = tl.where(b_base == float("-inf"), b_s, b_s + guidance * (b_s - b_base))
        chosen = tl.argmax(b_g, axis=1)
        if SAMPLED:
            b_u = tl.load(uniforms + n * T + row_slot, mask=in_row, other=0.0).to(tl.float32)
            b_p = tl.exp(b_s / scale - tl.max(b_s / scale, axis=1)[:, None])
            b_p = b_p / tl.sum(b_p, axis=1)[:, None]
            below = (tl.cumsum(b_p, axis=1) <= b_u[:, None]) & in_k[None, :]
            drawn = tl.sum(below.to(tl.int32), axis=1)
            # rounding may leave the last cumulative sum below a uniform near one: never draw a candidate of probability zero
            last = tl.max(tl.where(b_p > 0, offs_k[None, :], 0), axis=1)
            chosen = tl.where(is_sampled, tl.minimum(drawn, last), chosen)

        came_from = tl.zeros((SLOTS,), dtype=tl.int32)
        went_to = tl.zeros((SLOTS,), dtype=tl.int32)
        for i in range(SLOTS):
            came_from = tl.where(offs_slot == i, at, came_from)
            at = tl.sum(tl.where(offs_row == i * BLOCK_K + at, chosen, 0), axis=0)
            went_to = tl.where(offs_slot == i, at, went_to)

        slot = first + offs_slot
        in_slot = slot < T
        b_token = tl.load(candidates + (n * T + slot) * K + went_to, mask=in_slot, other=0)
        tl.store(tokens + n * T + slot, b_token, mask=in_slot)
        inside = in_slot[:, None] & in_k[None, :]
        b_q = tl.where(offs_k[None, :] == went_to[:, None], 1.0, 0.0)
        if SAMPLED:
            at_row = scores + (n * T + slot) * K * K + came_from * K
            b_s = tl.load(at_row[:, None] + offs_k[None, :], mask=inside, other=float("-inf")).to(tl.float32)
            b_s = tl.where(in_slot[:, None], b_s, 0.0) / scale
            b_p = tl.exp(b_s - tl.max(b_s, axis=1)[:, None])
            b_q = tl.where(is_sampled, b_p / tl.sum(b_p, axis=1)[:, None], b_q)
        tl.store(probs + (n * T + slot)[:, None] * K + offs_k[None, :], b_q, mask=inside)


def walk_transition_cache_fwd(
    scores, candidates, temperature, uniforms, base_scores=None, guidance=0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches the kernel, see `walk_transition_cache`."""
    N, T, K, _ = scores.shape
    block_k = next_power_of_2(K)
    # at most 8,192 scores on chip
    slots = min(next_power_of_2(T), max(1, 8192 // block_k**2))
    tokens = torch.empty((N, T), dtype=torch.int64, device=scores.device)
    probs = torch.empty((N, T, K), dtype=torch.float32, device=scores.device)
    if temperature is not None:
        temperature, uniforms = temperature.contiguous(), uniforms.contiguous()
    guided = base_scores is not None and guidance != 0
    with on_device(scores):
        walk_transition_cache_fwd_kernel[(N,)](
            scores, candidates, temperature, uniforms, base_scores.contiguous() if guided else None, tokens, probs,
            T, K, float(guidance), SAMPLED=temperature is not None, GUIDED=guided, SLOTS=slots, BLOCK_K=block_k,
            **launch_options(scores, 4),
        )  # fmt: skip
    return tokens, probs


@torch.library.custom_op("dspine::walk_transition_cache", mutates_args=())
def _walk_transition_cache(
    scores: torch.Tensor,
    candidates: torch.Tensor,
    temperature: torch.Tensor | None,
    uniforms: torch.Tensor | None,
    base_scores: torch.Tensor | None,
    guidance: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return walk_transition_cache_fwd(scores, candidates, temperature, uniforms, base_scores, guidance)


@_walk_transition_cache.register_fake
def _(scores, candidates, temperature, uniforms, base_scores, guidance):
    return candidates.new_empty(scores.shape[:2]), scores.new_empty(scores.shape[:3], dtype=torch.float32)


def walk_transition_cache(
    scores: torch.Tensor,  # [N, T, K, K]
    candidates: torch.Tensor,  # [N, T, K] int64
    temperature: torch.Tensor | None = None,  # [N], 0 means greedy; None: all greedy
    uniforms: torch.Tensor | None = None,  # [N, T] in [0, 1)
    base_scores: torch.Tensor | None = None,  # [N, T, K]
    guidance: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The serial walk of T look-ups: every slot's token given the token just chosen for the slot before it.

    A greedy row takes the best candidate (the first of equals), with `base_scores` the best by `scores + guidance * (scores -
    base_scores)`. A sampled row inverts the distribution function of `softmax(scores / temperature)` over its K candidates at the
    given uniform. Scores must not be NaN, and not -inf for all K.

    Returns:
        tokens `[N, T]` (int64) and the probabilities they were drawn from, `q` `[N, T, K]` in fp32 (one-hot in greedy rows).
    """
    if is_plain(scores, candidates):
        return walk_transition_cache_fwd(scores, candidates, temperature, uniforms, base_scores, guidance)
    return _walk_transition_cache(scores, candidates, temperature, uniforms, base_scores, float(guidance))
