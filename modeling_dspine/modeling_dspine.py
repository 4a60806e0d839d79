"""The DSpine drafter: a DFlash backbone whose slots condition on their left neighbour after every layer.

Reading order: `DSpineAttention` (context keys and values beside those of the block), `DSpineInjection` (one layer's transfer
into and out of the residual stream), `DSpineModel.forward` (backbone with injection), `DSpineModel.propose` (candidates,
transition cache, walk). The operations themselves are in `reference_dspine.py`, the decoding loop in `generation_dspine.py`.
The method is a reconstruction of DSpine (arXiv 2609.36173) from its abstract; the backbone is DFlash (arXiv 2602.06036).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)
from transformers.utils import ModelOutput, logging

from .attention_masks_dspine import attention_masks
from .configuration_dspine import DSpineConfig
from .generation_dspine import dspine_generate
from .hub_dspine import DSpineHubMixin
from .reference_dspine import gated_write, predecessor_table, predicted_feature, rms
from .registry_dspine import call
from .target_dspine import TargetBinding, bind, token_of_embedding, transfer_table, whitening_map


logger = logging.get_logger(__name__)


@dataclass
class DSpineModelOutput(ModelOutput):
    """Output of [`DSpineModel`].

    Args:
        last_hidden_state (`torch.FloatTensor` of shape `[batch_size, num_slots, hidden_size]`):
            `norm(h)`; the target's head makes it the base logits.
        pre_write_hidden_state (`torch.FloatTensor` of shape `[batch_size, num_slots, hidden_size]`, *optional*):
            Residual stream before the last layer's write, where refinement starts. None without injection and refinement.
        features (`torch.FloatTensor` of shape `[batch_size, num_slots, transfer_rank]`, *optional*):
            The last layer's features u.
        layer_features (`tuple(torch.FloatTensor)`, *optional*):
            The features of every injected layer, if `output_features=True`.
        cache (`Cache`, *optional*): keys and values of context and block.
    """

    last_hidden_state: torch.FloatTensor | None = None
    pre_write_hidden_state: torch.FloatTensor | None = None
    features: torch.FloatTensor | None = None
    layer_features: tuple[torch.FloatTensor, ...] | None = None
    cache: Cache | None = None


@dataclass
class DSpineProposal:
    """A drafted block: `tokens` `[N, T]`, the `candidates` `[N, T, K]` they were chosen from, and the probabilities `probs`
    `[N, T, K]` (fp32) they were drawn with, one-hot in greedy rows."""

    tokens: torch.Tensor
    candidates: torch.Tensor
    probs: torch.Tensor


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    """Rotary embedding where keys cover context and block but queries only the block, the last positions of `cos` and `sin`."""
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_len = q.size(-2)
    q_embed = (q * cos[..., -q_len:, :]) + (rotate_half(q) * sin[..., -q_len:, :])
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


class DSpineAttention(nn.Module):
    """Slots attend to the context features of verified positions and to the slots of their own block."""

    def __init__(self, config: DSpineConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        is_sliding = config.layer_types[layer_idx] == "sliding_attention"
        self.sliding_window = config.sliding_window if is_sliding else None
        self.masks_future = is_sliding if config.is_causal is None else config.is_causal
        # masks are always explicit: an attention function must not add a causal one of its own
        self.is_causal = False
        width = config.num_attention_heads * self.head_dim
        kv_width = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [batch, slots, d]
        context: torch.Tensor,  # [batch, new_context, d]
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask=None,
        cache: Cache | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        batch, slots = hidden_states.shape[:2]
        kv_shape = (batch, context.shape[1] + slots, -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden_states).view(batch, slots, -1, self.head_dim)).transpose(1, 2)
        # projected apart, as DFlash does: one projection of the concatenation rounds differently
        key = torch.cat([self.k_proj(context), self.k_proj(hidden_states)], dim=1).view(kv_shape)
        value = torch.cat([self.v_proj(context), self.v_proj(hidden_states)], dim=1).view(kv_shape)
        key, value = self.k_norm(key).transpose(1, 2), value.transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        attn_output, attn_weights = attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return self.o_proj(attn_output.reshape(batch, slots, -1)), attn_weights


class DSpineDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: DSpineConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DSpineAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, context, position_embeddings, attention_mask=None, cache=None, **kwargs):
        residual = hidden_states
        hidden_states, _ = self.self_attn(
            self.input_layernorm(hidden_states), context, position_embeddings, attention_mask, cache, **kwargs
        )
        hidden_states = residual + hidden_states
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class DSpineInjection(nn.Module):
    """One layer's injection weights: `norm` and `feature` read a slot's prediction (P), `gate` (G, b) and `write` (U) pass it on."""

    def __init__(self, config: DSpineConfig):
        super().__init__()
        self.gate_form, self.eps = config.injection_gate, config.rms_norm_eps
        gated = {"channel": config.hidden_size, "rank": config.transfer_rank}.get(config.injection_gate)
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.feature = nn.Linear(config.hidden_size, config.transfer_rank, bias=False)
        self.gate = None if gated is None else nn.Linear(2 * config.transfer_rank, gated)
        self.write = nn.Linear(config.transfer_rank, config.hidden_size, bias=False)

    @property
    def write_weights(self) -> dict:
        """The arguments that every operation using this layer's write takes."""
        gate_weight, gate_bias = (None, None) if self.gate is None else (self.gate.weight, self.gate.bias)
        return {
            "gate_weight": gate_weight,
            "gate_bias": gate_bias,
            "write_weight": self.write.weight,
            "eps": self.eps,
            "gate": self.gate_form,
        }

    def forward(
        self, hidden_states: torch.Tensor, anchor_features: torch.Tensor, soft_tokens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Injects into blocks `[N, B, d]` with `z(anchor)` `[N, r]`; returns the written states and the features `[N, B, r]`.

        With `soft_tokens`, the table Z `[V, r]`, a neighbour passes on its [`soft_token`] instead of its feature. This runs in
        PyTorch: implementations of the operation compute feature and write in one piece.
        """
        weights = (self.norm.weight, self.feature.weight)
        if soft_tokens is None:
            return call("gated_adjacent_injection", hidden_states, anchor_features, *weights, **self.write_weights)
        own = predicted_feature(hidden_states[:, 1:], *weights, self.eps).to(hidden_states.dtype)
        anchors = anchor_features[:, None].to(own.dtype)
        left = torch.cat([anchors, soft_token(own[:, :-1], soft_tokens)], dim=1)
        arguments = {name: value for name, value in self.write_weights.items() if name != "eps"}
        write = gated_write(own, left, **arguments).to(hidden_states.dtype)
        return hidden_states + F.pad(write, (0, 0, 1, 0)), torch.cat([anchors, own], dim=1)


def soft_token(features: torch.Tensor, transfer_table: torch.Tensor) -> torch.Tensor:
    """`softmax(u Z^T / sqrt(r)) Z`: coordinates of the token that features `[..., r]` predict, on average over all tokens.

    As attention over the rows of `Z [V, r]`, so that no weights of all slots and tokens are ever stored.
    """
    queries = features.reshape(1, 1, -1, features.shape[-1])
    rows = transfer_table.to(features.dtype)[None, None]
    return F.scaled_dot_product_attention(queries, rows, rows).to(features.dtype).reshape(features.shape)


class DSpinePreTrainedModel(DSpineHubMixin, PreTrainedModel):
    config_class = DSpineConfig
    config: DSpineConfig
    base_model_prefix = ""
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DSpineDecoderLayer"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    model_tags = ["speculative-decoding", "dspine"]

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, DSpineInjection) and module.gate is not None:
            init.zeros_(module.gate.bias)  # gates start half open


class DSpineModel(DSpinePreTrainedModel):
    """A DSpine drafter. Bind it to its target (`bind_target`), then decode with `spec_generate` or `target.generate`."""

    def __init__(self, config: DSpineConfig):
        super().__init__(config)
        self.layers = nn.ModuleList([DSpineDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        # the last layer's module also serves refinement, so it exists even where it does not inject
        injected = set(config.injection_layers) | ({config.num_hidden_layers - 1} if config.refinement else set())
        self.injections = nn.ModuleDict({str(i): DSpineInjection(config) for i in sorted(injected)})
        self.transfer = None
        if config.uses_transfer_space:
            self.transfer = nn.Linear(config.hidden_size, config.transfer_rank, bias=False)
            self.transfer.weight.requires_grad_(config.transfer_learned)
        stored = config.uses_transfer_space and config.store_transfer_table
        table = torch.zeros(config.vocab_size, config.transfer_rank) if stored else None
        self.register_buffer("transfer_table", table, persistent=stored)
        # a stored table comes with the checkpoint, a new one is computed when it is first needed after binding
        self._table_is_current = False
        self._binding: TargetBinding | None = None
        self.gradient_checkpointing = False
        self.post_init()

    # ---- the target -------------------------------------------------------------------------------------------------------

    def bind_target(self, target: nn.Module, tokenizer=None, init_transfer: bool = False) -> TargetBinding:
        """Checks that `target` fits, keeps references to its embeddings, and prepares the transfer table.

        Args:
            target: a causal language model of the configured size.
            tokenizer: if given, its chat template is compared with the one of training.
            init_transfer: set A from the target's output embeddings (`config.transfer_init`), for a drafter about to be trained.

        Returns:
            The binding; its `warnings` were also logged.

        Raises:
            ValueError: the target does not fit, or its head cannot be read and the checkpoint holds no transfer table.
        """
        binding = bind(self.config, target, tokenizer)
        head_weight = binding.head_weight
        if self.transfer is not None and head_weight is None:
            if init_transfer or not (self.config.store_transfer_table and self._table_is_current):
                raise ValueError(
                    "the target's output head is quantised or sharded, so the transfer table cannot be computed from it; load a drafter "
                    "saved with store_transfer_table=True (bind it to the unquantised target once and save it)"
                )
        self._binding = binding
        for warning in binding.warnings:
            logger.warning(warning)
        if self.transfer is None or head_weight is None:
            return binding
        if init_transfer and self.config.transfer_init == "pca":
            weight, kept = whitening_map(head_weight, self.config.transfer_rank)
            with torch.no_grad():
                self.transfer.weight.copy_(weight)
            logger.info(
                f"transfer space: rank {self.config.transfer_rank} keeps {kept:.1%} of the output embeddings' variance"
            )
        self._table_is_current = False
        return binding

    @property
    def binding(self) -> TargetBinding:
        """The bound target.

        Raises:
            ValueError: `bind_target` has not been called.
        """
        if self._binding is None:
            raise ValueError("the drafter is not bound to a target; call drafter.bind_target(target) first")
        return self._binding

    @binding.setter
    def binding(self, binding: TargetBinding) -> None:
        self._binding, self._table_is_current = binding, False

    @property
    def is_bound(self) -> bool:
        return self._binding is not None

    def train(self, mode: bool = True):
        if mode and self._binding is not None and self._binding.head_weight is not None:
            self._table_is_current = False  # A is about to change
        return super().train(mode)

    def ensure_transfer_table(self) -> torch.Tensor:
        """`Z [V, r]`, recomputed from the bound target if A may have changed since (after training)."""
        if not self._table_is_current:
            weight = self.transfer.weight
            self.transfer_table = transfer_table(
                self.binding.head_weight, weight, self.config.rms_norm_eps, weight.dtype
            )
            self._table_is_current = True
        return self.transfer_table

    def set_transfer_table(self, table: torch.Tensor) -> None:
        """Takes over a table `[V, r]` that was computed elsewhere from the current A, where A itself is sharded."""
        self.transfer_table, self._table_is_current = table, True

    def soft_token_table(self) -> torch.Tensor | None:
        """`Z [V, r]` for soft tokens, None without them. In training from the current A, and constant: z learns from tokens alone."""
        if not self.config.soft_token_features:
            return None
        if not self.training:
            return self.ensure_transfer_table()
        weight = self.transfer.weight
        return transfer_table(self.binding.head_weight, weight, self.config.rms_norm_eps, weight.dtype)

    def token_features(self, input_ids: torch.Tensor) -> torch.Tensor:
        """`z(v)` of tokens, `[...]` int64 to `[..., r]`; differentiable with respect to A in training mode."""
        if not self.training:
            return self.ensure_transfer_table()[input_ids]
        rows = F.embedding(input_ids, self.binding.head_weight.detach())
        return rms(self.transfer(rows), self.config.rms_norm_eps)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The target's head on draft states, `[..., d]` to `[..., V]`, scaled and capped as the target does."""
        weight = getattr(self.binding.lm_head, "weight", None)
        device = hidden_states.device if weight is None else weight.device
        return self._scale(self.binding.lm_head(hidden_states.to(device)).to(hidden_states.device))

    def _scale(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    # ---- the backbone -----------------------------------------------------------------------------------------------------

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        anchor_ids: torch.LongTensor | None = None,
        attention_mask=None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        block_size: int | None = None,
        output_features: bool = False,
        return_dict: bool | None = None,
        **kwargs,
    ) -> DSpineModelOutput:
        r"""
        noise_embeds (`torch.Tensor` of shape `[batch_size, num_blocks * block_size, hidden_size]`):
            Input embeddings of the slots: per block the anchor's, then the mask token's.
        context_hidden_states (`torch.Tensor` of shape `[batch_size, new_context, len(target_layer_ids) * hidden_size]`):
            Tapped target states of positions not yet in `cache`.
        anchor_ids (`torch.LongTensor` of shape `[batch_size, num_blocks]`, *optional*):
            The anchors' token ids. Absent (in Transformers' own DFlash loop, which hands over embeddings and takes each slot's
            token from the head's logits of `last_hidden_state`), they are looked up in the bound target's table, and the last
            hidden states are those refined along the greedy walk, so that this loop drafts what `propose` would.
        attention_mask (*optional*):
            2D `[batch_size, cached + new_context + slots]` with zeros at columns to ignore; or a finished mask (4D tensor,
            flex `BlockMask`, or a dict of these by layer type).
        position_ids (`torch.LongTensor` of shape `[batch_size, new_context + slots]`, *optional*):
            Positions of the new context and the slots. Default: counting on from the cache.
        block_size (`int`, *optional*):
            Slots per block; default: all slots are one block.
        output_features (`bool`): also return every layer's features.
        """
        cache = past_key_values if cache is None else cache
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        batch, slots, width = noise_embeds.shape
        block_size = slots if block_size is None else block_size
        if slots % block_size:
            raise ValueError(f"noise_embeds must hold whole blocks of {block_size} slots, got {slots} slots")
        if noise_embeds.device != self.norm.weight.device or context_hidden_states.device != self.norm.weight.device:
            raise ValueError(
                f"noise_embeds and context_hidden_states must be on the drafter's device {self.norm.weight.device}, got {noise_embeds.device} and {context_hidden_states.device}"
            )
        context = self.hidden_norm(self.fc(context_hidden_states))
        if position_ids is None:
            past = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(past, past + context.shape[1] + slots, device=context.device)[None]
        masks = attention_masks(self, attention_mask, context.shape[1], slots, cache, noise_embeds)
        position_embeddings = self.rotary_emb(noise_embeds, position_ids)
        anchor_features, knows_anchors = None, anchor_ids is not None
        if self.transfer is not None:
            if anchor_ids is None:
                anchors = noise_embeds.view(batch, -1, block_size, width)[:, :, 0].flatten(0, 1)
                anchor_ids = token_of_embedding(anchors, self.binding.embed_tokens)
            anchor_features = self.token_features(anchor_ids.reshape(-1))
        soft_tokens = self.soft_token_table()

        hidden_states, pre_write, features, layer_features = noise_embeds, None, None, ()
        for i, layer in enumerate(self.layers):
            hidden_states = layer(hidden_states, context, position_embeddings, masks[i], cache, **kwargs)
            if str(i) not in self.injections:
                continue
            pre_write = hidden_states
            blocks = hidden_states.reshape(-1, block_size, width)
            written, features = self.injections[str(i)](blocks, anchor_features, soft_tokens)
            features = features.view(batch, slots, -1)
            if i in self.config.injection_layers:
                hidden_states = written.view(batch, slots, width)
            if output_features:
                layer_features += (features,)
        outputs = DSpineModelOutput(
            last_hidden_state=self.norm(hidden_states),
            pre_write_hidden_state=pre_write,
            features=features,
            layer_features=layer_features if output_features else None,
            cache=cache,
        )
        if self.config.refinement and not knows_anchors and not self.training and block_size == slots:
            self._refine_along_walk(outputs, anchor_ids)
        return outputs

    def _refine_along_walk(self, outputs: DSpineModelOutput, anchor_ids: torch.LongTensor) -> None:
        """Replaces the predicted slots' last hidden states by `f_k(token chosen to the left)` of the greedy walk."""
        chosen = self.propose(outputs, anchor_ids).tokens
        predecessors = self.token_features(torch.cat([anchor_ids[:, None], chosen[:, :-1]], dim=1))
        module = self.injections[str(self.config.num_hidden_layers - 1)]
        states, features = outputs.pre_write_hidden_state[:, 1:], outputs.features[:, 1:]
        arguments = (states, features, predecessors.to(features.dtype), self.norm.weight)
        refined = call("last_write_refinement", *arguments, **module.write_weights)
        outputs.last_hidden_state = torch.cat([outputs.last_hidden_state[:, :1], refined], dim=1)

    # ---- choosing tokens --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def propose(
        self,
        outputs: DSpineModelOutput,
        anchor_ids: torch.LongTensor,
        temperature: torch.Tensor | None = None,
        uniforms: torch.Tensor | None = None,
    ) -> DSpineProposal:
        """Chooses the tokens of drafted blocks: candidates from the base logits, all pair scores, then the serial walk.

        Args:
            outputs: of `forward` on one block per row, B slots.
            anchor_ids: `[batch]`.
            temperature: `[batch]`, 0 for greedy rows; None: all greedy.
            uniforms: `[batch, B - 1]` in [0, 1), the randomness of sampled rows.
        """
        logits = self.compute_logits(outputs.last_hidden_state[:, 1:])
        values, candidates = call("select_candidates", logits, self.config.num_candidates)
        if self.config.refinement:
            scores = self._transition_scores(outputs, anchor_ids, candidates)
        else:
            # DFlash: slots do not see each other's choice, so every predecessor gives the same scores
            scores = values[:, :, None].expand(-1, -1, values.shape[-1], -1)
        guidance = float(self.config.refinement_guidance)
        tokens, probs = call(
            "walk_transition_cache",
            scores,
            candidates,
            temperature,
            uniforms,
            base_scores=values if guidance else None,
            guidance=guidance,
        )
        return DSpineProposal(tokens, candidates, probs)

    def _transition_scores(self, outputs, anchor_ids, candidates):
        module = self.injections[str(self.config.num_hidden_layers - 1)]
        states, features = outputs.pre_write_hidden_state[:, 1:], outputs.features[:, 1:]
        table, anchors = self.ensure_transfer_table(), self.token_features(anchor_ids)
        head_weight = self.binding.head_weight
        if head_weight is not None and head_weight.device == states.device:
            arguments = (states, features, anchors, candidates, table, head_weight, self.norm.weight)
            return self._scale(call("transition_cache", *arguments, **module.write_weights))
        # a head whose rows cannot be read: its own logits of every refined state, of which the candidates' are kept
        predecessors = predecessor_table(anchors, candidates, table)
        arguments = (states[:, :, None], features[:, :, None], predecessors, self.norm.weight)
        refined = call("last_write_refinement", *arguments, **module.write_weights)
        columns = candidates[:, :, None].expand(-1, -1, candidates.shape[-1], -1)
        return self.compute_logits(refined).gather(-1, columns.to(refined.device))

    def spec_generate(self, target: nn.Module, input_ids: torch.LongTensor, **kwargs):
        """Generates with `target`, drafting with this model: `target.generate(..., custom_generate=dspine_generate)`.

        Takes everything `target.generate` takes, plus `generator` (see [`dspine_generate`]).
        """
        # `generate` forgets tokenizer and streamer when the decoding method is a callable: stop strings are handed over as a criterion
        stop_strings, tokenizer = kwargs.pop("stop_strings", None), kwargs.pop("tokenizer", None)
        if stop_strings is not None:
            if tokenizer is None:
                raise ValueError("stop_strings needs the target's tokenizer: pass tokenizer=")
            criteria = StoppingCriteriaList(
                [StopStringCriteria(tokenizer, stop_strings), *(kwargs.pop("stopping_criteria", None) or [])]
            )
            kwargs["stopping_criteria"] = criteria
        return target.generate(input_ids, custom_generate=dspine_generate, drafter=self, **kwargs)


__all__ = ["DSpineModel", "DSpineModelOutput", "DSpinePreTrainedModel", "DSpineProposal"]
