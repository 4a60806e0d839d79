"""Distance between the drafter's and the target's distributions, without the logits of the whole batch.

As in `fused_cross_entropy.py`: the head is frozen, so a row's gradient is computed in the forward pass, chunk by chunk, and the
backward pass scales it. Both sets of logits of a chunk come from hidden states through the same head.
"""

import torch

from .fused_cross_entropy import chunk_rows


# a chunk keeps two sets of logits and several fp32 copies of them, where the cross-entropy keeps one in place
COPIES = 8


def _distances(student, teacher, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Distances `[n]` of rows of scaled logits `[n, V]` in fp32, and their gradient with respect to `student`."""
    log_q, log_p = student.log_softmax(-1), teacher.log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    if kind == "kl":
        return (p * (log_p - log_q)).sum(-1), q - p
    half_sign = torch.sign(q - p) / 2
    return (q - p).abs().sum(-1) / 2, q * (half_sign - (q * half_sign).sum(-1, keepdim=True))


class _FusedLinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, target_states, weight, multiplier, softcap, kind):
        need_grad = ctx.needs_input_grad[0]
        size = chunk_rows(states.shape[0], weight.shape[0], COPIES * states.element_size())
        distances = torch.empty(states.shape[0], dtype=torch.float32, device=states.device)
        ctx.grads = torch.empty_like(states) if need_grad else None
        for begin in range(0, states.shape[0], size):
            part = slice(begin, begin + size)
            student = torch.mm(states[part], weight.T).float() * multiplier
            teacher = torch.mm(target_states[part], weight.T).float() * multiplier
            slope = multiplier
            if softcap is not None:
                student = torch.tanh(student / softcap) * softcap
                teacher = torch.tanh(teacher / softcap) * softcap
                slope = multiplier * (1 - (student / softcap) ** 2)
            distances[part], grad = _distances(student, teacher, kind)
            if need_grad:
                ctx.grads[part] = torch.mm((grad * slope).to(weight.dtype), weight)
        return distances

    @staticmethod
    def backward(ctx, grad_distances):
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise RuntimeError(
                "the fused distance keeps its gradient for one backward pass and was asked for a second"
            )
        return grads * grad_distances[:, None].to(grads.dtype), None, None, None, None, None


@torch.compiler.disable
def fused_linear_divergence(
    states: torch.Tensor,  # [N, d]
    target_states: torch.Tensor,  # [N, d]
    weight: torch.Tensor,  # [V, d], frozen
    multiplier: float = 1.0,
    softcap: float | None = None,
    kind: str = "kl",
) -> torch.Tensor:
    """Per row the distance from `p = softmax(cap(multiplier * target_states @ weight.T))` to q, the same of `states`.

    `"kl"`: `sum p log(p / q)`. `"tv"`: `sum |p - q| / 2`, one minus the chance that a draft from q is accepted. Products run in the
    dtype of `weight`, the rest in fp32.

    Returns:
        `[N]` fp32, differentiable with respect to `states`.

    Raises:
        ValueError: another kind.
    """
    if kind not in ("kl", "tv"):
        raise ValueError(f"kind must be 'kl' or 'tv', got {kind!r}")
    with torch.autocast(states.device.type, enabled=False):
        return _FusedLinearDivergence.apply(
            states.to(weight.dtype),
            target_states.detach().to(weight.dtype),
            weight.detach(),
            multiplier,
            softcap,
            kind,
        )


__all__ = ["fused_linear_divergence"]
