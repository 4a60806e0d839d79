"""Cross-entropy through a frozen output head without the logits of the whole batch.

The head W is frozen, so the gradient of row i's loss with respect to its state x_i depends on row i alone: it is computed in the
forward pass, chunk by chunk, right after the chunk's logits and in their memory, and the backward pass only multiplies each row by
its upstream gradient. Arbitrary weights per row (decay, D-PACE) therefore cost nothing, and the logits are computed once. Liger's
fused linear cross-entropy computes them twice when it is asked for one loss per row, which is why `backend="liger"` is a choice
and not the default.
"""

import torch
import torch.nn.functional as F


CHUNK_BYTES = 512 * 2**20


def chunk_rows(rows: int, vocab: int, itemsize: int) -> int:
    """Rows per chunk: chunks of equal size (a multiple of 128) whose logits take at most `CHUNK_BYTES`."""
    chunks = max(1, -(-rows * vocab * itemsize // CHUNK_BYTES))
    return min(rows, -(-rows // chunks) + 127 & ~127)


def _row_losses_torch(logits, labels, multiplier, softcap, need_grad):
    """Losses and hits of a chunk; overwrites `logits` with the gradient with respect to the raw logits."""
    values = logits.float() * multiplier
    slope = multiplier
    if softcap is not None:
        values = torch.tanh(values / softcap) * softcap
        slope = multiplier * (1 - (values / softcap) ** 2)
    gold = values.gather(-1, labels[:, None])[:, 0]
    lse = values.logsumexp(-1)
    hits = gold >= values.amax(-1)
    if need_grad:
        probs = torch.exp(values - lse[:, None])
        probs.scatter_add_(-1, labels[:, None], -torch.ones_like(probs[:, :1]))
        logits.copy_(probs * slope)
    return lse - gold, hits


def _row_losses(logits, labels, multiplier, softcap, need_grad):
    if logits.is_cuda:
        from .fused_cross_entropy_triton import row_losses

        return row_losses(logits, labels, multiplier, softcap, need_grad)
    return _row_losses_torch(logits, labels, multiplier, softcap, need_grad)


class _FusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, weight, labels, multiplier, softcap, need_grad):
        rows, vocab = states.shape[0], weight.shape[0]
        size = chunk_rows(rows, vocab, states.element_size())
        logits = states.new_empty(size, vocab)
        grads = torch.empty_like(states) if need_grad else None
        losses = torch.empty(rows, dtype=torch.float32, device=states.device)
        hits = torch.empty(rows, dtype=torch.bool, device=states.device)
        for begin in range(0, rows, size):
            part = slice(begin, min(begin + size, rows))
            chunk = logits[: part.stop - begin]
            torch.mm(states[part], weight.T, out=chunk)
            losses[part], hits[part] = _row_losses(chunk, labels[part], multiplier, softcap, need_grad)
            if need_grad:
                torch.mm(chunk, weight, out=grads[part])
        ctx.grads = grads
        ctx.mark_non_differentiable(hits)
        return losses, hits

    @staticmethod
    def backward(ctx, grad_losses, _):
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise RuntimeError(
                "the fused cross-entropy keeps its gradient for one backward pass and was asked for a second"
            )
        return grads * grad_losses[:, None].to(grads.dtype), None, None, None, None, None


@torch.compiler.disable
def fused_linear_cross_entropy(
    states: torch.Tensor,  # [N, d]
    weight: torch.Tensor,  # [V, d], frozen
    labels: torch.Tensor,  # [N] int64, 0 to V - 1
    multiplier: float = 1.0,
    softcap: float | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`-log softmax(logits)[label]` per row with `logits = cap(multiplier * states @ weight.T)`.

    Matrix products run in the dtype of `weight`, the statistics of the softmax in fp32.

    Args:
        backend: `"auto"` (a Triton kernel on CUDA, PyTorch elsewhere) or `"liger"`.

    Returns:
        losses `[N]` fp32, differentiable with respect to `states`; hits `[N]` bool, whether no token scored above the label
        (None with Liger).
    """
    if backend == "liger":
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        if multiplier != 1.0:
            states = states * multiplier
        options = (states.to(weight.dtype), weight.detach(), labels, None, None, -100, 0.0, 0.0, "none", softcap)
        return LigerFusedLinearCrossEntropyFunction.apply(*options)[0].float(), None
    # autocast must not touch the products: they already have the dtype they are meant to have
    with torch.autocast(states.device.type, enabled=False):
        return _FusedLinearCrossEntropy.apply(
            states.to(weight.dtype),
            weight.detach(),
            labels,
            multiplier,
            softcap,
            # inside the function neither is what the caller sees
            states.requires_grad and torch.is_grad_enabled(),
        )


def reference_cross_entropy(states, weight, labels, multiplier=1.0, softcap=None):
    """The same losses from all logits at once, for tests and small problems."""
    logits = F.linear(states, weight) * multiplier
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return F.cross_entropy(logits, labels, reduction="none")


__all__ = ["fused_linear_cross_entropy", "reference_cross_entropy"]
