"""DFlash 2 and DSpark of `speculators` 0.9.0, trained on this project's rows and decoded by this project's loop.

    pip install speculators==0.9.0
    python examples/peers/speculators_peers.py dflash2 --target PATH --data train.parquet --max-steps 9000 --mask-token-id 16 --out out/dflash2
    python examples/benchmark.py ... --drafter dflash2=out/dflash2      # a peer's folder is known by its peer.json

Model code and losses are theirs; this file feeds them and decodes with their heads.

Equal for all drafters: target, tapped layers, sequences, tokens per step, anchors per step, steps, backbone (layers, width, heads, RoPE,
block size), slot layout (slot 0 is the anchor, slot k predicts token k: `sample_from_anchor=False`, which DSpark supports beside its
own default), optimizer (AdamW, fp32 master weights, bf16 autocast), learning rate, schedule, clipping, the weight of slots
(`exp(-(k - 1) / gamma)`), the rank of the head as far as it has one (`--rank`), candidates per slot, and the verification.
Left as the authors have it: the loss (KL to the target's distribution; DSpark also its confidence term), how anchors are drawn (anew
for every row, none in a row's last block), initialisation, convolutions and heads. DSpine trains on the tokens of the data instead.
When sampling, q is over the best `num_candidates` tokens of the head's scores for every drafter, so that all are verified alike.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from dspine.integrations.evaluation.results import write_json
from dspine.integrations.training import PackedDataset, TargetRunner, load_sequences
from dspine.integrations.training.masks import PACKED_ATTENTION
from dspine.modeling_dspine import DSpineConfig, DSpineModel, DSpineProposal
from dspine.modeling_dspine.modeling_dspine import DSpineDecoderLayer


KINDS = ("dflash2", "dspark")
HEADS = {"dflash2": "candidate_selector", "dspark": "markov_head"}
# weights of the peer that only its training uses, or that belong to the target
TRAINING_ONLY = ("confidence_head.", "embed_tokens.", "lm_head.", "verifier_lm_head.", "verifier_norm.", "t2d", "d2t")


def _speculators():
    try:
        import speculators
        import speculators.models.dflash2.model_definitions
        import speculators.models.dspark.model_definitions
    except ImportError as error:
        raise ImportError(f"peers need speculators 0.9.0: pip install speculators==0.9.0 ({error})") from None
    return speculators


# ---- their model ----------------------------------------------------------------------------------------------------------------


def build(kind: str, config: DSpineConfig, target: nn.Module, rank: int):
    """Their model with the backbone of `config` and the target's embeddings, head and final norm, on the target's device in fp32."""
    speculators = _speculators()
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer = Qwen3Config(
        **{
            name: getattr(config, name)
            for name in (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "hidden_act",
                "rms_norm_eps",
                "attention_bias",
                "max_position_embeddings",
                "rope_parameters",
                "initializer_range",
            )
        },
        tie_word_embeddings=False,
    )
    on_gpu = target.device.type == "cuda"
    # the first name makes their code build tiled masks; the attention below takes both kinds and shares heads in any number
    layer._attn_implementation = "simple_flex_attention" if on_gpu else "sdpa"
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
    if kind == "dflash2":
        fields |= {"selector_rank": rank, "selector_top_k": config.num_candidates}
        model = speculators.DFlash2DraftModel(speculators.DFlash2SpeculatorConfig(**fields))
    elif kind == "dspark":
        model = speculators.DSparkDraftModel(speculators.DSparkSpeculatorConfig(**fields, markov_rank=rank))
    else:
        raise ValueError(f"kind must be one of {list(KINDS)}, got {kind!r}")
    layer._attn_implementation = PACKED_ATTENTION
    for module in model.modules():
        if getattr(module, "config", None) is not None and hasattr(module.config, "num_attention_heads"):
            module.config._attn_implementation = PACKED_ATTENTION
    with torch.no_grad():
        model.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        for head in (model.lm_head, model.verifier_lm_head):
            head.weight.copy_(target.get_output_embeddings().weight)
        model.verifier_norm.weight.copy_(target.get_decoder().norm.weight)
    return model.to(target.device)


def captured(runner: TargetRunner, row: dict[str, torch.Tensor], taps: int) -> dict[str, torch.Tensor]:
    """What their forward pass takes, from one packed row: `runner` taps the drafter's layers and the target's last one."""
    states = runner(row)
    width = states.shape[-1] // (taps + 1)
    starts = row["document_starts"]
    # documents are numbered by where they begin; the padding is nobody's
    documents = torch.unique_consecutive(starts, return_inverse=True)[1]
    responses = torch.zeros(int(documents.max()) + 1, dtype=torch.long, device=starts.device)
    responses.index_add_(0, documents, row["loss_mask"].long())
    return {
        "hidden_states": states[..., : taps * width].float(),
        "verifier_last_hidden_states": states[..., taps * width :].float(),
        "input_ids": row["input_ids"][None],
        "loss_mask": row["loss_mask"][None].long(),
        "document_ids": torch.where(responses[documents] > 0, documents, -1)[None],
        "position_ids": row["position_ids"][None],
    }


def train(model, runner, dataset, options: argparse.Namespace) -> list[dict]:
    """AdamW with cosine and warm-up, one packed row a step; returns the log."""
    device, taps = model.fc.weight.device, len(model.config.aux_hidden_state_layer_ids)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda"
    )
    warmup = max(1, round(0.04 * options.max_steps))

    def scale(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(options.max_steps - warmup, 1)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
    call, _ = type(model).get_trainer_kwargs(
        loss_fn=options.loss_fn,
        loss_implementation="fused" if device.type == "cuda" else "eager",
        dflash_decay_gamma=options.decay_gamma,
        max_anchors=options.max_anchors,
    )
    order, log, started = torch.Generator().manual_seed(options.seed), [], time.monotonic()
    rows: list[int] = []
    for step in range(1, options.max_steps + 1):
        if not rows:
            rows = torch.randperm(len(dataset), generator=order).tolist()
        row = {name: torch.from_numpy(value).to(device) for name, value in dataset.row(rows.pop()).items()}
        batch = captured(runner, row, taps)
        with torch.autocast(device.type, torch.bfloat16, enabled=options.bf16):
            _, loss, metrics = model(**batch, **call)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        if step % options.logging_steps == 0 or step == options.max_steps:
            entry = {"step": step, "loss": float(loss.detach()), "learning_rate": schedule.get_last_lr()[0]}
            log.append(entry)
            print(
                f"step {step}/{options.max_steps}: loss {entry['loss']:.4f}, {time.monotonic() - started:.0f} s",
                flush=True,
            )
        if options.time_limit is not None and time.monotonic() - started > options.time_limit:
            break
    return log


# ---- decoding with their heads --------------------------------------------------------------------------------------------------


class ConvolvedLayer(DSpineDecoderLayer):
    """The shared backbone's layer with their convolutions before and after attention and MLP (DFlash 2)."""

    def __init__(self, config: DSpineConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        conv = _speculators().models.dflash2.model_definitions.GroupedDynamicCausalConv
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


class PeerDrafter(DSpineModel):
    """A drafter for `spec_generate` that chooses tokens by a peer's head, left to right, each given the one chosen before.

    Args:
        config: of the backbone, with injection and refinement off.
        kind: `"dflash2"` or `"dspark"`.
        rank: of the head.
    """

    def __init__(self, config: DSpineConfig, kind: str, rank: int):
        super().__init__(config)
        definitions = _speculators().models
        self.kind = kind
        if kind == "dflash2":
            self.layers = nn.ModuleList([ConvolvedLayer(config, i) for i in range(config.num_hidden_layers)])
            self.candidate_selector = definitions.dflash2.model_definitions.CandidateSelector(
                vocab_size=config.vocab_size, hidden_size=config.hidden_size, rank=rank, top_k=config.num_candidates
            )
        else:
            self.markov_head = definitions.dspark.model_definitions.MarkovHead(
                verifier_vocab_size=config.vocab_size,
                draft_vocab_size=config.vocab_size,
                markov_rank=rank,
                hidden_size=config.hidden_size,
            )

    def forward(self, noise_embeds, context_hidden_states, *args, block_size=None, **kwargs):
        for layer in self.layers if self.kind == "dflash2" else ():
            # blocks may be shorter than in training
            layer.attention_conv.block_size = layer.mlp_conv.block_size = block_size or noise_embeds.shape[1]
        return super().forward(noise_embeds, context_hidden_states, *args, block_size=block_size, **kwargs)

    @torch.no_grad()
    def propose(self, outputs, anchor_ids, temperature=None, uniforms=None) -> DSpineProposal:
        hidden = outputs.last_hidden_state[:, 1:]
        logits = self.compute_logits(hidden)
        count = self.config.num_candidates
        chosen, candidates, probs, left = [], [], [], anchor_ids
        for slot in range(hidden.shape[1]):
            here, scores = hidden[:, slot : slot + 1], logits[:, slot : slot + 1]
            if self.kind == "dflash2":
                ids, scores = self.candidate_selector.select(scores, here, left[:, None], count)
            else:
                scores = scores + self.markov_head.block_bias(prev_token_ids=left[:, None], hidden_states=here)
                scores, ids = scores.topk(count, dim=-1)
            ids, scores = ids[:, 0], scores[:, 0].float()
            q = nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).float()
            if temperature is not None:
                sampled = torch.softmax(scores / temperature[:, None].clamp_min(1e-6), -1)
                q = torch.where(temperature[:, None] > 0, sampled, q)
            if uniforms is None:
                pick = q.argmax(-1)
            else:
                pick = (q.double().cumsum(-1) <= uniforms[:, slot, None]).sum(-1).clamp_max(q.shape[-1] - 1)
            left = ids.gather(-1, pick[:, None])[:, 0]
            for parts, value in ((chosen, left), (candidates, ids), (probs, q)):
                parts.append(value)
        return DSpineProposal(torch.stack(chosen, 1), torch.stack(candidates, 1), torch.stack(probs, 1))


def load_weights(drafter: PeerDrafter, state: dict[str, torch.Tensor]) -> PeerDrafter:
    """Puts a trained peer's weights into the decoding model; every one of them must have its place."""
    state = {name: value for name, value in state.items() if not name.startswith(TRAINING_ONLY)}
    own = drafter.state_dict()
    missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or unknown:
        raise ValueError(f"the peer's weights do not fit: missing {missing[:5]}, unknown {unknown[:5]}")
    drafter.load_state_dict(state)
    return drafter


def save_peer(
    folder: str | Path, kind: str, rank: int, config: DSpineConfig, state: dict[str, torch.Tensor], dtype
) -> None:
    """Writes `config.json`, `peer.json` and the weights that decoding uses."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    state = {n: v.to(dtype).contiguous().cpu() for n, v in state.items() if not n.startswith(TRAINING_ONLY)}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "peer.json", {"kind": kind, "rank": rank, "package": "speculators 0.9.0"})


def load_peer(folder: str | Path, dtype: torch.dtype) -> PeerDrafter:
    """A folder written by [`save_peer`] as a drafter."""
    folder = Path(folder)
    peer = json.loads((folder / "peer.json").read_text())
    drafter = PeerDrafter(DSpineConfig.from_pretrained(folder), peer["kind"], peer["rank"])
    return load_weights(drafter, load_file(folder / "model.safetensors")).to(dtype).eval()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", nargs="+", required=True, help="parquet files as for examples/train.py")
    parser.add_argument("--mask-token-id", type=int, required=True)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--num-layers", type=int, default=5)
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--tokens-per-batch", type=int, default=20480)
    parser.add_argument("--max-anchors", type=int, default=1536)
    parser.add_argument("--max-steps", type=int, default=9000)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--decay-gamma", type=float, default=7.0)
    parser.add_argument(
        "--loss-fn", default="kl_div", help='as in speculators, e.g. ce, kl_div or {"ce": 0.1, "tv": 0.9}'
    )
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--logging-steps", type=int, default=50)
    parser.add_argument("--time-limit", type=float, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", required=True)
    options = parser.parse_args(argv)
    torch.manual_seed(options.seed)
    started = time.monotonic()
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.bfloat16).to(options.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    config = DSpineConfig.from_target(
        target.config,
        mask_token_id=options.mask_token_id,
        tokenizer=tokenizer,
        block_size=options.block_size,
        num_hidden_layers=options.num_layers,
        injection=False,
        refinement=False,
        target_name_or_path=Path(options.target).name,
    )
    dataset = PackedDataset(
        load_sequences(options.data, tokenizer),
        options.tokens_per_batch,
        options.max_anchors,
        seed=options.seed,
        mask_token_id=options.mask_token_id,
    )
    model = build(options.kind, config, target, options.rank).train()
    runner = TargetRunner(target, [*config.target_layer_ids, config.num_target_layers - 1])
    log = train(model, runner, dataset, options)
    save_peer(options.out, options.kind, options.rank, config, model.state_dict(), torch.bfloat16)
    report = {
        "name": options.kind,
        "steps": log[-1]["step"] if log else 0,
        "seconds": time.monotonic() - started,
        "drafter_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "arguments": {"training": {k: v for k, v in vars(options).items() if k not in ("target", "data", "out")}},
        "drafter": config.to_diff_dict(),
        "evaluation": {},
        "log": log,
    }
    write_json(Path(options.out) / "metrics.json", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
