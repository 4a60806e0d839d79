"""Configuration of a DSpine drafter: its own shape, the target it was made for, and the method's switches."""

import hashlib
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig


# what a mask id, a tap list and so on are called in released DFlash checkpoints, top level or inside `dflash_config`
DFLASH_KEYS = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "is_causal",
)


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> list[int]:
    """Evenly spaced zero-based layers from the second to the third from last, the convention of released DFlash drafters."""
    if num_target_layers < 2:
        raise ValueError(
            f"num_target_layers must be at least 2 (the last layer cannot be tapped), got {num_target_layers}"
        )
    first, last = min(1, num_target_layers - 2), max(num_target_layers - 3, min(1, num_target_layers - 2))
    num_taps = min(num_taps, last - first + 1)
    if num_taps == 1:
        return [min(num_target_layers // 2, num_target_layers - 2)]
    return [round(first + i * (last - first) / (num_taps - 1)) for i in range(num_taps)]


@strict
class DSpineConfig(PreTrainedConfig):
    r"""
    Configuration of a [`DSpineModel`]. `DSpineConfig.from_target(target.config)` fills it for a given target.

    Draft backbone (a DFlash decoder; names as in its checkpoints):
        vocab_size (`int`): tokens of the target, its embedding rows.
        hidden_size (`int`): channels, equal to the target's since its embeddings are borrowed.
        intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim, hidden_act, rms_norm_eps,
        attention_bias, attention_dropout, max_position_embeddings, rope_parameters, initializer_range: as in Qwen3.
        layer_types (`list[str]`, *optional*): `"full_attention"` or `"sliding_attention"` per layer; all full if absent.
        sliding_window (`int`, *optional*): window of the sliding layers, in tokens.
        is_causal (`bool`, *optional*): whether slots see only their left. Absent: only in sliding layers, as DFlash does.

    Block and target:
        block_size (`int`, defaults to 16): slots per block, the anchor included; 2 or more.
        mask_token_id (`int`): input of the slots after the anchor; a row of the target's embedding.
        target_layer_ids (`list[int]`): zero-based target layers whose outputs feed the drafter (`hidden_states[id + 1]`).
        num_target_layers (`int`): layers of the target.
        input_embedding_scale (`float`): factor on the raw rows of the target's input embeddings (`sqrt(hidden_size)` in Gemma).
        output_multiplier (`float`), final_logit_softcapping (`float`, *optional*): what the target does to its logits.
        target_model_type, target_name_or_path, target_revision (`str`, *optional*): which target it was trained for.
        target_chat_template_hash (`str`, *optional*): see `DSpineConfig.chat_template_hash`.
        target_thinking (`bool`, *optional*): whether its training answers were generated with thinking on.

    DSpine (notation of the method in brackets):
        transfer_rank (`int`): dimensions of the transfer space [r].
        transfer_learned (`bool`): whether the map into it [A] is trained or stays as initialised.
        transfer_init (`str`): `"pca"` (whitening of the target's output embeddings) or `"random"`.
        store_transfer_table (`bool`): keep the table of all tokens' coordinates [Z] in the checkpoint; needed when the target
            is served with a quantised or sharded output head.
        injection (`bool`): gated adjacent injection after the layers in `injection_layers`.
        injection_layers (`list[int]`, *optional*): which draft layers; all if absent.
        injection_gate (`str`): `"channel"`, `"rank"` or `"none"` (see `reference_dspine.py`).
        soft_token_features (`bool`): slots pass on `softmax(u Z^T / sqrt(r)) Z`, the average token they predict, in place of
            their feature u; our own reading of a method's variant, which the injection's kernels do not compute.
        refinement (`bool`): choose tokens by last-write refinement; off means every slot takes its own best token.
        num_candidates (`int`): candidates per slot [K].
        refinement_guidance (`float`): greedy drafts go by `S + w (S - base)` with this w, pair scores S beside the candidates' base
            logits. Of decoding alone, so it may be changed after training; `examples/tune_decoding.py` compares values.
        supervision (`str`): layer-wise training signal, `"none"`, `"cosine"` or `"cross_entropy"`.
        supervision_weight (`float`): its weight in the loss [lambda].

    Raises:
        huggingface_hub.errors.StrictDataclassError: a value that no drafter could work with; the message names the field, the
            expectation and the value.
    """

    model_type = "dspine"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    max_position_embeddings: int = 40960
    rope_parameters: dict | None = None
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    is_causal: bool | None = None
    initializer_range: float = 0.02

    block_size: int = 16
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    num_target_layers: int = 36
    input_embedding_scale: float | int = 1.0
    output_multiplier: float | int = 1.0
    final_logit_softcapping: float | int | None = None
    target_model_type: str | None = None
    target_name_or_path: str | None = None
    target_revision: str | None = None
    target_chat_template_hash: str | None = None
    target_thinking: bool | None = None

    transfer_rank: int = 256
    transfer_learned: bool = True
    transfer_init: str = "pca"
    store_transfer_table: bool = False
    injection: bool = True
    injection_layers: list[int] | None = None
    injection_gate: str = "channel"
    soft_token_features: bool = False
    refinement: bool = True
    num_candidates: int = 16
    refinement_guidance: float | int = 0.0
    supervision: str = "none"
    supervision_weight: float | int = 0.0

    def __post_init__(self, **kwargs):
        # z-lab checkpoints keep some keys in a nested `dflash_config`; there they win over the defaults above
        nested = kwargs.pop("dflash_config", None) or {}
        for key in DFLASH_KEYS:
            if nested.get(key) is not None:
                setattr(self, key, nested[key])
        if self.rope_parameters is None:
            self.rope_parameters = {
                "rope_type": "default",
                "rope_theta": float(kwargs.get("rope_theta") or 1_000_000.0),
            }
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.target_layer_ids is None:
            self.target_layer_ids = default_target_layer_ids(self.num_target_layers, self.num_hidden_layers)
        if self.injection_layers is None and self.injection:
            self.injection_layers = list(range(self.num_hidden_layers))
        elif not self.injection:
            self.injection_layers = []
        super().__post_init__(**kwargs)

    def validate_block(self):
        if self.block_size < 2:
            raise ValueError(
                f"block_size must be at least 2 (an anchor and one predicted slot), got {self.block_size}"
            )
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id must be a row of the target's embedding, 0 to {self.vocab_size - 1}, got {self.mask_token_id}"
            )

    def validate_taps(self):
        last = self.num_target_layers - 1
        if not self.target_layer_ids:
            raise ValueError("target_layer_ids must name at least one target layer, got an empty list")
        for layer in self.target_layer_ids:
            if layer == last:
                raise ValueError(
                    f"target_layer_ids must not contain the target's last layer ({last}): Transformers reports its output after "
                    f"the final norm and serving engines before it, so training and serving would disagree; the largest id is {last - 1}"
                )
            if not 0 <= layer < last:
                raise ValueError(
                    f"target_layer_ids must be zero-based layers 0 to {last - 1} of a target with {self.num_target_layers} layers, got {layer}"
                )
        if len(set(self.target_layer_ids)) != len(self.target_layer_ids):
            raise ValueError(f"target_layer_ids must be different layers, got {self.target_layer_ids}")

    def validate_backbone(self):
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads ({self.num_key_value_heads}), got {self.num_attention_heads}"
            )
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types must have one entry for each of the {self.num_hidden_layers} layers, got {len(self.layer_types)}"
            )
        unknown = set(self.layer_types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ValueError(f'layer_types must be "full_attention" or "sliding_attention", got {sorted(unknown)}')
        if "sliding_attention" in self.layer_types and (self.sliding_window is None or self.sliding_window < 1):
            raise ValueError(
                f"sliding_window must be a positive number of tokens when a layer slides, got {self.sliding_window}"
            )

    def validate_method(self):
        choices = {
            "transfer_init": ("pca", "random"),
            "injection_gate": ("channel", "rank", "none"),
            "supervision": ("none", "cosine", "cross_entropy"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {list(allowed)}, got {getattr(self, name)!r}")
        if not 1 <= self.transfer_rank <= self.hidden_size:
            raise ValueError(
                f"transfer_rank must be between 1 and hidden_size ({self.hidden_size}), got {self.transfer_rank}"
            )
        if not 1 <= self.num_candidates <= self.vocab_size:
            raise ValueError(
                f"num_candidates must be between 1 and vocab_size ({self.vocab_size}), got {self.num_candidates}"
            )
        if not 0 <= self.refinement_guidance < float("inf"):
            raise ValueError(f"refinement_guidance must be a number of at least 0, got {self.refinement_guidance}")
        if self.refinement_guidance and not self.refinement:
            raise ValueError(f"refinement_guidance must be 0 without refinement, got {self.refinement_guidance}")
        if self.soft_token_features and not self.injection:
            raise ValueError(
                "soft_token_features must be False without injection, which alone passes features on, got True"
            )
        for layer in self.injection_layers:
            if not 0 <= layer < self.num_hidden_layers:
                raise ValueError(
                    f"injection_layers must be draft layers 0 to {self.num_hidden_layers - 1}, got {layer}"
                )

    @property
    def uses_transfer_space(self) -> bool:
        """Whether the drafter has any of DSpine's own weights; False is a plain DFlash drafter."""
        return self.injection or self.refinement

    @staticmethod
    def chat_template_hash(template: str | None) -> str | None:
        """First 16 hex digits of a chat template's SHA-256: tells whether a drafter is used under the template of its training."""
        return None if template is None else hashlib.sha256(template.encode()).hexdigest()[:16]

    @classmethod
    def from_target(
        cls, target_config: PreTrainedConfig, mask_token_id: int | None = None, tokenizer=None, **overrides: Any
    ):
        """A configuration for a drafter of the given target: same width, heads, RoPE and vocabulary, five layers, 16 slots.

        Args:
            target_config: the target's configuration; multimodal ones are reduced to their text part.
            mask_token_id: the input of unfilled slots. Required unless `tokenizer` has a mask token or leaves embedding rows
                unused. A pad or end token is a bad choice: its embedding already means something.
            tokenizer: the target's tokenizer; also records its chat template's hash.
            overrides: any field of this class.

        Raises:
            ValueError: the target is not a decoder that can be tapped and rolled back, or no mask id can be found.
        """
        text = target_config.get_text_config()
        if target_config.is_encoder_decoder or getattr(text, "is_encoder_decoder", False):
            raise ValueError(
                f"the target must be a decoder-only model, got {text.model_type!r}, which is an encoder-decoder"
            )
        missing = [
            k
            for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
            if not hasattr(text, k)
        ]
        if missing:
            raise ValueError(
                f"the target's configuration ({text.model_type!r}) lacks {missing}, so no drafter shape follows from it"
            )
        stateful = sorted(set(getattr(text, "layer_types", None) or []) - {"full_attention", "sliding_attention"})
        if stateful:
            raise ValueError(
                f"the target ({text.model_type!r}) has layers of type {stateful}, whose state cannot be rolled back after a rejected draft"
            )
        heads = text.num_attention_heads
        fields = {
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size,
            "intermediate_size": _first(getattr(text, "intermediate_size", None)) or 4 * text.hidden_size,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
            "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
            "rms_norm_eps": getattr(text, "rms_norm_eps", None) or 1e-6,
            "max_position_embeddings": getattr(text, "max_position_embeddings", None) or 32768,
            "rope_parameters": _full_rope(text),
            "num_hidden_layers": min(5, max(1, text.num_hidden_layers - 1)),
            "num_target_layers": text.num_hidden_layers,
            "transfer_rank": min(text.hidden_size, 128 if text.hidden_size < 2048 else 256),
            "num_candidates": min(16, text.vocab_size),
            "input_embedding_scale": _embedding_scale(text),
            "output_multiplier": _output_multiplier(text),
            "final_logit_softcapping": getattr(text, "final_logit_softcapping", None),
            "target_model_type": text.model_type,
            "target_name_or_path": _public_name(getattr(target_config, "name_or_path", None)),
            "target_chat_template_hash": cls.chat_template_hash(getattr(tokenizer, "chat_template", None)),
        }
        fields["mask_token_id"] = mask_token_id if mask_token_id is not None else _find_mask_id(text, tokenizer)
        return cls(**(fields | overrides))

    @classmethod
    def from_dflash(cls, config: dict[str, Any], **overrides: Any):
        """The configuration of a released DFlash checkpoint (its `config.json` as a dict), with DSpine's switches added.

        Raises:
            ValueError: the file is not a DFlash drafter's, or uses a part of DFlash 2 that DSpine does not have.
        """
        nested = config.get("dflash_config") or {}
        if "DFlashDraftModel" not in (config.get("architectures") or ["DFlashDraftModel"]) or not (
            nested.get("target_layer_ids") or config.get("target_layer_ids")
        ):
            raise ValueError(
                "expected the config.json of a DFlash drafter (architecture DFlashDraftModel with target_layer_ids), got "
                f"architectures {config.get('architectures')} and keys {sorted(config)[:8]}..."
            )
        rope = config.get("rope_parameters") or {
            "rope_type": "default",
            "rope_theta": config.get("rope_theta", 1e6),
            **_renamed_rope_scaling(config.get("rope_scaling")),
        }
        names = set(cls.__dataclass_fields__) - set(PreTrainedConfig.__dataclass_fields__)
        fields = {k: v for k, v in config.items() if k in names and v is not None} | {"rope_parameters": rope}
        fields |= {k: nested[k] for k in DFLASH_KEYS if nested.get(k) is not None}
        fields["transfer_rank"] = min(128 if fields["hidden_size"] < 2048 else 256, fields["hidden_size"])
        return cls(**(fields | overrides))


def _public_name(name: str | None) -> str | None:
    """A Hub id as it is, a folder by its last part: paths of one machine mean nothing on another."""
    return (Path(name).name if Path(name).is_absolute() or Path(name).is_dir() else name) if name else None


def _first(value):
    return value[0] if isinstance(value, (list, tuple)) else value


def _renamed_rope_scaling(scaling: dict | None) -> dict:
    scaling = dict(scaling or {})
    if "type" in scaling:
        scaling.setdefault("rope_type", scaling.pop("type"))
    return scaling


def _full_rope(text) -> dict:
    """The target's RoPE for full attention. A partial rotary factor is dropped: the drafter rotates whole heads, in training
    and serving alike."""
    rope = dict(getattr(text, "rope_parameters", None) or {})
    if "full_attention" in rope:  # Gemma 3 keeps one set per layer type
        rope = dict(rope["full_attention"])
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", float(getattr(text, "rope_theta", None) or 10000.0))
    rope.pop("partial_rotary_factor", None)
    return rope


def _embedding_scale(text) -> float:
    """Factor between a raw embedding row and what the first layer sees."""
    if text.model_type.startswith("gemma"):
        return float(text.hidden_size) ** 0.5
    return float(getattr(text, "embedding_multiplier", None) or 1.0)


def _output_multiplier(text) -> float:
    """Factor between `W norm(h)` and the target's logits: `logit_scale` in Cohere, the inverse of `logits_scaling` in Granite."""
    return float(getattr(text, "logit_scale", None) or 1.0) / float(getattr(text, "logits_scaling", None) or 1.0)


def _find_mask_id(text, tokenizer) -> int:
    if tokenizer is not None and tokenizer.mask_token_id is not None:
        return tokenizer.mask_token_id
    if tokenizer is not None and len(tokenizer) < text.vocab_size:
        return len(tokenizer)
    raise ValueError(
        "mask_token_id must be given: "
        + (
            "no tokenizer was passed to look for a mask token or an unused embedding row"
            if tokenizer is None
            else f"the tokenizer has no mask token and all {text.vocab_size} embedding rows are in use; choose a reserved token that "
            "never occurs in your data, not pad or eos"
        )
    )


__all__ = ["DSpineConfig"]
