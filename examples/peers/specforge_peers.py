"""Domino of `specforge` 0.2.0, trained on this project's rows and decoded by this project's loop.

    pip install --no-deps specforge==0.2.0        # its dependencies pin SGLang and an older Transformers; none of them is used here
    python examples/peers/specforge_peers.py domino --target PATH --data train.parquet --max-steps 9000 --mask-token-id 16 --out out/domino
    python examples/benchmark.py ... --drafter domino=out/domino

Backbone, head, loss and the schedule of the loss are theirs (`DominoDraftModel`, `OnlineDominoModel`, `linear_lambda_base`); this file
feeds them and decodes with their head. What is equal for all drafters is listed in `peer_training.py`. In particular:

* rows: theirs are one document each, padded; here they are packed, with a mask that keeps documents apart. Anchors follow their rule
  (a response token before another one), drawn as for DSpine;
* slots as in DFlash (`shift_label=False`, which they support beside the published `True`), so that slot k predicts token k;
* `--rank` is the width of the head's bottleneck (`emb_dim`; published: 256), its GRU has `--gru-hidden` units (published: 1,024), and
  the first predicted slot is not corrected (`pure_draft_prefix_len=1`, as published).
"""

import argparse
import sys

import torch
from peer_drafters import PeerDrafter, backbone_fields
from peer_training import Peer, add_arguments, run
from torch import nn
from transformers import Qwen3Config

from dspine.integrations.training.masks import PACKED_ATTENTION, slot_mask
from dspine.modeling_dspine import DSpineConfig


def _specforge():
    """Their draft model, their model with the loss, and the schedule of the loss's base part."""
    try:
        from specforge.algorithms.common.dflash_family_model import OnlineDominoModel
        from specforge.modeling.draft.domino import DominoDraftModel
        from specforge.training.strategies.base import linear_lambda_base
    except ImportError as error:
        raise ImportError(
            f"this peer needs specforge 0.2.0: pip install --no-deps specforge==0.2.0 ({error})"
        ) from None
    return DominoDraftModel, OnlineDominoModel, linear_lambda_base


def build(config: DSpineConfig, target: nn.Module, head: dict, gamma: float) -> nn.Module:
    """Their model with loss, the draft model in fp32 beside the target's frozen embeddings and head, on the target's device."""
    draft_class, online_class, _ = _specforge()

    class PackedDomino(online_class):
        """Blocks of one packed row, whose anchors, documents and positions are in `row`, in place of padded documents."""

        row: dict[str, torch.Tensor] | None = None

        def _forward_draft_blocks(self, input_ids, hidden_states, loss_mask):
            row = self.row
            anchors, kept = row["anchors"], row["anchor_mask"]
            offsets = torch.arange(self.block_size, device=anchors.device)
            slots = (row["position_ids"][anchors][:, None] + offsets).view(-1)
            mask = slot_mask(anchors, row["document_starts"], self.block_size, flex=anchors.device.type == "cuda")
            hidden = self.draft_model(
                position_ids=torch.cat([row["position_ids"], slots])[None],
                noise_embedding=self._create_noise_embed(input_ids, anchors[None], kept[None]),
                target_hidden=hidden_states,
                attention_mask=mask,
            )
            return anchors[None], kept[None], hidden

    layer = Qwen3Config(
        **backbone_fields(config),
        initializer_range=config.initializer_range,
        tie_word_embeddings=False,
        num_target_layers=config.num_target_layers,
        block_size=config.block_size,
        dflash_config={
            "target_layer_ids": list(config.target_layer_ids),
            "mask_token_id": config.mask_token_id,
            "projector_type": "domino",
            "shift_label": False,
            **head,
        },
    )
    layer._attn_implementation = "sdpa"
    draft = draft_class(layer)
    for module in draft.modules():
        if getattr(module, "config", None) is not None:
            module.config._attn_implementation = PACKED_ATTENTION
    model = PackedDomino(
        draft_model=draft.to(target.device, torch.float32),
        target_lm_head=target.get_output_embeddings(),
        target_embed_tokens=target.get_input_embeddings(),
        mask_token_id=config.mask_token_id,
        block_size=config.block_size,
        attention_backend="sdpa",  # only says which mask they would build
        loss_decay_gamma=gamma,
        shift_label=False,
    )
    model.lm_head.requires_grad_(False)
    model.embed_tokens.requires_grad_(False)
    return model


class DominoPeer(Peer):
    """Domino under training. They run it eagerly; compiling backbone and loss changes nothing but the time."""

    def __init__(self, model: nn.Module, about: dict, max_steps: int):
        super().__init__(model, about, ("compiled", "compiled loss", "eager"))
        self.max_steps, self.schedule = max_steps, _specforge()[2]
        self.eager = (model.draft_model.forward, model._domino_objective_chunk_terms)

    def use(self, attempt: str) -> None:
        forward, objective = self.eager
        if attempt == "compiled":
            forward = torch.compile(forward, dynamic=False)
        if attempt.startswith("compiled"):
            objective = torch.compile(objective, dynamic=False)
        self.module.draft_model.forward, self.module._domino_objective_chunk_terms = forward, objective

    def loss(self, row, states, progress):
        self.module.row = row
        base = self.schedule(round(progress * self.max_steps), self.max_steps)
        loss, _, metrics = self.module(
            row["input_ids"][None], states.float(), row["loss_mask"][None].float(), lambda_base=base
        )
        shown = {"loss_base": metrics["base_loss"], "accepted_length_base": metrics["accept_len"]}
        return loss, shown

    def state(self):
        return self.module.draft_model.state_dict()


class DominoDrafter(PeerDrafter):
    """The head runs a GRU over the tokens chosen so far and corrects all base logits of a slot by its state."""

    def __init__(self, config: DSpineConfig, head: dict):
        super().__init__(config)
        # slot k of a block is the k-th predicted one; 1 + prefix is their `suffix_start` for this layout of slots
        self.first_corrected = int(head["pure_draft_prefix_len"])
        self.prefix_gru = nn.GRU(config.hidden_size, head["gru_hidden_dim"], batch_first=True, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(config.hidden_size + head["gru_hidden_dim"], head["emb_dim"], bias=False),
            nn.SiLU(),
            nn.Linear(head["emb_dim"], config.vocab_size, bias=False),
        )

    def score(self, slot, hidden_states, logits, left, state):
        read, state = self.prefix_gru(self.binding.embed_tokens(left)[:, None].to(hidden_states), state)
        if slot >= self.first_corrected:
            logits = logits + self.embed_proj(torch.cat([hidden_states, read], dim=-1))
        return None, logits, state


def make_drafter(config: DSpineConfig, peer: dict) -> DominoDrafter:
    """See `peer_drafters.make_drafter`."""
    return DominoDrafter(config, peer["head"])


def make_peer(options: argparse.Namespace, config: DSpineConfig, target: nn.Module) -> DominoPeer:
    head = {
        "emb_dim": options.rank,
        "gru_hidden_dim": options.gru_hidden,
        "pure_draft_prefix_len": options.uncorrected_slots,
    }
    about = {"kind": "domino", "rank": options.rank, "head": head, "package": "specforge 0.2.0"}
    return DominoPeer(build(config, target, head, options.decay_gamma), about, options.max_steps)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["domino"])
    add_arguments(parser)
    parser.add_argument("--gru-hidden", type=int, default=1024)
    parser.add_argument(
        "--uncorrected-slots", type=int, default=1, help="predicted slots left as the backbone has them"
    )
    return run(parser.parse_args(argv), make_peer)


if __name__ == "__main__":
    sys.exit(main())
