"""The DSpine drafter on SGLang layers: SGLang's DFlash backbone with the gated injection after every layer.

Attention (context keys and values beside those of the block), its sharding and the KV pool are DFLASH's own, by subclassing. The
injection reads and writes the full residual stream, so its weights are replicated over tensor-parallel ranks.
"""

from collections.abc import Iterable

import torch
from torch import nn

from dspine.modeling_dspine.registry_dspine import call
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.models.dflash import DFlashDraftModel

from .head import HeadShard
from .tail import DecodingTail


# parameter of a fused SGLang layer -> the checkpoint's names for its parts, with the shard each part fills
FUSED = {
    "qkv_proj": (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v")),
    "gate_up_proj": (("gate_proj", 0), ("up_proj", 1)),
}


class DSpineInjection(nn.Module):
    """One layer's injection weights under the checkpoint's names; see `modeling_dspine.DSpineInjection`."""

    def __init__(self, config):
        super().__init__()
        d, r = config.hidden_size, config.transfer_rank
        gated = {"channel": d, "rank": r}.get(config.injection_gate)
        self.gate_form, self.eps = config.injection_gate, config.rms_norm_eps
        self.norm = RMSNorm(d, eps=config.rms_norm_eps)
        self.feature = nn.Linear(d, r, bias=False)
        self.gate = None if gated is None else nn.Linear(2 * r, gated)
        self.write = nn.Linear(r, d, bias=False)

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

    def forward(self, blocks: torch.Tensor, anchor_features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[N, B, d]` and z(anchor) `[N, r]` to the written states and the features `[N, B, r]`."""
        weights = (self.norm.weight, self.feature.weight)
        return call("gated_adjacent_injection", blocks, anchor_features, *weights, **self.write_weights)


class DSpineDraftModel(DFlashDraftModel):
    """What SGLang loads for a checkpoint whose `architectures` names `DSpineModel`.

    After `forward`, `take_left_behind` hands the last layer's state to the decoding tail. `bind_head` must have been called
    before the first forward pass: slot 0's feature is a row of the transfer table.
    """

    def __init__(self, config, quant_config=None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        injected = set(config.injection_layers) | ({config.num_hidden_layers - 1} if config.refinement else set())
        self.injections = nn.ModuleDict({str(i): DSpineInjection(config) for i in sorted(injected)})
        self.transfer = None
        table = None
        if config.uses_transfer_space:
            self.transfer = nn.Linear(config.hidden_size, config.transfer_rank, bias=False)
            table = torch.zeros(config.vocab_size, config.transfer_rank, dtype=self.transfer.weight.dtype)
        # allocated here once: CUDA graphs keep its address
        self.register_buffer("transfer_table", table, persistent=False)
        self.tail: DecodingTail | None = None
        self._table_was_loaded = False
        self._left_behind: tuple[torch.Tensor, ...] | None = None

    def set_block_size(self, block_size: int) -> None:
        """Adopts the number of slots that is served, which may be smaller than that of training."""
        if not 2 <= block_size <= self.config.block_size:
            raise ValueError(
                f"--speculative-num-draft-tokens must be between 2 and the drafter's trained block size {self.config.block_size}, got {block_size}"
            )
        self.block_size = block_size

    @torch.no_grad()
    def bind_head(self, head: HeadShard) -> None:
        """Takes the target's output embeddings and computes the transfer table from them, unless the checkpoint brought it."""
        # without gradients: A is a parameter, and a recorded history would hold the target's head in fp32
        if self.transfer is not None and not self._table_was_loaded:
            self.transfer_table.copy_(
                head.table(self.transfer.weight, self.config.rms_norm_eps, self.transfer_table.dtype)
            )
        write_weights = None
        if self.config.refinement:
            write_weights = self.injections[str(self.config.num_hidden_layers - 1)].write_weights
        self.tail = DecodingTail(self.config, self.norm.weight, write_weights, self.transfer_table, head)

    def take_left_behind(self) -> tuple[torch.Tensor, ...] | None:
        """Residual stream before the last write `[N, B, d]`, last layer's u `[N, B, r]` and z(anchor) `[N, r]` of the last forward.

        Forgets them: references into a CUDA graph's memory must not outlive the capture. None without refinement.
        """
        left_behind, self._left_behind = self._left_behind, None
        return left_behind

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch,
        input_embeds: torch.Tensor | None = None,
        get_embedding: bool = False,
        pp_proxy_tensors=None,
    ) -> LogitsProcessorOutput:
        """One draft pass over whole blocks.

        Args:
            input_ids: `[N * B]`, per block the anchor and the mask token; only the anchors' ids are read.
            input_embeds: `[N * B, d]`, their input embeddings from the target.

        Returns:
            Output with `hidden_states` `[N * B, d]`, `norm(h)`.

        Raises:
            ValueError: embeddings are missing, slots do not form whole blocks, or no head was bound.
        """
        if input_embeds is None:
            raise ValueError("input_embeds must be given: a DSpine drafter has no embeddings of its own")
        tokens, width = input_embeds.shape
        if tokens == 0:
            return LogitsProcessorOutput(next_token_logits=None, hidden_states=input_embeds)
        if tokens % self.block_size:
            raise ValueError(f"a draft pass must hold whole blocks of {self.block_size} slots, got {tokens} slots")
        anchor_features = None
        if self.transfer is not None:
            if self.tail is None:
                raise ValueError("bind_head must be called before the first draft pass")
            anchor_features = self.transfer_table[input_ids.view(-1, self.block_size)[:, 0]]

        hidden_states = input_embeds
        for i, layer in enumerate(self.layers):
            # the layer's two summands are joined at once: the injection needs the residual stream itself
            update, residual = layer(positions, hidden_states, forward_batch, None)
            hidden_states = update + residual
            if str(i) not in self.injections:
                continue
            blocks = hidden_states.view(-1, self.block_size, width)
            written, features = self.injections[str(i)](blocks, anchor_features)
            if self.config.refinement and i == self.config.num_hidden_layers - 1:
                self._left_behind = (blocks, features, anchor_features)
            if i in self.config.injection_layers:
                hidden_states = written.reshape(tokens, width)
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=self.norm(hidden_states))

    def checkpoint_names(self) -> dict[str, tuple[torch.Tensor, str | int | None]]:
        """Every tensor a checkpoint of this configuration must hold: name -> (where it goes, shard of a fused parameter)."""
        names = {}
        for name, parameter in self.named_parameters():
            fused = next((key for key in FUSED if f".{key}." in name), None)
            for part, shard in FUSED.get(fused, ((None, None),)):
                names[name if part is None else name.replace(fused, part)] = (parameter, shard)
        if self.transfer is not None and self.config.store_transfer_table:
            names["transfer_table"] = (self.transfer_table, None)
        return names

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads a checkpoint, every tensor of it and nothing less.

        Returns:
            The names loaded.

        Raises:
            ValueError: a tensor is missing, unknown or of another shape; the message names it.
        """
        names, loaded = self.checkpoint_names(), set()
        for name, tensor in weights:
            if name not in names:
                raise ValueError(
                    f"the DSpine checkpoint has a tensor that its configuration does not account for: {name} {list(tensor.shape)}"
                )
            parameter, shard = names[name]
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            try:
                loader(parameter, tensor) if shard is None else loader(parameter, tensor, shard)
            except (AssertionError, RuntimeError, ValueError) as error:
                raise ValueError(
                    f"tensor {name} of the DSpine checkpoint does not fit: it has shape {list(tensor.shape)}, its parameter {list(parameter.shape)} on this rank ({error})"
                ) from error
            loaded.add(name)
        missing = sorted(set(names) - loaded)
        if missing:
            raise ValueError(f"the DSpine checkpoint lacks {len(missing)} tensors: {', '.join(missing)}")
        self._table_was_loaded = "transfer_table" in loaded
        if self.tail is not None:
            # new weights in a running server: the table follows A, at its old address
            self.bind_head(self.tail.head)
        return loaded
