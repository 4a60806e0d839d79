"""DFlash, DFlash 2 and DSpark of `speculators` 0.9.0, trained on this project's rows and decoded by this project's loop.

    pip install speculators==0.9.0        # `--no-deps` beside pydantic will do
    python examples/peers/speculators_peers.py dflash2 --target PATH --data train.parquet --max-steps 9000 --mask-token-id 16 --out out/dflash2
    python examples/benchmark.py ... --drafter dflash2=out/dflash2      # a peer's folder is known by its peer.json

Model code and losses are theirs; this file feeds them and decodes with their heads. What is equal for all drafters is listed in
`peer_training.py`. Slots are laid out as in DFlash (`sample_from_anchor=False`, which DSpark supports beside its own default).
Left as the authors have it: the loss (KL to the target's distribution; DSpark also its confidence term, DFlash 2 its selector's), how
anchors are drawn (anew for every row, none in a row's last block), initialisation, convolutions and heads. The SmolLM2 recipes of
`examples/train.py` take the KL too, with a cross-entropy of the base drafts beside it; DFlash by this script tells what that is worth.
"""

import argparse
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from contextlib import contextmanager

import torch
from peer_drafters import PeerDrafter, backbone_fields
from peer_training import Peer, add_arguments, run
from torch import nn
from transformers import Qwen3Config

from dspine.integrations.training.masks import PACKED_ATTENTION
from dspine.modeling_dspine import DSpineConfig, DSpineModel
from dspine.modeling_dspine.modeling_dspine import DSpineDecoderLayer


KINDS = ("dflash", "dflash2", "dspark")
# weights of the peer that only its training uses, or that belong to the target
TRAINING_ONLY = ("confidence_head.", "embed_tokens.", "lm_head.", "verifier_lm_head.", "verifier_norm.", "t2d", "d2t")
# what their package imports at the top for reading data and talking to servers, which nothing here does
UNUSED = ("openai", "hs_connectors", "loguru")
# the same, but used by others: only where they are not installed
UNUSED_IF_ABSENT = ("datasets", "httpx", "aiohttp", "pydantic_settings", "typer", "click")


class _Absent(types.ModuleType):
    """In place of a module that is not installed: any name can be imported from it, nothing of it works."""

    __path__: list[str] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__module__": self.__name__})


class _AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: tuple[str, ...]):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name.split(".")[0] in self.names else None

    def create_module(self, spec):
        return _Absent(spec.name)

    def exec_module(self, module):
        pass


@contextmanager
def _without_unused():
    """Lets their package be imported where it was installed without its dependencies; leaves no placeholder behind."""
    first, last = _AbsentFinder(UNUSED), _AbsentFinder(UNUSED_IF_ABSENT)
    sys.meta_path.insert(0, first)
    sys.meta_path.append(last)
    try:
        yield
    finally:
        sys.meta_path.remove(first)
        sys.meta_path.remove(last)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Absent)]:
            del sys.modules[name]


def load_speculators():
    """Their package, without what it only needs elsewhere.

    Raises:
        ImportError: it is not installed.
    """
    try:
        with _without_unused():
            import speculators
            import speculators.models.dflash2.model_definitions
            import speculators.models.dspark.model_definitions
    except ImportError as error:
        raise ImportError(f"peers need speculators 0.9.0: pip install speculators==0.9.0 ({error})") from None
    return speculators


def keep_losses_out_of_graphs() -> None:
    """Lets `torch.compile` break its graph at their fused losses, which are Triton kernels already.

    Traced they fail in torch 2.11 ("already tracked for mutation": the list of a kernel's tile sizes), and with them the whole pass.
    """
    try:
        from speculators.losses import fused
    except ImportError:
        return  # without Triton their eager losses are used
    for name, loss in list(vars(fused).items()):
        if name.startswith("fused_") and not getattr(loss, "_torchdynamo_disable", False):
            setattr(fused, name, torch.compiler.disable(loss))


# ---- their model ----------------------------------------------------------------------------------------------------------------


def build(kind: str, config: DSpineConfig, target: nn.Module, rank: int):
    """Their model with the backbone of `config` and the target's embeddings, head and final norm, on the target's device in fp32."""
    speculators = load_speculators()
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer = Qwen3Config(
        **backbone_fields(config), initializer_range=config.initializer_range, tie_word_embeddings=False
    )
    # the first name makes their code build tiled masks; the attention below takes both kinds and shares heads in any number
    layer._attn_implementation = "simple_flex_attention" if target.device.type == "cuda" else "sdpa"
    fields = {
        "transformer_layer_config": layer,
        "draft_vocab_size": config.vocab_size,
        "block_size": config.block_size,
        # they count embeddings as entry 0; only recorded, since this file hands over the features
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": False,
        "speculators_config": speculators.SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=config.block_size - 1)],
            default_proposal_method="greedy",
            verifier=speculators.VerifierConfig(name_or_path=None, architectures=[type(target).__name__]),
        ),
    }
    if kind == "dflash":
        model = speculators.DFlashDraftModel(speculators.DFlashSpeculatorConfig(**fields))
    elif kind == "dflash2":
        fields |= {"selector_rank": rank, "selector_top_k": config.num_candidates}
        model = speculators.DFlash2DraftModel(speculators.DFlash2SpeculatorConfig(**fields))
    elif kind == "dspark":
        model = speculators.DSparkDraftModel(speculators.DSparkSpeculatorConfig(**fields, markov_rank=rank))
    else:
        raise ValueError(f"kind must be one of {list(KINDS)}, got {kind!r}")
    for module in model.modules():
        if getattr(module, "config", None) is not None and hasattr(module.config, "num_attention_heads"):
            module.config._attn_implementation = PACKED_ATTENTION
    with torch.no_grad():
        model.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        for head in (model.lm_head, model.verifier_lm_head):
            head.weight.copy_(target.get_output_embeddings().weight)
        model.verifier_norm.weight.copy_(target.get_decoder().norm.weight)
    return model.to(target.device)


def as_batch(row: dict[str, torch.Tensor], states: torch.Tensor, taps: int) -> dict[str, torch.Tensor]:
    """What their forward pass takes, from one packed row and the outputs of the tapped layers and the target's last one."""
    width = states.shape[-1] // (taps + 1)
    starts = row["document_starts"]
    # a document is called by where it begins; padding is nobody's, and neither is a document without response
    responses = torch.zeros(len(starts) + 1, dtype=torch.long, device=starts.device)
    responses.index_add_(0, starts, row["loss_mask"].long())
    return {
        "hidden_states": states[..., : taps * width].float(),
        "verifier_last_hidden_states": states[..., taps * width :].float(),
        "input_ids": row["input_ids"][None],
        "loss_mask": row["loss_mask"][None].long(),
        "document_ids": torch.where(responses[starts] > 0, starts, -1)[None],
        "position_ids": row["position_ids"][None],
    }


class SpeculatorsPeer(Peer):
    """One of their models under training. They compile the whole forward pass on a GPU; where that fails it runs eagerly."""

    needs_last_layer = True

    def __init__(self, kind: str, model: nn.Module, options: argparse.Namespace):
        about = {"kind": kind, "rank": options.rank, "package": "speculators 0.9.0"}
        super().__init__(model, about, ("compiled", "eager", "eager, plain masks"))
        self.taps = len(model.config.aux_hidden_state_layer_ids)
        self.call, _ = type(model).get_trainer_kwargs(
            loss_fn=options.loss_fn,
            loss_implementation="fused" if options.device.startswith("cuda") else "eager",
            dflash_decay_gamma=options.decay_gamma,
            max_anchors=options.max_anchors,
        )
        self.forward = model

    def use(self, attempt: str) -> None:
        if attempt == "compiled":
            keep_losses_out_of_graphs()
        forward = type(self.module).forward
        eager = getattr(forward, "_torchdynamo_orig_callable", forward)
        self.forward = self.module if attempt == "compiled" else eager.__get__(self.module)
        if attempt == "eager, plain masks" and self.module.fc.weight.device.type == "cuda":
            from torch.nn.attention.flex_attention import create_block_mask

            self.module._create_mask_fn = create_block_mask

    def loss(self, row, states, progress):
        _, loss, metrics = self.forward(**as_batch(row, states, self.taps), **self.call)
        # their estimate of the accepted length on the blocks of the step, the target's own token included
        return loss, {"accepted_length_base": metrics["eal_sum"] / metrics["eal_total"].clamp_min(1)}

    def state(self):
        return {n: v for n, v in self.module.state_dict().items() if not n.startswith(TRAINING_ONLY)}


# ---- decoding with their heads --------------------------------------------------------------------------------------------------


class ConvolvedLayer(DSpineDecoderLayer):
    """The shared backbone's layer with their convolutions before and after attention and MLP (DFlash 2)."""

    def __init__(self, config: DSpineConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        conv = load_speculators().models.dflash2.model_definitions.GroupedDynamicCausalConv
        shape = {
            "block_size": config.block_size,
            "kernel_size": 2,
            "group_size": 16 if config.hidden_size % 16 == 0 else 1,
        }
        self.attention_conv, self.mlp_conv = conv(config.hidden_size, **shape), conv(config.hidden_size, **shape)

    def forward(self, hidden_states, context, position_embeddings, attention_mask=None, cache=None, **kwargs):
        inner, kernel = self.attention_conv.prepare(self.input_layernorm(hidden_states))
        inner, _ = self.self_attn(inner, context, position_embeddings, attention_mask, cache, **kwargs)
        hidden_states = hidden_states + self.attention_conv.finish(inner, kernel)
        inner, kernel = self.mlp_conv.prepare(self.post_attention_layernorm(hidden_states))
        return hidden_states + self.mlp_conv.finish(self.mlp(inner), kernel)


class DFlash2Drafter(PeerDrafter):
    """Convolutions in the backbone; the head scores the best base tokens by predecessor and hidden state."""

    def __init__(self, config: DSpineConfig, rank: int):
        super().__init__(config)
        definitions = load_speculators().models.dflash2.model_definitions
        self.layers = nn.ModuleList([ConvolvedLayer(config, i) for i in range(config.num_hidden_layers)])
        self.candidate_selector = definitions.CandidateSelector(
            vocab_size=config.vocab_size, hidden_size=config.hidden_size, rank=rank, top_k=config.num_candidates
        )

    def forward(self, noise_embeds, context_hidden_states, *args, block_size=None, **kwargs):
        for layer in self.layers:
            # blocks may be shorter than in training
            layer.attention_conv.block_size = layer.mlp_conv.block_size = block_size or noise_embeds.shape[1]
        return super().forward(noise_embeds, context_hidden_states, *args, block_size=block_size, **kwargs)

    def score(self, slot, hidden_states, logits, left, state):
        count = self.config.num_candidates
        return *self.candidate_selector.select(logits, hidden_states, left[:, None], count), None


class DSparkDrafter(PeerDrafter):
    """The head adds a low-rank bias of the predecessor to all base logits."""

    def __init__(self, config: DSpineConfig, rank: int):
        super().__init__(config)
        self.markov_head = load_speculators().models.dspark.model_definitions.MarkovHead(
            verifier_vocab_size=config.vocab_size,
            draft_vocab_size=config.vocab_size,
            markov_rank=rank,
            hidden_size=config.hidden_size,
        )

    def score(self, slot, hidden_states, logits, left, state):
        return (
            None,
            logits + self.markov_head.block_bias(prev_token_ids=left[:, None], hidden_states=hidden_states),
            None,
        )


def make_drafter(config: DSpineConfig, peer: dict) -> DSpineModel:
    """See `peer_drafters.make_drafter`."""
    return {"dflash2": DFlash2Drafter, "dspark": DSparkDrafter}[peer["kind"]](config, peer["rank"])


def make_peer(options: argparse.Namespace, config: DSpineConfig, target: nn.Module) -> SpeculatorsPeer:
    return SpeculatorsPeer(options.kind, build(options.kind, config, target, options.rank), options)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    add_arguments(parser)
    parser.add_argument(
        "--loss-fn", default="kl_div", help='as in speculators, e.g. ce, kl_div or {"ce": 0.1, "tv": 0.9}'
    )
    return run(parser.parse_args(argv), make_peer)


if __name__ == "__main__":
    sys.exit(main())
