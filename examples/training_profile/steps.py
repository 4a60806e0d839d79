"""Training steps of a drafter of ours and of the DFlash model of `speculators`, on the same shape."""

import sys
from pathlib import Path

import torch
from torch import nn
from transformers import Qwen3Config

from dspine.integrations.training import DSpineObjective, LossArguments
from dspine.integrations.training.masks import slot_masks
from dspine.modeling_dspine.target_dspine import TargetBinding
from training_profile.shapes import Shape


PEERS = Path(__file__).resolve().parents[1] / "peers"


def loss_arguments(kind: str, args) -> LossArguments:
    """The loss of a drafter of ours; after a hyphen its name says by which distance."""
    _, _, distance = kind.partition("-")
    named = {"distance": distance, "refined_weight": 0.0} if distance else {}
    return LossArguments(cross_entropy_backend=args.cross_entropy, **named)


def our_step(kind: str, shape: Shape, args):
    """Forward and training step of a drafter of ours."""
    drafter = shape.drafter(kind)
    drafter.binding = TargetBinding(shape.embed, shape.head, nn.ModuleList())
    arguments = loss_arguments(kind, args)
    objective = DSpineObjective(drafter, arguments, compile=args.compile).train()
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4, fused=shape.device.type == "cuda")
    taps = shape.taps()
    final = None if arguments.distance == "none" else shape.final()

    def forward():
        masks = slot_masks(
            drafter.config, shape.row["anchors"], shape.row["document_starts"], shape.device.type == "cuda"
        )
        with shape.autocast():
            given = {"context_hidden_states": taps, "masks": masks, "target_hidden_states": final}
            return objective(**given, **shape.row)["loss"]

    return forward, training_step(forward, drafter, optimizer), drafter


def training_step(forward, model: nn.Module, optimizer):
    def step():
        forward().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def speculators_step(shape: Shape, compile: bool):
    """Forward and training step of the DFlash model of `speculators`, set up as by its trainer, which compiles the forward pass.

    Its fused loss stays out of the compiled graph, as for the peers: in PyTorch 2.11 tracing it fails, and all would run eagerly.

    Raises:
        ImportError: the package is not there.
    """
    sys.path.append(str(PEERS))
    from speculators_peers import keep_losses_out_of_graphs, load_speculators

    speculators = load_speculators()
    keep_losses_out_of_graphs()
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    cuda, config = shape.device.type == "cuda", shape.config("dflash")
    names = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
    )
    names += " hidden_act rms_norm_eps attention_bias max_position_embeddings rope_parameters initializer_range"
    layer = Qwen3Config(**{name: getattr(config, name) for name in names.split()}, tie_word_embeddings=False)
    layer._attn_implementation = "simple_flex_attention" if cuda else "sdpa"
    fields = DFlashSpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=config.vocab_size,
        block_size=config.block_size,
        aux_hidden_state_layer_ids=[i + 1 for i in config.target_layer_ids],
        mask_token_id=config.mask_token_id,
        sample_from_anchor=False,
        speculators_config=speculators.SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=config.block_size - 1)],
            default_proposal_method="greedy",
            verifier=speculators.VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
        ),
    )
    with torch.device(shape.device):
        model = DFlashDraftModel(fields).float().train()
    with torch.no_grad():
        model.embed_tokens.weight.copy_(shape.embed.weight)
        model.lm_head.weight.copy_(shape.head.weight)
        model.verifier_lm_head.weight.copy_(shape.head.weight)
    call, _ = DFlashDraftModel.get_trainer_kwargs(
        loss_fn="kl_div", loss_implementation="fused" if cuda else "eager", max_anchors=shape.anchors
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, weight_decay=0.01)
    row = shape.row
    starts = row["document_starts"]
    batch = {
        "hidden_states": shape.taps(),
        "verifier_last_hidden_states": shape.final(),
        "input_ids": row["input_ids"][None],
        "loss_mask": row["loss_mask"][None].long(),
        "document_ids": starts[None],
        "position_ids": row["position_ids"][None],
    }
    model_forward = model
    if not compile:
        wrapped = type(model).forward
        model_forward = getattr(wrapped, "_torchdynamo_orig_callable", wrapped).__get__(model)

    def forward():
        with shape.autocast():
            return model_forward(**batch, **call)[1]

    return forward, training_step(forward, model, optimizer), model
