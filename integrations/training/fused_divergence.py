"""Distance between the drafter's and the target's distributions, without the logits of the whole batch.

As in `fused_cross_entropy.py`: the head is frozen, so a row's gradient is computed in the forward pass, chunk by chunk, in the
memory of the drafter's logits, and the backward pass scales it. Both sets of logits of a chunk come from hidden states through the
same head. On CUDA a Triton kernel reads them, elsewhere PyTorch.
"""

import torch

from .fused_cross_entropy import chunk_rows


# bytes per logit of a chunk: the kernel works in the memory of both sets of logits, PyTorch makes fp32 copies of them
KERNEL_COPIES = 2
TORCH_COPIES = 8


def _row_distances_torch(student, teacher, labels, multiplier, softcap, kind, need_grad):
    """Distances of a chunk, and losses and hits if there are labels; overwrites `student` with the distances' gradient with
    respect to the raw logits."""
    scaled, wanted = student.float() * multiplier, teacher.float() * multiplier
    slope = multiplier
    if softcap is not None:
        scaled, wanted = torch.tanh(scaled / softcap) * softcap, torch.tanh(wanted / softcap) * softcap
        slope = multiplier * (1 - (scaled / softcap) ** 2)
    log_q, log_p = scaled.log_softmax(-1), wanted.log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    losses = hits = None
    if labels is not None:
        gold = log_q.gather(-1, labels[:, None])[:, 0]
        losses, hits = -gold, gold >= log_q.amax(-1)
    excess = q - p
    if kind == "kl":
        distances = (p * (log_p - log_q)).sum(-1)
    else:
        distances = excess.abs().sum(-1) / 2
    if need_grad:
        if kind == "tv":
            # q times half of the sign less the signs' mean, in terms of the masses q has above p, below it and on ties, so that
            # nothing cancels where one token has nearly all of it
            above, below, equal = ((q * (torch.sign(excess) == s)).sum(-1, keepdim=True) for s in (1, -1, 0))
            tied = (below - above) / 2
            excess = q * torch.where(excess > 0, below + equal / 2, torch.where(excess < 0, -above - equal / 2, tied))
        student.copy_(excess * slope)
    return distances, losses, hits


def _row_distances(student, teacher, labels, multiplier, softcap, kind, need_grad):
    if student.is_cuda:
        from .fused_divergence_triton import row_distances

        return row_distances(student, teacher, labels, multiplier, softcap, kind, need_grad)
    return _row_distances_torch(student, teacher, labels, multiplier, softcap, kind, need_grad)


class _FusedLinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, target_states, weight, labels, multiplier, softcap, kind, need_grad):
        rows, vocab = states.shape[0], weight.shape[0]
        logit_bytes = KERNEL_COPIES * states.element_size() if states.is_cuda else TORCH_COPIES * 4
        size = chunk_rows(rows, vocab, logit_bytes)
        student, teacher = states.new_empty(size, vocab), states.new_empty(size, vocab)
        grads = torch.empty_like(states) if need_grad else None
        distances, losses = torch.empty(2, rows, dtype=torch.float32, device=states.device)
        hits = torch.empty(rows, dtype=torch.bool, device=states.device)
        for begin in range(0, rows, size):
            part = slice(begin, min(begin + size, rows))
            own, wanted = student[: part.stop - begin], teacher[: part.stop - begin]
            torch.mm(states[part], weight.T, out=own)
            torch.mm(target_states[part], weight.T, out=wanted)
            given = None if labels is None else labels[part]
            values = _row_distances(own, wanted, given, multiplier, softcap, kind, need_grad)
            for whole, value in zip((distances, losses, hits), values):
                if value is not None:
                    whole[part] = value
            if need_grad:
                torch.mm(own, weight, out=grads[part])
        ctx.grads = grads
        ctx.mark_non_differentiable(losses, hits)
        return distances, losses, hits

    @staticmethod
    def backward(ctx, grad_distances, *_):
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise RuntimeError(
                "the fused distance keeps its gradient for one backward pass and was asked for a second"
            )
        return grads * grad_distances[:, None].to(grads.dtype), None, None, None, None, None, None, None


@torch.compiler.disable
def fused_linear_divergence(
    states: torch.Tensor,  # [N, d]
    target_states: torch.Tensor,  # [N, d]
    weight: torch.Tensor,  # [V, d], frozen
    multiplier: float = 1.0,
    softcap: float | None = None,
    kind: str = "kl",
    labels: torch.Tensor | None = None,  # [N] int64, 0 to V - 1
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per row the distance from `p = softmax(cap(multiplier * target_states @ weight.T))` to q, the same of `states`.

    `"kl"`: `sum p log(p / q)`. `"tv"`: `sum |p - q| / 2`, one minus the chance that a draft from q is accepted. Products run in the
    dtype of `weight`, the rest in fp32.

    Returns:
        `[N]` fp32, differentiable with respect to `states`. With `labels` also what `fused_linear_cross_entropy` returns for
        `states`, without a gradient: losses `[N]` fp32 and hits `[N]` bool, for which nothing more has to be computed.

    Raises:
        ValueError: another kind.
    """
    if kind not in ("kl", "tv"):
        raise ValueError(f"kind must be 'kl' or 'tv', got {kind!r}")
    with torch.autocast(states.device.type, enabled=False):
        distances, losses, hits = _FusedLinearDivergence.apply(
            states.to(weight.dtype),
            target_states.detach().to(weight.dtype),
            weight.detach(),
            labels,
            multiplier,
            softcap,
            kind,
            states.requires_grad and torch.is_grad_enabled(),
        )
    return distances if labels is None else (distances, losses, hits)


__all__ = ["fused_linear_divergence"]
