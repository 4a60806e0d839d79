"""The distance part of the fused divergence on CUDA: one program per row of both logits, the gradient in the student's place.
With labels also the student's cross-entropy, for which nothing more is read.

KL needs one pass over a row for its value and one for its gradient; TV needs both normalisers before its value, so one more.
"""

import torch
import triton
import triton.language as tl

from .fused_cross_entropy_triton import scaled_logits


@triton.jit
def _row_distances_kernel(
    student,  # [N, V], overwritten with the gradient
    teacher,  # [N, V]
    distances,  # [N] fp32
    labels,  # [N], or anything without HAS_LABELS
    losses,  # [N] fp32, written with HAS_LABELS
    hits,  # [N] int8, written with HAS_LABELS
    student_stride,
    teacher_stride,
    vocab,
    multiplier,
    softcap,
    TV: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_LABELS: tl.constexpr,
    NEED_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    student += row * student_stride
    teacher += row * teacher_stride
    if HAS_LABELS:
        # read before the gradient overwrites it: the reductions below synchronise the program
        gold = scaled_logits(tl.load(student + tl.load(labels + row)), multiplier, softcap, HAS_CAP)
    offsets = tl.arange(0, BLOCK)
    s_largest, t_largest = float("-inf"), float("-inf")
    s_total, t_total, gap = 0.0, 0.0, 0.0
    for begin in range(0, vocab, BLOCK):
        columns = begin + offsets
        inside = columns < vocab
        s = scaled_logits(tl.load(student + columns, mask=inside, other=0.0), multiplier, softcap, HAS_CAP)
        t = scaled_logits(tl.load(teacher + columns, mask=inside, other=0.0), multiplier, softcap, HAS_CAP)
        # 0 outside, where the difference of the masked logits would not be a number
        difference = t - s
        s = tl.where(inside, s, float("-inf"))
        t = tl.where(inside, t, float("-inf"))
        new_largest = tl.maximum(s_largest, tl.max(s, axis=0))
        s_total = s_total * tl.exp(s_largest - new_largest) + tl.sum(tl.exp(s - new_largest), axis=0)
        s_largest = new_largest
        new_largest = tl.maximum(t_largest, tl.max(t, axis=0))
        shrink = tl.exp(t_largest - new_largest)
        masses = tl.exp(t - new_largest)
        t_total = t_total * shrink + tl.sum(masses, axis=0)
        if not TV:
            gap = gap * shrink + tl.sum(masses * difference, axis=0)
        t_largest = new_largest
    s_lse = s_largest + tl.log(s_total)
    t_lse = t_largest + tl.log(t_total)
    if HAS_LABELS:
        tl.store(losses + row, s_lse - gold)
        tl.store(hits + row, (gold >= s_largest).to(tl.int8))
    if TV:
        distance = 0.0
        above, below, equal = 0.0, 0.0, 0.0  # q's mass where it exceeds p, where p exceeds it, and on ties
        for begin in range(0, vocab, BLOCK):
            columns = begin + offsets
            inside = columns < vocab
            s = scaled_logits(tl.load(student + columns, mask=inside, other=0.0), multiplier, softcap, HAS_CAP)
            t = scaled_logits(tl.load(teacher + columns, mask=inside, other=0.0), multiplier, softcap, HAS_CAP)
            q = tl.where(inside, tl.exp(s - s_lse), 0.0)
            excess = q - tl.where(inside, tl.exp(t - t_lse), 0.0)
            distance += tl.sum(tl.abs(excess), axis=0)
            above += tl.sum(tl.where(excess > 0.0, q, 0.0), axis=0)
            below += tl.sum(tl.where(excess < 0.0, q, 0.0), axis=0)
            equal += tl.sum(tl.where(excess == 0.0, q, 0.0), axis=0)
        tl.store(distances + row, distance / 2)
    else:
        # not `gap / t_total - t_lse + s_lse`: near the target both logarithms cancel, while the largest logits subtract exactly
        tl.store(distances + row, gap / t_total - (t_largest - s_largest) + tl.log(s_total / t_total))
    if NEED_GRAD:
        for begin in range(0, vocab, BLOCK):
            columns = begin + offsets
            inside = columns < vocab
            s = scaled_logits(tl.load(student + columns, mask=inside, other=0.0), multiplier, softcap, HAS_CAP)
            t = scaled_logits(tl.load(teacher + columns, mask=inside, other=0.0), multiplier, softcap, HAS_CAP)
            q = tl.exp(s - s_lse)
            grad = q - tl.exp(t - t_lse)
            if TV:
                # q times half of the sign less the signs' mean, `above - below`: written so that nothing cancels
                tied = (below - above) / 2
                grad = q * tl.where(grad > 0.0, below + equal / 2, tl.where(grad < 0.0, -above - equal / 2, tied))
            if HAS_CAP:
                share = s / softcap
                grad = grad * (1.0 - share * share)
            grad = grad * multiplier
            tl.store(student + columns, grad.to(student.dtype.element_ty), mask=inside)


def row_distances(
    student: torch.Tensor,  # [N, V], rows contiguous
    teacher: torch.Tensor,  # [N, V], rows contiguous
    labels: torch.Tensor | None,  # [N] int64
    multiplier: float,
    softcap: float | None,
    kind: str,
    need_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Distances `[N]` fp32 of raw logits, of which `student` becomes their gradient if `need_grad`; with `labels` also the
    student's losses `[N]` fp32 and hits `[N]` bool."""
    rows, vocab = student.shape
    distances, losses = torch.empty(2, rows, dtype=torch.float32, device=student.device)
    hits = torch.empty(rows, dtype=torch.int8, device=student.device)
    block = min(8192, triton.next_power_of_2(vocab))
    _row_distances_kernel[(rows,)](
        student,
        teacher,
        distances,
        hits if labels is None else labels.contiguous(),
        losses,
        hits,
        student.stride(0),
        teacher.stride(0),
        vocab,
        float(multiplier),
        1.0 if softcap is None else float(softcap),
        TV=kind == "tv",
        HAS_CAP=softcap is not None,
        HAS_LABELS=labels is not None,
        NEED_GRAD=need_grad,
        BLOCK=block,
        num_warps=16 if block >= 8192 else 4,
    )
    return (distances, None, None) if labels is None else (distances, losses, hits.bool())


__all__ = ["row_distances"]
