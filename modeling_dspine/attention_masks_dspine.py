"""Which columns each slot of a drafted block sees: context that is not padding, its own block, and a window where layers slide."""

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask
from transformers.cache_utils import Cache


def attention_masks(
    model, attention_mask, new_context: int, slots: int, cache: Cache | None, like: torch.Tensor
) -> list:
    """One mask per draft layer, in the form the active attention implementation takes; None where everything is visible.

    Args:
        model: the [`DSpineModel`].
        attention_mask: 2D `[batch, cached + new_context + slots]` with zeros at columns to ignore; None; or a finished mask
            (4D tensor, flex `BlockMask`, or a dict of these by layer type), which is handed on.
        like: gives device and dtype.

    Raises:
        ValueError: a 2D mask of another width.
    """
    if attention_mask is not None and (not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2):
        by_type = attention_mask if isinstance(attention_mask, dict) else {}
        return [by_type.get(layer_type, attention_mask) for layer_type in model.config.layer_types]
    made, masks = {}, []
    for i, layer in enumerate(model.layers):
        past = 0 if cache is None else cache.get_seq_length(i)
        attn = layer.self_attn
        key = (past, attn.sliding_window, attn.masks_future)
        if key not in made:
            made[key] = _attention_mask(attention_mask, past, new_context, slots, attn, like)
        masks.append(made[key])
    return masks


def _attention_mask(padding, past: int, new_context: int, slots: int, attn, like: torch.Tensor):
    total = past + new_context + slots
    if padding is not None and padding.shape[1] != total:
        raise ValueError(
            f"attention_mask must cover cache, new context and slots ({past} + {new_context} + {slots} columns), got {padding.shape[1]}"
        )
    window = attn.sliding_window
    # a sliding cache layer hands back only the columns that some new position can still see
    length = total if window is None else min(total, window - 1 + new_context + slots)
    if padding is None and not attn.masks_future and (window is None or total <= window):
        return None
    keys = torch.arange(total - length, total, device=like.device)
    ahead = keys[None, :] - torch.arange(total - slots, total, device=like.device)[:, None]
    visible = torch.ones_like(ahead, dtype=torch.bool)
    if attn.masks_future:
        visible &= ahead <= 0
    if window is not None:
        visible &= ahead.abs() < window
    visible = visible[None, None]
    if padding is not None:
        visible = visible & padding[:, None, None, -length:].to(like.device, torch.bool)
    implementation = attn.config._attn_implementation
    if implementation == "flex_attention":
        return _flex_mask(visible)
    if implementation == "eager":
        blank = torch.zeros(visible.shape, dtype=like.dtype, device=like.device)
        return blank.masked_fill(~visible, torch.finfo(like.dtype).min)
    return visible  # sdpa, and functions registered on top of it


def _flex_mask(visible: torch.Tensor):
    """A dense mask `[batch or 1, 1, slots, length]` as a flex attention `BlockMask`."""
    batch, _, slots, length = visible.shape
    # compiled kernels evaluate whole tiles, beyond the mask's edge too
    tiles = F.pad(visible[:, 0], (0, -length % 128, 0, -slots % 128))

    def mask_mod(b, h, q, kv):
        return tiles[b, q, kv]

    return create_block_mask(mask_mod, B=batch, H=None, Q_LEN=slots, KV_LEN=length, device=visible.device)


__all__ = ["attention_masks"]
