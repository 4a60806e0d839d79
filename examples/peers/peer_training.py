"""Training of a peer by its own model code and loss, on this project's rows: loop, checkpoints, time limit, evaluation.

Equal for all drafters, DSpine and the DFlash baseline of `examples/train.py` included: target, tapped layers, sequences and their
order (rows of `tokens_per_batch` tokens, drawn by the same sampler), anchors per step, steps, backbone (layers, width, heads, RoPE,
block size), slot layout (slot 0 is the anchor, slot k predicts token k), optimizer (AdamW, fp32 master weights, bf16 autocast),
learning rate, warm-up, cosine, clipping, weight of slots (`exp(-(k - 1) / gamma)`), candidates per slot, verification, and the
walk of the evaluation.
Left as the authors have it: loss, initialisation, convolutions and heads, and how anchors are drawn; the scripts say which. The rank of
heads that have one is `--rank`, by default 128; DSpine's recipe had that too and has 256 now.
"""

import argparse
import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from peer_drafters import load_target, load_weights, make_drafter, save_peer
from torch import nn
from transformers import AutoTokenizer

from dspine.integrations.evaluation.results import write_json
from dspine.integrations.training import EpochSampler, PackedDataset, TargetRunner, load_sequences, walk_dataset
from dspine.integrations.training.masks import PACKED_ATTENTION
from dspine.modeling_dspine import DSpineConfig


RESUME = "resume.pt"


class Peer:
    """A peer's model under training.

    Args:
        module: what is trained, in fp32.
        about: contents of `peer.json`.
        attempts: names of the ways to run it, the fastest first; where one fails in its first step, the next one is tried.
    """

    needs_last_layer = False  # whether `loss` also gets the output of the target's last layer

    def __init__(self, module: nn.Module, about: dict, attempts: tuple[str, ...] = ("eager",)):
        self.module, self.about, self.attempts = module, about, attempts

    def use(self, attempt: str) -> None:
        """Prepares one of `attempts`."""

    def loss(self, row: dict[str, torch.Tensor], states: torch.Tensor, progress: float) -> tuple[torch.Tensor, dict]:
        """Loss of a packed row and tensors to log, from the tapped states `[1, L, taps * d]`; `progress` runs from 0 to 1."""
        raise NotImplementedError

    def state(self) -> dict[str, torch.Tensor]:
        """The weights that decoding uses."""
        raise NotImplementedError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of every peer; the defaults are those of `recipes/smollm2-135m-dflash.yaml`."""
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", nargs="+", required=True, help="parquet files as for examples/train.py")
    parser.add_argument("--eval-data", nargs="*", default=[], metavar="NAME=FILE", help="walked at the end")
    parser.add_argument("--eval-documents", type=int, default=112)
    parser.add_argument("--mask-token-id", type=int, required=True)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--num-layers", type=int, default=5)
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--num-candidates", type=int, default=16)
    parser.add_argument("--tokens-per-batch", type=int, default=20480)
    parser.add_argument("--max-anchors", type=int, default=1536)
    parser.add_argument("--max-steps", type=int, default=9000)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--decay-gamma", type=float, default=7.0)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="on a GPU")
    parser.add_argument(
        "--compile-target",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="the target's layers too, on a GPU, as in the recipe",
    )
    parser.add_argument("--logging-steps", type=int, default=50)
    parser.add_argument("--save-steps", type=int, default=1000)
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --out, if any")
    parser.add_argument(
        "--time-limit",
        type=float,
        help="seconds; the learning rate reaches its end by then, and the folder is usable",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", required=True)


def learning_rate_scale(step: int, progress: float, max_steps: int) -> float:
    """Linear warm-up over 4 % of the steps, then a cosine to 0 at `progress` 1: `cosine` of Transformers. Steps count from 1."""
    warmup = max(1, math.ceil(0.04 * max_steps))
    if step <= warmup:
        return (step - 1) / warmup
    share = warmup / max_steps
    return 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, progress - share) / max(1 - share, 1e-9))))


def rows_in_order(dataset: PackedDataset, seed: int, first: int, pin: bool = False):
    """Rows from number `first` on, without end, epoch by epoch; read ahead in a thread, which also pins their memory if `pin`."""
    sampler, per_epoch = EpochSampler(len(dataset), seed), len(dataset)

    def keys():
        number = first
        while True:
            sampler.set_epoch(number // per_epoch)
            order = list(sampler)
            yield from order[number % per_epoch :]
            number += per_epoch - number % per_epoch

    def read(key):
        row = dataset[key]
        return {name: value.pin_memory() for name, value in row.items()} if pin else row

    with ThreadPoolExecutor(1) as pool:
        source = keys()
        waiting = [pool.submit(read, next(source)) for _ in range(2)]
        while True:
            waiting.append(pool.submit(read, next(source)))
            yield waiting.pop(0).result()


def train(peer: Peer, runner: TargetRunner, dataset: PackedDataset, options, save=None) -> list[dict]:
    """One packed row a step; returns the log.

    Args:
        save: called without arguments every `save_steps` steps.
    """
    device = next(peer.module.parameters()).device
    on_gpu = device.type == "cuda"
    trained = [parameter for parameter in peer.module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=on_gpu)
    log, first, spent = [], 0, 0.0
    checkpoint = Path(options.out) / RESUME
    if options.resume and checkpoint.is_file():
        kept = torch.load(checkpoint, map_location=device, weights_only=True)
        peer.module.load_state_dict(kept["module"], strict=False)  # what is frozen is the target's
        optimizer.load_state_dict(kept["optimizer"])
        log, first, spent = kept["log"], kept["step"], kept["seconds"]
        print(f"continues after step {first}", flush=True)
    attempts = list(peer.attempts if options.compile and on_gpu else peer.attempts[-1:])
    peer.use(attempts[0])
    peer.module.train()
    began = time.monotonic()
    marked, marked_step = began, first
    # copied from pageable memory, a row would wait until the device has finished the last step
    rows = rows_in_order(dataset, options.seed, first, pin=on_gpu)
    for step in range(first + 1, options.max_steps + 1):
        elapsed = spent + time.monotonic() - began
        progress = (step - 1) / options.max_steps
        if options.time_limit is not None:
            progress = min(1.0, max(progress, elapsed / options.time_limit))
        scale = learning_rate_scale(step, progress, options.max_steps)
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * scale
        row = {name: value.to(device, non_blocking=True) for name, value in next(rows).items()}
        states = runner(row)
        while True:
            try:
                with torch.autocast(device.type, torch.bfloat16, enabled=options.bf16):
                    loss, shown = peer.loss(row, states, progress)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                break
            except Exception as error:
                if step != first + 1 or len(attempts) == 1:
                    raise
                failed = attempts.pop(0)
                print(
                    f"'{failed}' failed ({type(error).__name__}: {str(error)[:300]}); trying '{attempts[0]}'",
                    flush=True,
                )
                peer.use(attempts[0])
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        last = step == options.max_steps or (options.time_limit is not None and elapsed > options.time_limit)
        if step % options.logging_steps == 0 or last:
            entry = {"step": step, "loss": float(loss.detach()), "learning_rate": options.learning_rate * scale}
            entry |= {name: float(value) for name, value in shown.items()}
            log.append(entry)
            now = time.monotonic()
            entry["seconds_per_step"] = (now - marked) / (step - marked_step)
            marked, marked_step = now, step
            words = ", ".join(f"{name} {value:.4g}" for name, value in entry.items() if name != "step")
            print(f"step {step}/{options.max_steps}: {words}, {spent + now - began:.0f} s in all", flush=True)
        if save is not None and (step % options.save_steps == 0 or last):
            kept = {
                "step": step,
                "seconds": spent + time.monotonic() - began,
                "module": {n: p.detach() for n, p in peer.module.named_parameters() if p.requires_grad},
                "optimizer": optimizer.state_dict(),
                "log": log,
            }
            temporary = checkpoint.with_suffix(".tmp")
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            torch.save(kept, temporary)
            temporary.replace(checkpoint)
            save()
        if last:
            break
    rows.close()
    return log


def evaluate(peer: Peer, config: DSpineConfig, runner: TargetRunner, options, tokenizer) -> dict[str, float]:
    """Accepted length of the peer's drafts walked along stored answers, as `examples/train.py` reports it."""
    device = runner.device
    drafter = load_weights(make_drafter(config, peer.about), peer.state())
    drafter = drafter.to(device, runner.target.dtype).eval()
    drafter.bind_target(runner.target)
    drafter.set_attn_implementation(PACKED_ATTENTION)
    width, result = len(config.target_layer_ids) * config.hidden_size, {}
    for entry in options.eval_data:
        name, _, path = entry.rpartition("=")
        name = name or Path(path).stem
        sequences = load_sequences([path], tokenizer).every(options.eval_documents)
        dataset = PackedDataset(sequences, options.tokens_per_batch, options.max_anchors, shuffle=False)
        taps = lambda row: runner(row)[..., :width]  # noqa: E731
        walked = walk_dataset(drafter, taps, dataset, device, flex=device.type == "cuda").metrics()
        result |= {f"eval_{name}_{key}": value for key, value in walked.items()}
        print(f"{name}: accepted length {walked['accepted_length']:.3f}", flush=True)
    return result


def run(options, make_peer) -> int:
    """The whole of a script: `make_peer(options, config, target)` gives the [`Peer`] to train."""
    torch.manual_seed(options.seed)
    started = time.monotonic()
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    target = load_target(options.target, dtype, options.device)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    config = DSpineConfig.from_target(
        target.config,
        mask_token_id=options.mask_token_id,
        tokenizer=tokenizer,
        block_size=options.block_size,
        num_hidden_layers=options.num_layers,
        num_candidates=options.num_candidates,
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
    print(f"rows: {dict(dataset.report)}", flush=True)
    peer = make_peer(options, config, target)
    layers = [*config.target_layer_ids, *([config.num_target_layers - 1] if peer.needs_last_layer else [])]
    runner = TargetRunner(target, layers, compile=options.compile_target and options.device.startswith("cuda"))

    def save():
        save_peer(options.out, config, peer.about, peer.state(), torch.bfloat16)

    log = train(peer, runner, dataset, options, save)
    arguments = {k: v for k, v in vars(options).items() if k not in ("target", "data", "eval_data", "out")}
    report = {
        "name": options.kind,
        "steps": log[-1]["step"] if log else 0,
        "seconds": time.monotonic() - started,
        "drafter_parameters": sum(value.numel() for value in peer.state().values()),
        "arguments": {"training": arguments, "data": {"data": [Path(path).name for path in options.data]}},
        "drafter": config.to_diff_dict(),
        "peer": peer.about,
        "evaluation": {},
        "log": log,
    }
    write_json(Path(options.out) / "metrics.json", report)
    if options.eval_data:
        report["evaluation"] = evaluate(peer, config, runner, options, tokenizer)
        write_json(Path(options.out) / "metrics.json", report)
    print(f"{options.kind}: {report['steps']} steps, {report['seconds']:.0f} s, {options.out}", flush=True)
    return 0


__all__ = ["Peer", "add_arguments", "evaluate", "learning_rate_scale", "rows_in_order", "run", "train"]
