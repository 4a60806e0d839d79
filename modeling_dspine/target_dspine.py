"""Binding a drafter to its target: what is checked, what is borrowed, and how the transfer space is built from the target.

A drafter owns neither embeddings nor an output head. `bind_target` checks the pairing once, keeps references to the target's
two embedding modules, and computes what DSpine derives from the output embeddings W: the map A (before training) and the table
`z(v) = rms(A W_v)` of all tokens (before decoding).
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from .reference_dspine import rms


@dataclass
class TargetBinding:
    """References into a bound target. Not a module on purpose: nothing of the target is saved or moved with the drafter."""

    embed_tokens: nn.Module
    lm_head: nn.Module
    layers: nn.ModuleList
    warnings: list[str] = field(default_factory=list)

    def __deepcopy__(self, memo):
        return self  # copies of a drafter share the target

    @property
    def head_weight(self) -> torch.Tensor | None:
        """W `[V, d]`, or None if the head is quantised, sharded over processes or offloaded, so that its rows cannot be read."""
        return plain_weight(self.lm_head)

    def embed(self, input_ids: torch.Tensor, scale: float) -> torch.Tensor:
        """Raw embedding rows times `input_embedding_scale`: `[...]` int64 to `[..., d]`."""
        weight = plain_weight(self.embed_tokens)
        if weight is None:
            # a wrapped table: the module applies its own scale, if it has one
            embeds = self.embed_tokens(input_ids)
            return embeds if hasattr(self.embed_tokens, "embed_scale") else embeds * scale
        return F.embedding(input_ids.to(weight.device), weight) * scale


def plain_weight(module: nn.Module) -> torch.Tensor | None:
    """A module's weight as an ordinary floating-point matrix, or None."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point() or weight.dim() != 2:
        return None
    if weight.device.type == "meta" or type(weight).__name__ not in ("Tensor", "Parameter"):
        return None
    return weight


def bind(config, target: nn.Module, tokenizer=None) -> TargetBinding:
    """Checks that `target` is the kind of model this drafter was configured for.

    Raises:
        ValueError: layers, width, vocabulary or embeddings do not fit; the message names the field and both values.
    """
    text = target.config.get_text_config()
    pairs = {
        "num_hidden_layers": (text.num_hidden_layers, config.num_target_layers),
        "hidden_size": (text.hidden_size, config.hidden_size),
        "vocab_size": (text.vocab_size, config.vocab_size),
    }
    for name, (got, wanted) in pairs.items():
        if got != wanted:
            raise ValueError(
                f"the drafter was made for a target with {name}={wanted}, got {type(target).__name__} with {name}={got}"
            )
    embed_tokens, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
    if embed_tokens is None or lm_head is None:
        raise ValueError(
            f"the target must have input and output embeddings (a causal language model), got {type(target).__name__}"
        )
    if config.mask_token_id is None:
        raise ValueError(
            "mask_token_id is not set in the drafter's configuration, so its blocks have no input; set it before binding"
        )
    rows = plain_weight(embed_tokens)
    if rows is not None and config.mask_token_id >= rows.shape[0]:
        raise ValueError(
            f"mask_token_id must be a row of the target's embedding, 0 to {rows.shape[0] - 1}, got {config.mask_token_id}"
        )
    if getattr(lm_head, "bias", None) is not None:
        raise ValueError(
            f"the target's output head has a bias, which pair scores of embeddings cannot represent ({type(target).__name__})"
        )
    layers = getattr(target.get_decoder(), "layers", None)
    if layers is None or len(layers) != config.num_target_layers:
        raise ValueError(
            f"the target's decoder must expose its {config.num_target_layers} layers as `layers`, got {type(target).__name__}"
        )
    binding = TargetBinding(embed_tokens, lm_head, layers)
    if config.target_model_type is not None and text.model_type != config.target_model_type:
        binding.warnings.append(
            f"the drafter was trained for a {config.target_model_type!r} target, this one is {text.model_type!r}"
        )
    template_hash = config.chat_template_hash(getattr(tokenizer, "chat_template", None))
    if template_hash and config.target_chat_template_hash and template_hash != config.target_chat_template_hash:
        binding.warnings.append(
            f"the tokenizer's chat template ({template_hash}) is not the one of training ({config.target_chat_template_hash}): drafts will be accepted less often"
        )
    return binding


@torch.no_grad()
def whitening_map(head_weight: torch.Tensor, rank: int) -> tuple[torch.Tensor, float]:
    """A `[r, d]` in fp32: whitened principal components of the output embeddings, and the share of variance they keep.

    The components are those of W after its mean direction is projected out, so `A mean(W) = 0` and `A W_v` is centred without a
    bias (method, "Unified transfer space").
    """
    W = head_weight.detach().to(torch.float32)
    mean = W.mean(0)
    direction = mean / mean.norm().clamp_min(1e-12)
    W = W - (W @ direction)[:, None] * direction
    covariance = (W.T @ W / W.shape[0]).double().cpu()
    values, vectors = torch.linalg.eigh(covariance)
    values, vectors = values.flip(0).clamp_min(1e-12), vectors.flip(1)
    # fix the sign of every component, which LAPACK leaves open, so that the map is the same on every machine
    signs = vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()
    kept = float(values[:rank].sum() / values.sum())
    return (vectors * signs)[:, :rank].T.div(values[:rank, None].sqrt()).float().contiguous(), kept


@torch.no_grad()
def transfer_table(
    head_weight: torch.Tensor, transfer_weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """`Z [V, r]`: `z(v) = rms(A W_v)` for all tokens, in fp32 inside, stored in `dtype` on the device of A."""
    A = transfer_weight.float()
    rows = [
        rms(F.linear(part.to(A.device, torch.float32), A), eps).to(dtype) for part in head_weight.detach().split(16384)
    ]
    return torch.cat(rows)


class TapRecorder:
    """Records the outputs of chosen target layers during forward passes: `with TapRecorder(layers, ids) as taps: ...; taps.take()`.

    A hook per tapped layer instead of `output_hidden_states`, whose index lists mean different layers in different Transformers
    releases and whose full tuple keeps every layer of a long prompt alive. A tap of layer i equals `hidden_states[i + 1]`.
    """

    def __init__(self, layers: nn.ModuleList, target_layer_ids: list[int]):
        self.layers, self.target_layer_ids = layers, target_layer_ids
        self.outputs: dict[int, torch.Tensor] = {}
        self.handles = []

    def __enter__(self):
        for layer_id in self.target_layer_ids:
            self.handles.append(self.layers[layer_id].register_forward_hook(self._hook(layer_id)))
        return self

    def _hook(self, layer_id: int):
        def record(module, args, output):
            self.outputs[layer_id] = output[0] if isinstance(output, tuple) else output

        return record

    def __exit__(self, *exc):
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.outputs.clear()

    def take(self, device: torch.device) -> torch.Tensor:
        """Concatenated taps of the last forward pass, `[batch, length, len(ids) * d]`, moved to `device`, and forgets them."""
        parts = [self.outputs[i].to(device) for i in self.target_layer_ids]
        self.outputs.clear()
        return torch.cat(parts, dim=-1)


def token_of_embedding(embeds: torch.Tensor, embed_tokens: nn.Module) -> torch.Tensor:
    """The ids whose input embeddings are exactly `embeds` `[batch, d]`, found by comparing with the target's table: `[batch]`.

    Only for generation loops that hand over embeddings instead of ids.

    Raises:
        ValueError: a row is no token's embedding.
    """
    weight = plain_weight(embed_tokens)
    if weight is None:
        raise ValueError("anchor_ids must be given: the target's embedding table cannot be read to look the anchor up")
    scale = getattr(embed_tokens, "embed_scale", None)
    ids = []
    for row in embeds:
        head = (
            weight[:, :8]
            if scale is None
            else weight[:, :8] * torch.as_tensor(scale, device=weight.device).to(weight.dtype)
        )
        near = (head == row[:8].to(weight.device)).all(-1).nonzero()[:, 0]
        exact = near[(embed_tokens(near) == row.to(weight.device)).all(-1)] if len(near) else near
        if not len(exact):
            raise ValueError(
                "anchor_ids must be given: the first slot of noise_embeds is not a row of the bound target's embedding"
            )
        ids.append(exact[0])
    return torch.stack(ids).to(embeds.device)
