"""The softmax part of the fused cross-entropy on CUDA: one program per row of logits, two passes over it, gradient in place."""

import torch
import triton
import triton.language as tl


@triton.jit
def scaled_logits(raw, multiplier, softcap, HAS_CAP: tl.constexpr):
    """Raw logits of any dtype, multiplied and capped, in fp32."""
    values = raw.to(tl.float32) * multiplier
    if HAS_CAP:
        # tanh from exp, which every Triton version has; by its series where the ones would cancel
        ratio = values / softcap
        size = tl.abs(ratio)
        square = ratio * ratio
        series = 1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835))))
        large = 1.0 - 2.0 / (tl.exp(2.0 * tl.minimum(size, 15.0)) + 1.0)
        values = softcap * tl.where(size < 0.3, ratio * series, tl.where(ratio < 0.0, -large, large))
    return values


@triton.jit
def _row_losses_kernel(
    logits,  # [N, V], overwritten with the gradient
    labels,  # [N]
    losses,  # [N] fp32
    hits,  # [N] int8
    row_stride,
    vocab,
    multiplier,
    softcap,
    HAS_CAP: tl.constexpr,
    NEED_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    label = tl.load(labels + row)
    # read before the gradient overwrites it: the reductions below synchronise the program
    gold = scaled_logits(tl.load(logits + label), multiplier, softcap, HAS_CAP)
    offsets = tl.arange(0, BLOCK)
    largest = float("-inf")
    total = 0.0
    for begin in range(0, vocab, BLOCK):
        columns = begin + offsets
        inside = columns < vocab
        values = scaled_logits(tl.load(logits + columns, mask=inside, other=0.0), multiplier, softcap, HAS_CAP)
        values = tl.where(inside, values, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(values, axis=0))
        total = total * tl.exp(largest - new_largest) + tl.sum(tl.exp(values - new_largest), axis=0)
        largest = new_largest
    lse = largest + tl.log(total)
    tl.store(losses + row, lse - gold)
    tl.store(hits + row, (gold >= largest).to(tl.int8))
    if NEED_GRAD:
        for begin in range(0, vocab, BLOCK):
            columns = begin + offsets
            inside = columns < vocab
            values = scaled_logits(tl.load(logits + columns, mask=inside, other=0.0), multiplier, softcap, HAS_CAP)
            grad = tl.exp(values - lse) - tl.where(columns == label, 1.0, 0.0)
            if HAS_CAP:
                share = values / softcap
                grad = grad * (1.0 - share * share)
            grad = grad * multiplier
            tl.store(logits + columns, grad.to(logits.dtype.element_ty), mask=inside)


def row_losses(logits: torch.Tensor, labels: torch.Tensor, multiplier: float, softcap: float | None, need_grad: bool):
    """Losses `[N]` fp32 and hits `[N]` bool of logits `[N, V]`, which become the gradient if `need_grad`."""
    rows, vocab = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    hits = torch.empty(rows, dtype=torch.int8, device=logits.device)
    block = min(8192, triton.next_power_of_2(vocab))
    _row_losses_kernel[(rows,)](
        logits,
        labels.contiguous(),
        losses,
        hits,
        logits.stride(0),
        vocab,
        float(multiplier),
        1.0 if softcap is None else float(softcap),
        HAS_CAP=softcap is not None,
        NEED_GRAD=need_grad,
        BLOCK=block,
        num_warps=16 if block >= 8192 else 4,
    )
    return losses, hits.bool()


__all__ = ["row_losses", "scaled_logits"]
