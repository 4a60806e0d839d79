"""The target's output head as the drafter sees it: its rows as a matrix, whole or one vocabulary shard per rank."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from dspine.modeling_dspine.registry_dspine import call
from dspine.modeling_dspine.target_dspine import transfer_table


@dataclass
class HeadShard:
    """Rows `start` to `start + len(weight)` of the target's output embeddings W `[V, d]`.

    `group` is SGLang's tensor-parallel group, None where this rank holds all rows. Every rank must make the same calls.
    """

    weight: torch.Tensor  # [V of this rank, d]
    start: int
    vocab_size: int
    group: Any = None

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[..., d]` to the logits of this rank's rows `[..., V of this rank]`."""
        return F.linear(hidden_states.to(self.weight.dtype), self.weight)

    def select(self, logits: torch.Tensor, num_candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The best tokens over all ranks, best first, equal logits in order of token id.

        Args:
            logits: `[N, T, V of this rank]`.

        Returns:
            Values and token ids, `[N, T, K]` each, the same on every rank.
        """
        if self.group is None:
            return call("select_candidates", logits, num_candidates)
        local = min(num_candidates, logits.shape[-1])
        if local:
            values, tokens = call("select_candidates", logits, local)
        else:  # a rank that holds nothing but padding
            values, tokens = (
                logits.new_empty(*logits.shape[:-1], 0),
                torch.empty_like(logits, dtype=torch.long)[..., :0],
            )
        # ranks must send equally much: a short shard fills up with tokens that lose
        values = F.pad(values.float(), (0, num_candidates - local), value=float("-inf"))
        tokens = F.pad(tokens + self.start, (0, num_candidates - local), value=self.vocab_size)
        values, tokens = self._gather(values), self._gather(tokens)
        # in order of token id first, so that the stable sort by value resolves ties as one shard would
        tokens, order = tokens.sort(dim=-1)
        values, best = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
        best = best[..., :num_candidates]
        return values[..., :num_candidates], tokens.gather(-1, best)

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """W of tokens, `[...]` int64 to `[..., d]`; zeros for rows of another rank."""
        local = tokens - self.start
        mine = (local >= 0) & (local < self.weight.shape[0])
        rows = self.weight[torch.where(mine, local, 0)] if self.weight.shape[0] else self.weight.new_zeros(1)
        return torch.where(mine[..., None], rows, 0)

    def total(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over ranks."""
        return partial if self.group is None else self.group.all_reduce(partial.contiguous())

    def table(self, transfer_weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
        """The transfer table Z `[V, r]` of all tokens, the same on every rank, in `dtype` on the device of `transfer_weight`."""
        if self.group is None:
            return transfer_table(self.weight, transfer_weight, eps, dtype)
        whole = transfer_weight.new_zeros(self.vocab_size, transfer_weight.shape[0], dtype=torch.float32)
        if self.weight.shape[0]:
            part = transfer_table(self.weight, transfer_weight, eps, torch.float32)
            whole[self.start : self.start + self.weight.shape[0]] = part
        return self.total(whole).to(dtype)

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[N, T, K]` of every rank, side by side: `[N, T, ranks * K]`."""
        ranks = self.group.world_size
        out = tensor.new_empty(ranks * tensor.numel())
        self.group.all_gather_into_tensor(out, tensor.contiguous().view(-1))
        return out.view(ranks, *tensor.shape).movedim(0, 2).flatten(2)


def head_shard(lm_head, vocab_size: int, hidden_size: int, dtype: torch.dtype, group) -> HeadShard:
    """Reads the target's head: an SGLang vocabulary-parallel layer, plain or quantised, or any layer with a `weight`.

    A quantised head is multiplied out once into a matrix of `dtype`, which costs `V * d` numbers of memory on every rank's share:
    pair scores need rows of W, and a drafter may approximate them, since the target's own head verifies.

    Args:
        group: SGLang's tensor-parallel group.

    Raises:
        ValueError: the head's rows cannot be read; one sentence says why.
    """
    weight = getattr(lm_head, "weight", None)
    if weight is None:
        raise ValueError(
            f"the target's output head ({type(lm_head).__name__}) has no `weight`, which SGLang's DFLASH worker needs: serve the target with an unquantised or FP8 head"
        )
    if getattr(lm_head, "bias", None) is not None:
        raise ValueError("the target's output head has a bias, which pair scores of embeddings cannot represent")
    ranks = 1 if group is None else int(group.world_size)
    shard = getattr(lm_head, "shard_indices", None)
    if shard is not None:
        if int(shard.num_added_elements):
            raise ValueError(
                f"the target's output head has {int(shard.num_added_elements)} added rows (LoRA vocabulary) on this rank, which the drafter does not know"
            )
        start, size = int(shard.org_vocab_start_index), int(shard.num_org_elements)
    elif ranks == 1:
        start, size = 0, vocab_size
    else:
        raise ValueError(
            f"the target's output head ({type(lm_head).__name__}) does not say which rows this rank holds, so it cannot be used with tensor parallelism"
        )
    if not torch.is_floating_point(weight) or weight.dim() != 2 or weight.itemsize < 2:
        weight = _multiplied_out(lm_head, hidden_size, dtype, weight.device)
    if weight.shape[0] < size or weight.shape[1] != hidden_size:
        raise ValueError(
            f"the target's output head must have {size} rows of width {hidden_size} on this rank, got {list(weight.shape)}"
        )
    # the first rows of a contiguous matrix: a view, so the address is the target's own and stays
    return HeadShard(weight.detach()[:size], start, vocab_size, None if ranks == 1 else group)


@torch.no_grad()
def _multiplied_out(lm_head, hidden_size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """W `[V of this rank, d]` of a quantised head, as its own kernel sees it: the head applied to the unit vectors."""
    method = getattr(lm_head, "quant_method", None)
    if not hasattr(method, "apply"):
        raise ValueError(
            f"the target's output head ({type(lm_head).__name__}) is quantised in a way that cannot be multiplied out (it has no quant_method.apply)"
        )
    columns = []
    for part in torch.eye(hidden_size, dtype=dtype, device=device).split(256):
        columns.append(method.apply(lm_head, part.contiguous()).to(dtype).T)
    return torch.cat(columns, dim=1).contiguous()
