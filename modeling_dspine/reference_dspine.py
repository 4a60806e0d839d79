"""The operations of DSpine in plain PyTorch: slow, clear, and the oracle that every kernel is judged against.

Shapes use N blocks, B slots per block (slot 0 is the anchor), T = B - 1 predicted slots, K candidates per slot, d channels of the
residual stream, r dimensions of the transfer space and V tokens. Symbols in brackets are those of the method: `u` is a predicted
feature, `z(v)` a token's coordinates in the transfer space, `P`, `G`, `b`, `U` one layer's injection weights. The formulas are a
reconstruction of DSpine (arXiv 2609.36173), of which only the abstract is public.

Gate forms (`gate`), for a slot feature `u` and its left neighbour's feature `p`:

- `"channel"`: `sigmoid(G [u ; p] + b) * (U p)` with `G [d, 2r]`, `b [d]`
- `"rank"`:    `U (sigmoid(G [u ; p] + b) * p)` with `G [r, 2r]`, `b [r]`
- `"none"`:    `U p`
"""

import torch
import torch.nn.functional as F


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square normalisation over the last dimension without a weight, computed in fp32 (at least), in the dtype of `x`."""
    y = x if x.dtype == torch.float64 else x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def predicted_feature(
    hidden_states: torch.Tensor,  # [..., d]
    norm_weight: torch.Tensor,  # [d]
    feature_weight: torch.Tensor,  # [r, d]
    eps: float,
) -> torch.Tensor:  # [..., r]
    """`u = rms(P rms_l(h))`: what a slot, at this depth, predicts its token to be, in the transfer space."""
    return rms(F.linear(norm_weight * rms(hidden_states, eps), feature_weight), eps)


def gated_write(
    features: torch.Tensor,  # [..., r]
    predecessor_features: torch.Tensor,  # [..., r]
    gate_weight: torch.Tensor | None,  # [d, 2r] or [r, 2r]
    gate_bias: torch.Tensor | None,  # [d] or [r]
    write_weight: torch.Tensor,  # [d, r]
    gate: str = "channel",
) -> torch.Tensor:  # [..., d]
    """What a left neighbour writes into the residual stream of its successor. Leading dimensions broadcast."""
    if gate == "none":
        return F.linear(predecessor_features, write_weight)
    # [u ; p] G^T without the concatenation, so that one slot feature broadcasts over many predecessors
    own, left = gate_weight.chunk(2, dim=-1)
    opening = torch.sigmoid(F.linear(features, own, gate_bias) + F.linear(predecessor_features, left))
    if gate == "rank":
        return F.linear(opening * predecessor_features, write_weight)
    return opening * F.linear(predecessor_features, write_weight)


def gated_adjacent_injection(
    hidden_states: torch.Tensor,  # [N, B, d]
    anchor_features: torch.Tensor,  # [N, r], z(anchor)
    norm_weight: torch.Tensor,  # [d]
    feature_weight: torch.Tensor,  # [r, d]
    gate_weight: torch.Tensor | None,  # [d, 2r] ("channel"), [r, 2r] ("rank")
    gate_bias: torch.Tensor | None,  # [d] ("channel"), [r] ("rank")
    write_weight: torch.Tensor,  # [d, r]
    eps: float,
    gate: str = "channel",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gated adjacent injection after one layer, all slots at once.

    `h_k += write(u_k, u_{k-1})` for slots k >= 1; slot 0 keeps its residual and its feature is `z(anchor)`. Nothing crosses the
    border of a block, since a block is one row of the second dimension.

    Returns the new residual stream `[N, B, d]` and the features `u` `[N, B, r]`, in the dtype of `hidden_states`.
    """
    features = predicted_feature(hidden_states, norm_weight, feature_weight, eps).to(hidden_states.dtype)
    features = torch.cat([anchor_features[:, None].to(features.dtype), features[:, 1:]], dim=1)
    write = gated_write(features[:, 1:], features[:, :-1], gate_weight, gate_bias, write_weight, gate)
    return hidden_states + F.pad(write.to(hidden_states.dtype), (0, 0, 1, 0)), features


def last_write_refinement(
    hidden_states: torch.Tensor,  # [..., d], residual stream before the last layer's write
    features: torch.Tensor,  # [..., r], last layer's u
    predecessor_features: torch.Tensor,  # [..., r], z of a chosen left neighbour
    norm_weight: torch.Tensor,  # [d], of the model's final norm
    gate_weight: torch.Tensor | None,
    gate_bias: torch.Tensor | None,
    write_weight: torch.Tensor,  # [d, r]
    eps: float,
    gate: str = "channel",
) -> torch.Tensor:  # [..., d]
    """`f_k(a) = norm(h_k + write(u_k, z(a)))`: the last write redone with a token instead of a predicted feature.

    Leading dimensions broadcast, so `[N, T, 1, d]` states against `[N, T, K, r]` predecessors give all K refinements.
    """
    write = gated_write(features, predecessor_features, gate_weight, gate_bias, write_weight, gate)
    return norm_weight * rms(hidden_states + write.to(hidden_states.dtype), eps)


def select_candidates(logits: torch.Tensor, num_candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `num_candidates` best tokens of every slot, best first, equal logits in order of token id.

    Args:
        logits: `[N, T, V]`.

    Returns:
        Their logits `[N, T, K]` and token ids `[N, T, K]` (int64).
    """
    values, tokens = torch.topk(logits, num_candidates, dim=-1)
    tokens, order = tokens.sort(dim=-1)
    values, by_value = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, tokens.gather(-1, by_value)


def transition_cache(
    hidden_states: torch.Tensor,  # [N, T, d], slots 1..B-1, residual stream before the last write
    features: torch.Tensor,  # [N, T, r], slots 1..B-1, last layer's u
    anchor_features: torch.Tensor,  # [N, r], z(anchor)
    candidates: torch.Tensor,  # [N, T, K] int64
    transfer_table: torch.Tensor,  # [V, r], z of every token
    head_weight: torch.Tensor,  # [V, d], the target's output embeddings W
    norm_weight: torch.Tensor,
    gate_weight: torch.Tensor | None,
    gate_bias: torch.Tensor | None,
    write_weight: torch.Tensor,
    eps: float,
    gate: str = "channel",
) -> torch.Tensor:  # [N, T, K, K]
    """All pair scores of a block: `S[n, k, i, j] = <W_b, f_k(a)>`, a the i-th candidate of the slot before and b the j-th of slot k.

    The slot before the first predicted one is the anchor, so all K rows of `S[:, 0]` are equal.
    """
    predecessors = predecessor_table(anchor_features, candidates, transfer_table)
    refined = last_write_refinement(
        hidden_states[:, :, None],
        features[:, :, None],
        predecessors.to(features.dtype),
        norm_weight,
        gate_weight,
        gate_bias,
        write_weight,
        eps,
        gate,
    )
    return refined @ head_weight[candidates].to(refined.dtype).transpose(-1, -2)


def predecessor_table(anchor_features: torch.Tensor, candidates: torch.Tensor, transfer_table: torch.Tensor):
    """`z(a)` of every possible left neighbour of every slot, `[N, T, K, r]`: the anchor for the first slot, else its candidates."""
    previous = transfer_table[candidates[:, :-1]]
    first = anchor_features[:, None, None].to(previous.dtype).expand(-1, -1, candidates.shape[-1], -1)
    return torch.cat([first, previous], dim=1)


def walk_transition_cache(
    scores: torch.Tensor,  # [N, T, K, K]
    candidates: torch.Tensor,  # [N, T, K] int64
    temperature: torch.Tensor | None = None,  # [N] float, 0 means greedy; None: all greedy
    uniforms: torch.Tensor | None = None,  # [N, T] float in [0, 1)
    base_scores: torch.Tensor | None = None,  # [N, T, K], what the candidates scored without their left neighbour
    guidance: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The serial walk of T look-ups: every slot's token given the token just chosen for the slot before it.

    A greedy row takes the best candidate (the first of equals). A sampled row inverts the distribution function of
    `softmax(scores / temperature)` over its K candidates at the given uniform.

    With `base_scores` greedy rows go by `S + guidance * (S - base)`: classifier-free guidance (arXiv 2207.12598) with the left
    neighbour as the condition, so that drafts lean further on the token just chosen than the drafter learned to. Sampled rows do
    not: the closer their q is to the target's distribution, the more is accepted.

    Returns:
        tokens `[N, T]` (int64) and the probabilities they were drawn from, `q` `[N, T, K]` in fp32 (one-hot in greedy rows).
    """
    scores = scores.float()
    N, T, K, _ = scores.shape
    guided = scores
    if base_scores is not None and guidance != 0:
        base = base_scores.float()[:, :, None]
        # a candidate that only fills up the K has no base score to be compared with
        guided = torch.where(base == float("-inf"), scores, scores + guidance * (scores - base))
    chosen = guided.argmax(-1)  # [N, T, K]: best successor of every predecessor
    probs = F.one_hot(chosen, K).float()
    if temperature is not None:
        sampled = temperature > 0
        softmax = torch.softmax(scores / torch.where(sampled, temperature, 1.0)[:, None, None, None], dim=-1)
        below = softmax.cumsum(-1) <= uniforms[:, :, None, None]
        drawn = below.sum(-1).clamp_max(K - 1)
        # rounding may leave the last cumulative sum below a uniform near one: never draw a candidate of probability zero
        drawn = torch.minimum(drawn, K - 1 - (softmax > 0).flip(-1).int().argmax(-1))
        chosen = torch.where(sampled[:, None, None], drawn, chosen)
        probs = torch.where(sampled[:, None, None, None], softmax, probs)
    at = torch.zeros(N, dtype=torch.long, device=scores.device)  # all rows of the first slot are equal
    rows = torch.arange(N, device=scores.device)
    path, path_probs = [], []
    for slot in range(T):
        path_probs.append(probs[rows, slot, at])
        at = chosen[rows, slot, at]
        path.append(at)
    path = torch.stack(path, dim=1)
    return candidates.gather(-1, path[..., None])[..., 0], torch.stack(path_probs, dim=1)


REFERENCES = {
    "gated_adjacent_injection": gated_adjacent_injection,
    "last_write_refinement": last_write_refinement,
    "select_candidates": select_candidates,
    "transition_cache": transition_cache,
    "walk_transition_cache": walk_transition_cache,
}
