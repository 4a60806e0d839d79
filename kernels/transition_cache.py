"""The transition cache in Triton: every pair score of every block.

For one slot and each of its K possible left neighbours, the last write is redone and the result multiplied with the rows of the
head that belong to the slot's own candidates. All of that is a loop over channels that keeps only the sums: the refined features
are never stored, and the final norm is a scale of whole rows, applied to the sums at the end.

Three launches: the gate's share of the slot itself, which all its neighbours have in common; the loop; and, where few slots make
it pay to split the channels among programs, the sum of the parts.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .launch import (
    LARGE_MEMORY,
    cdiv,
    compile_together,
    compute_dtype,
    is_plain,
    launch,
    launch_options,
    next_power_of_2,
    on_device,
    operand_scale,
    shared_memory,
)
from .primitives import sigmoid


@triton.jit
def own_gate_fwd_kernel(
    features,  # [N, T, r], rows by stride
    gate_weight,  # [d, 2r]
    gate_bias,  # [d]
    own,  # [N T, d]
    M,
    T,
    d,
    r,
    stride_n,
    stride_t,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """`G_own u + b` for every slot."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    offs_d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    offs_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_m = offs_m < M
    in_d = offs_d < d
    rows = features + (offs_m // T).to(tl.int64) * stride_n + (offs_m % T).to(tl.int64) * stride_t
    b_own = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for start in range(0, r, BLOCK_R):
        offs_r = start + tl.arange(0, BLOCK_R)
        in_r = offs_r < r
        b_u = tl.load(rows[:, None] + offs_r[None, :], mask=in_m[:, None] & in_r[None, :], other=0.0)
        b_g = tl.load(
            gate_weight + offs_d[:, None] * (2 * r) + offs_r[None, :], mask=in_d[:, None] & in_r[None, :], other=0.0
        )
        b_own = tl.dot(b_u.to(b_g.dtype), tl.trans(b_g), b_own, input_precision="ieee")
    b_own += tl.load(gate_bias + offs_d, mask=in_d, other=0.0).to(tl.float32)[None, :]
    tl.store(
        own + offs_m.to(tl.int64)[:, None] * d + offs_d[None, :],
        b_own.to(own.dtype.element_ty),
        mask=in_m[:, None] & in_d[None, :],
    )


@triton.jit
def neighbour_features(at_z, at_anchor, in_row, has_predecessor, offs_r, r):
    """z of every row's left neighbour: a candidate of the slot before, or the anchor."""
    in_z = in_row[:, None] & (offs_r < r)[None, :]
    b_z = tl.load(at_z[:, None] + offs_r[None, :], mask=in_z & has_predecessor[:, None], other=0.0).to(tl.float32)
    z_anchor = tl.load(at_anchor[:, None] + offs_r[None, :], mask=in_z & (has_predecessor == 0)[:, None], other=0.0)
    return tl.where(has_predecessor[:, None], b_z, z_anchor.to(tl.float32))


@triton.jit
def transition_cache_fwd_kernel(
    hidden,  # [N, T, d], rows by stride
    own,  # [N T, d]
    anchor,  # [N, r]
    candidates,  # [N, T, K] int64
    transfer_table,  # [V, r]
    head_weight,  # [V, d]
    norm_weight,  # [d]
    gate_weight,  # [d, 2r]
    write_weight,  # [d, r]
    scores,  # [splits, N T, K, K]: fp32 sums if there are several splits, else the scores
    squares,  # [splits, N T, K] fp32, if there are several splits
    M,
    T,
    K,
    d,
    r,
    chunk,
    eps,
    stride_hn,
    stride_ht,
    stride_an,
    SPLIT: tl.constexpr,
    WHOLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_S slots with BLOCK_K left neighbours each make the rows of a tile.

    The two products with the weights are one, whose columns alternate between them. The scores are one small product per slot, which
    fits the layout that the large product leaves its rows in.
    """
    pid_s, pid_m = tl.program_id(0), tl.program_id(1)
    ROWS: tl.constexpr = BLOCK_S * BLOCK_K
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    offs_row = tl.arange(0, ROWS)
    offs_r = tl.arange(0, BLOCK_R)
    slot = pid_m * BLOCK_S + offs_row // BLOCK_K
    rank = offs_row % BLOCK_K
    in_row = (slot < M) & (rank < K)
    block = (slot // T).to(tl.int64)
    at_candidate = slot.to(tl.int64) * K + rank
    has_predecessor = slot % T > 0

    predecessor = tl.load(candidates + at_candidate - K, mask=in_row & has_predecessor, other=0)
    at_z = transfer_table + predecessor * r
    at_anchor = anchor + block * stride_an
    dtype = gate_weight.dtype.element_ty
    if WHOLE:
        if transfer_table.dtype.element_ty == dtype and anchor.dtype.element_ty == dtype:
            # one load that nothing is computed from goes to the matrix units through shared memory and takes no registers
            at_either = tl.where(has_predecessor, at_z, at_anchor)
            if ALIGNED:
                # what the compiler cannot know of a choice between two tensors, and needs to know for wide loads
                at_either = tl.multiple_of(at_either, 16)
            b_z = tl.load(
                at_either[:, None] + offs_r[None, :], mask=in_row[:, None] & (offs_r < r)[None, :], other=0.0
            )
        else:
            b_z = neighbour_features(at_z, at_anchor, in_row, has_predecessor, offs_r, r).to(dtype)
    offs_both = tl.arange(0, 2 * BLOCK_D)
    first_row = tl.where(offs_both % 2 == 0, gate_weight + r, write_weight)
    stride_row = tl.where(offs_both % 2 == 0, 2 * r, r)

    token = tl.load(candidates + at_candidate, mask=in_row, other=0)
    at_head = head_weight + token * d
    # what the neighbours of one slot share is read once per slot
    shared = pid_m * BLOCK_S + tl.arange(0, BLOCK_S)
    in_shared = shared < M
    at_hidden = hidden + (shared // T).to(tl.int64) * stride_hn + (shared % T).to(tl.int64) * stride_ht
    at_own = own + shared.to(tl.int64) * d
    b_s = tl.zeros((BLOCK_S, BLOCK_K, BLOCK_K), dtype=tl.float32)
    b_squares = tl.zeros((BLOCK_S, BLOCK_K), dtype=tl.float32)
    for start in range(0, chunk, BLOCK_D):
        offs_d = pid_s * chunk + start + tl.arange(0, BLOCK_D)
        in_d = offs_d < d
        b_head = tl.load(at_head[:, None] + offs_d[None, :], mask=in_row[:, None] & in_d[None, :], other=0.0)
        b_own = tl.load(at_own[:, None] + offs_d[None, :], mask=in_shared[:, None] & in_d[None, :], other=0.0)
        b_h = tl.load(at_hidden[:, None] + offs_d[None, :], mask=in_shared[:, None] & in_d[None, :], other=0.0)
        b_w = tl.load(norm_weight + offs_d, mask=in_d, other=0.0).to(tl.float32) * SCALE
        # rows of both weights in turn: the product's two halves lie side by side in every thread's registers
        channel = pid_s * chunk + start + offs_both // 2
        at_row = first_row + channel * stride_row
        if ALIGNED:
            at_row = tl.multiple_of(at_row, 16)
        in_row_of_both = (channel < d)[:, None]
        if WHOLE:
            b_weights = tl.load(
                at_row[:, None] + offs_r[None, :], mask=in_row_of_both & (offs_r < r)[None, :], other=0.0
            )
            b_both = tl.dot(b_z, tl.trans(b_weights), input_precision="ieee")
        else:
            b_both = tl.zeros((ROWS, 2 * BLOCK_D), dtype=tl.float32)
            for first in range(0, r, BLOCK_R):
                part_r = first + offs_r
                b_weights = tl.load(
                    at_row[:, None] + part_r[None, :], mask=in_row_of_both & (part_r < r)[None, :], other=0.0
                )
                b_part = neighbour_features(at_z, at_anchor, in_row, has_predecessor, part_r, r).to(dtype)
                b_both = tl.dot(b_part, tl.trans(b_weights), b_both, input_precision="ieee")
        b_gate, b_x = tl.split(tl.reshape(b_both, (BLOCK_S, BLOCK_K, BLOCK_D, 2)))
        b_x = sigmoid(b_gate + b_own.to(tl.float32)[:, None, :]) * b_x + b_h.to(tl.float32)[:, None, :]
        b_squares += tl.sum(b_x * b_x, axis=2)
        b_f = (b_x * b_w[None, None, :]).to(dtype)
        b_head = tl.reshape(b_head.to(dtype), (BLOCK_S, BLOCK_K, BLOCK_D))
        b_s = tl.dot(b_f, tl.permute(b_head, (0, 2, 1)), b_s, input_precision="ieee")

    offs_k = tl.arange(0, BLOCK_K)
    at_row = shared.to(tl.int64)[:, None] * K + offs_k[None, :]
    in_rows = in_shared[:, None] & (offs_k < K)[None, :]
    wanted = in_rows[:, :, None] & (offs_k < K)[None, None, :]
    at = at_row[:, :, None] * K + offs_k[None, None, :]
    scale = tl.rsqrt(b_squares / d + eps)[:, :, None]
    if SPLIT:
        tl.store(scores + pid_s.to(tl.int64) * M * K * K + at, b_s / SCALE, mask=wanted)
        tl.store(squares + pid_s.to(tl.int64) * M * K + at_row, b_squares, mask=in_rows)
    else:
        tl.store(scores + at, (b_s * (scale / SCALE)).to(scores.dtype.element_ty), mask=wanted)


@triton.jit
def transition_parts_fwd_kernel(
    parts,  # [splits, M, K, K] fp32
    squares,  # [splits, M, K] fp32
    scores,  # [M, K, K]
    M,
    K,
    d,
    splits,
    eps,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Adds the parts of one slot in order and applies the final norm."""
    slot = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    offs_k = tl.arange(0, BLOCK_K)
    in_k = offs_k < K
    inside = in_k[:, None] & in_k[None, :]
    at = slot * K * K + offs_k[:, None] * K + offs_k[None, :]
    b_s = tl.zeros((BLOCK_K, BLOCK_K), dtype=tl.float32)
    b_squares = tl.zeros((BLOCK_K,), dtype=tl.float32)
    at_part = parts + at
    at_squares = squares + slot * K + offs_k
    for _ in range(splits):
        b_s += tl.load(at_part, mask=inside, other=0.0)
        b_squares += tl.load(at_squares, mask=in_k, other=0.0)
        at_part += M * K * K
        at_squares += M * K
    b_s = b_s * tl.rsqrt(b_squares / d + eps)[:, None]
    tl.store(scores + at, b_s.to(scores.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class TransitionConfig:
    """Slots, channels and rank per step of the loop, into how many parts its channels are split, and its warps and stages.

    A block of the whole rank is gathered once and stays on chip.
    """

    block_s: int
    block_d: int
    block_r: int
    splits: int
    num_warps: int
    num_stages: int


def transition_config(
    slots: int, candidates: int, channels: int, rank: int, itemsize: int, memory: int = LARGE_MEMORY
) -> TransitionConfig:
    """The tiles for a shape class; meant for d = 4096, r = 256 and K = 16 in 16 bits on a Hopper GPU. A program can use `memory`
    bytes of shared memory.

    Every program reads all of `U` and half of `G`, so tiles of 128 rows keep the traffic from the second-level cache (about 0.5 GB
    at 960 slots) below the time of the products; 64 rows serve where there are too few slots to fill the chip. With tiles of 128
    rows, steps of 32 channels and one stage more are 8 % faster than steps of 64.
    """
    block_k = max(next_power_of_2(candidates), 16)
    block_r = max(next_power_of_2(rank), 16)
    rows, block_d, num_warps, num_stages = (64, 64, 4, 2) if slots <= 64 else (128, 32, 8, 3)
    if itemsize == 4:
        rows, block_d, block_r, num_warps, num_stages = 32, 32, 32, 4, 2
    elif block_r > 256 or memory < LARGE_MEMORY:
        rows, block_d, block_r, num_warps, num_stages = 64, 64, 64, 4, 3
    elif block_k > 32:
        block_d = 32  # the scores of 64 candidates take registers
    block_s = max(1, rows // block_k)
    # as many programs as there are multiprocessors, about 132, but no more parts than blocks of channels
    splits = max(1, min(128 // cdiv(slots, block_s), cdiv(channels, block_d)))
    return TransitionConfig(block_s, block_d, block_r, splits, num_warps, num_stages)


def transition_cache_fwd(
    hidden_states, features, anchor_features, candidates, transfer_table, head_weight,
    norm_weight, gate_weight, gate_bias, write_weight, eps,
) -> torch.Tensor:  # fmt: skip
    """Launches the kernels, see `transition_cache`."""
    N, T, d = hidden_states.shape
    K, r, M = candidates.shape[-1], features.shape[-1], N * T
    dtype = gate_weight.dtype
    config = transition_config(M, K, d, r, dtype.itemsize, shared_memory(hidden_states))
    dtypes = (hidden_states.dtype, dtype, transfer_table.dtype, head_weight.dtype)
    compile_together(
        (config, M % 16 == 0, M == 1, T, K, d, r, dtypes), transition_cache_fwd,
        hidden_states, features, anchor_features, candidates, transfer_table, head_weight,
        norm_weight, gate_weight, gate_bias, write_weight, eps,
    )  # fmt: skip
    device = hidden_states.device
    block_k, block_d = max(next_power_of_2(K), 16), config.block_d
    chunk = cdiv(cdiv(d, config.splits), block_d) * block_d
    splits = cdiv(d, chunk)
    own = torch.empty((M, d), dtype=dtype, device=device)
    scores = torch.empty((N, T, K, K), dtype=hidden_states.dtype, device=device)
    parts, squares = scores, own
    if splits > 1:
        parts = torch.empty((splits, M, K, K), dtype=torch.float32, device=device)
        squares = torch.empty((splits, M, K), dtype=torch.float32, device=device)
    # rows of all that a kernel chooses between start at multiples of 16 bytes
    chosen_from = (transfer_table, anchor_features, gate_weight, write_weight)
    aligned = r % 8 == 0 and anchor_features.stride(0) % 8 == 0 and all(t.data_ptr() % 16 == 0 for t in chosen_from)
    with on_device(hidden_states):
        own_m, own_d = (16, 32) if M <= 128 else (64, 64)
        launch(
            own_gate_fwd_kernel, (cdiv(d, own_d), cdiv(M, own_m)),
            features, gate_weight, gate_bias, own, M, T, d, r, features.stride(0), features.stride(1),
            BLOCK_M=own_m, BLOCK_R=64, BLOCK_D=own_d, **launch_options(hidden_states, 4, 4 // (dtype.itemsize // 2)),
        )  # fmt: skip
        launch(
            transition_cache_fwd_kernel, (splits, cdiv(M, config.block_s)),
            hidden_states, own, anchor_features, candidates, transfer_table, head_weight, norm_weight, gate_weight, write_weight,
            parts, squares, M, T, K, d, r, chunk, eps,
            hidden_states.stride(0), hidden_states.stride(1), anchor_features.stride(0),
            SPLIT=splits > 1, WHOLE=config.block_r >= r, ALIGNED=aligned, SCALE=operand_scale(dtype),
            BLOCK_S=config.block_s, BLOCK_K=block_k, BLOCK_R=config.block_r, BLOCK_D=block_d,
            **launch_options(hidden_states, config.num_warps, config.num_stages),
        )  # fmt: skip
        if splits > 1:
            launch(
                transition_parts_fwd_kernel, (M,),
                parts, squares, scores, M, K, d, splits, eps, BLOCK_K=block_k, **launch_options(hidden_states, 4),
            )  # fmt: skip
    return scores


@torch.library.custom_op("dspine::transition_cache", mutates_args=())
def _transition_cache(
    hidden_states: torch.Tensor,
    features: torch.Tensor,
    anchor_features: torch.Tensor,
    candidates: torch.Tensor,
    transfer_table: torch.Tensor,
    head_weight: torch.Tensor,
    norm_weight: torch.Tensor,
    gate_weight: torch.Tensor,
    gate_bias: torch.Tensor,
    write_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    return transition_cache_fwd(
        hidden_states, features, anchor_features, candidates, transfer_table, head_weight,
        norm_weight, gate_weight, gate_bias, write_weight, eps,
    )  # fmt: skip


@_transition_cache.register_fake
def _(hidden_states, features, anchor_features, candidates, *weights_and_eps):
    return hidden_states.new_empty((*candidates.shape, candidates.shape[-1]))


def transition_cache(
    hidden_states: torch.Tensor,  # [N, T, d], slots 1..B-1, residual stream before the last write
    features: torch.Tensor,  # [N, T, r], slots 1..B-1, last layer's u
    anchor_features: torch.Tensor,  # [N, r], z(anchor)
    candidates: torch.Tensor,  # [N, T, K] int64
    transfer_table: torch.Tensor,  # [V, r], z of every token
    head_weight: torch.Tensor,  # [V, d], the target's output embeddings W
    norm_weight: torch.Tensor,  # [d], of the model's final norm
    gate_weight: torch.Tensor,  # [d, 2r]
    gate_bias: torch.Tensor,  # [d]
    write_weight: torch.Tensor,  # [d, r]
    eps: float,
    gate: str = "channel",
) -> torch.Tensor:
    """All pair scores of a block `[N, T, K, K]`, see the reference of the same name. No gradients.

    Raises:
        ValueError: `gate` is not "channel".
    """
    if gate != "channel":
        raise ValueError(f"only the gate form 'channel' has a kernel, got {gate!r}")
    dtype = compute_dtype(hidden_states)
    arguments = (
        hidden_states,
        features,
        anchor_features,
        candidates,
        transfer_table,
        head_weight,
        norm_weight.contiguous(),
        gate_weight.to(dtype).contiguous(),
        gate_bias.contiguous(),
        write_weight.to(dtype).contiguous(),
    )
    if is_plain(*arguments):
        return transition_cache_fwd(*arguments, eps)
    return _transition_cache(*arguments, eps)
