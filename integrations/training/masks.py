"""Attention masks of packed rows: one rule per mask, used densely on CPU and as flex-attention tiles on CUDA.

A row of L tokens holds whole documents back to back. `document_starts[i]` is the row index of the first token of the document that
token i belongs to, so it never decreases. The drafter's columns are the L context tokens followed by the slots of all blocks.
"""

import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface


TILE = 128
PACKED_ATTENTION = "dspine_packed"


def target_rule(document_starts: torch.Tensor, window: int | None = None):
    """Causal attention inside each document: `rule(b, h, q, kv)` for token indices of a row (`document_starts` `[L]`)."""

    def rule(b, h, q, kv):
        seen = (kv <= q) & (kv >= document_starts[q])
        return seen if window is None else seen & (q - kv < window)

    return rule


def slot_rule(
    anchors: torch.Tensor,  # [A], row indices of the anchors
    anchor_starts: torch.Tensor,  # [A], document starts of the anchors
    length: int,
    block_size: int,
    causal: bool = False,
    window: int | None = None,
):
    """What slot q sees: `rule(b, h, q, kv)`, kv < length being context tokens and length + i the slots.

    Context strictly before the anchor and inside its document; slots of the same block, all of them unless `causal`. A window
    counts positions, slot k being at the anchor's plus k.
    """

    def rule(b, h, q, kv):
        block = q // block_size
        anchor = anchors[block]
        slot = kv - length
        context = (kv < length) & (kv >= anchor_starts[block]) & (kv < anchor)
        own = (slot >= 0) & (slot // block_size == block)
        if causal:
            own = own & (slot <= q)
        if window is not None:
            context = context & (anchor + q % block_size - kv < window)
            own = own & (slot - q < window) & (q - slot < window)
        return context | own

    return rule


def dense(rule, queries: int, columns: int, device) -> torch.Tensor:
    """The rule as a boolean mask `[1, 1, queries, columns]`, True where attention is allowed."""
    q, kv = torch.arange(queries, device=device)[:, None], torch.arange(columns, device=device)[None]
    return rule(0, 0, q, kv)[None, None]


def _block_mask(rule, needed: torch.Tensor, full: torch.Tensor, queries: int, columns: int) -> BlockMask:
    """A flex BlockMask from boolean tables of tiles `[ceil(queries / TILE), ceil(columns / TILE)]`: which are needed at all and
    which of these are visible throughout.

    The backward pass needs the tables by columns too. They are the transposed ones, which `BlockMask.from_kv_blocks` would win back
    from its lists in hundreds of small operations.
    """

    def ordered(table):
        table = table[None, None]
        indices = torch.argsort(table.int(), dim=-1, descending=True, stable=True)
        return table.sum(-1, dtype=torch.int32), indices.to(torch.int32).contiguous()

    tables = (needed & ~full, needed & full)
    lists = [ordered(table) for table in tables] + [ordered(table.T) for table in tables]
    fields = {}
    for name, (counts, indices) in zip(("kv", "full_kv", "q", "full_q"), lists):
        fields |= {f"{name}_num_blocks": counts, f"{name}_indices": indices}
    return BlockMask(seq_lengths=(queries, columns), BLOCK_SIZE=(TILE, TILE), mask_mod=rule, **fields)


def target_mask(document_starts: torch.Tensor, window: int | None = None, flex: bool = False):
    """Mask `[1, 1, L, L]` of the target's pass over one row, dense boolean or as a BlockMask.

    The tiles follow from the structure, a document being one run of tokens, so nothing of size L x L is computed for flex.
    """
    length, device = document_starts.shape[0], document_starts.device
    rule = target_rule(document_starts, window)
    if not flex:
        return dense(rule, length, length, device)
    first = torch.arange(0, length, TILE, device=device)
    last = (first + TILE - 1).clamp_max(length - 1)
    low = document_starts[first]
    if window is not None:
        low = torch.maximum(low, first - window + 1)
    tile = torch.arange(len(first), device=device)[None]
    needed = (tile >= low[:, None] // TILE) & (tile <= last[:, None] // TILE)
    full = (tile * TILE >= document_starts[last][:, None]) & ((tile + 1) * TILE <= first[:, None])
    if window is not None:
        full &= last[:, None] - tile * TILE < window
    return _block_mask(rule, needed, full, length, length)


def slot_mask(
    anchors: torch.Tensor,  # [A] int64, ascending
    document_starts: torch.Tensor,  # [L] int64
    block_size: int,
    causal: bool = False,
    window: int | None = None,
    flex: bool = False,
):
    """Mask `[1, 1, A * block_size, L + A * block_size]` of the drafter's pass, dense boolean or as a BlockMask.

    For flex the anchors must ascend: then the context of the blocks in one tile of queries is one run of tokens.
    """
    length, device = document_starts.shape[0], anchors.device
    queries = anchors.shape[0] * block_size
    columns = length + queries
    starts = document_starts[anchors]
    rule = slot_rule(anchors, starts, length, block_size, causal, window)
    if not flex:
        return dense(rule, queries, columns, device)
    first = torch.arange(0, queries, TILE, device=device)
    last = (first + TILE - 1).clamp_max(queries - 1)
    head, tail = first // block_size, last // block_size
    low, high = starts[head][:, None], anchors[tail][:, None]
    if window is not None:
        low = torch.maximum(low, anchors[head][:, None] - window + 1)
    tile = torch.arange((columns + TILE - 1) // TILE, device=device)[None]
    begin, end = tile * TILE, (tile + 1) * TILE
    context = (begin < high) & (end > low)
    slots_from, slots_to = length + head[:, None] * block_size, length + (tail[:, None] + 1) * block_size
    own = (begin < slots_to) & (end > slots_from)
    full = (starts[head] == starts[tail])[:, None] & (begin >= low) & (end <= anchors[head][:, None])
    if window is not None:
        full = torch.zeros_like(full)
    return _block_mask(rule, context | own, full, queries, columns)


def slot_masks(config, anchors: torch.Tensor, document_starts: torch.Tensor, flex: bool = False) -> dict:
    """The drafter's masks by layer type, for `DSpineModel.forward(attention_mask=...)`."""
    masks = {}
    for layer_type in set(config.layer_types):
        sliding = layer_type == "sliding_attention"
        causal = sliding if config.is_causal is None else config.is_causal
        window = config.sliding_window if sliding else None
        masks[layer_type] = slot_mask(anchors, document_starts, config.block_size, causal, window, flex)
    return masks


# ---- attention that takes these masks -------------------------------------------------------------------------------------------

_compiled_flex_attention = None


def _flex_attention():
    global _compiled_flex_attention
    from torch.nn.attention.flex_attention import flex_attention

    if torch.compiler.is_compiling():
        return flex_attention
    if _compiled_flex_attention is None:
        # rows have one length, so static shapes compile once per mask rule
        _compiled_flex_attention = torch.compile(flex_attention, dynamic=False)
    return _compiled_flex_attention


def packed_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Attention function `"dspine_packed"`: flex attention where the mask is a BlockMask, Transformers' SDPA otherwise.

    One name for both, so that a model trained on packed rows decodes without being switched over. Under autocast the weighted
    norms of fp32 master weights return fp32 queries and keys; they are brought to the dtype of the values, as in serving.
    """
    query, key = query.to(value.dtype), key.to(value.dtype)
    if not isinstance(attention_mask, BlockMask):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        from transformers.integrations.flex_attention import flex_attention_forward

        return flex_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    group = query.shape[1] // key.shape[1]
    if group & (group - 1):  # flex attention shares heads in powers of two only
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        group = 1
    output = _flex_attention()(query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=group > 1)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)


def pad_to_tiles(length: int) -> int:
    """The next multiple of the tile size, so that slots begin at a tile's border."""
    return (length + TILE - 1) // TILE * TILE


__all__ = [
    "PACKED_ATTENTION",
    "dense",
    "pad_to_tiles",
    "slot_mask",
    "slot_masks",
    "slot_rule",
    "target_mask",
    "target_rule",
]
