"""Times training steps on one GPU and says where the time goes.

    python examples/profile_training.py --out profile.json                       # SmolLM2-135M shape, 1,536 blocks of 16 slots
    python examples/profile_training.py --drafters dspine dspine-kl dflash        # what KL to the target's distribution costs
    python examples/profile_training.py --sections qwen3-8b --drafters dspine speculators dflash --target-layers 0 --out profile.json

Weights and tokens are random: times do not depend on them. Measured are, apart from each other,

* the drafter's step: forward pass, loss, backward pass, clipping and optimizer, on taps that are already there;
* the target's pass, with `--target-layers` layers of the real width;
* whole steps of `DSpineTrainer` with its data loader (`--trainer-steps`), and how long the GPU is busy in them.

`dspine-kl`, `dspine-tv` and `dflash-kl` learn from the target's distribution: the distance takes the place of the drafts'
cross-entropy. `--drafters speculators` times the DFlash model, loss and optimizer of `speculators` 0.9.0 on the same shapes: fp32 weights under bf16 autocast,
its compiled forward pass and its fused KL loss, as its trainer runs them. It learns from the target's distribution, so its step
includes the product that makes the target's logits of all slots. Its first step takes long, since it also tries some twenty tilings
of each loss kernel.

Parts run in the order given. A part that fails, or runs past `--part-limit`, is recorded as `error` with the figures it has reached,
and the others go on; `--out` is written after every figure, so that a run that is ended from outside leaves all it had.
"""

import argparse
import gc
import json
import signal
import statistics
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, TrainerCallback, TrainingArguments

from dspine.integrations.training import (
    DSpineObjective,
    DSpineTrainer,
    LossArguments,
    PackedDataset,
    TargetRunner,
    estimate,
    from_records,
)
from dspine.integrations.training.masks import PACKED_ATTENTION, slot_masks
from dspine.modeling_dspine import DSpineConfig, DSpineModel
from dspine.modeling_dspine.target_dspine import TargetBinding


SHAPES = {
    "smollm2-135m": {
        "target": LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
        ),
        "drafter": {"transfer_rank": 128},
        "tokens": 20480,
        "anchors": 1536,
        "document": 320,
    },
    "qwen3-8b": {
        "target": Qwen3Config(
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=40960,
        ),
        "drafter": {"transfer_rank": 256},
        "tokens": 2048,
        "anchors": 512,
        "document": 2048,
    },
    "tiny": {
        "target": LlamaConfig(
            vocab_size=300,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
        ),
        "drafter": {"transfer_rank": 16},
        "tokens": 512,
        "anchors": 16,
        "document": 100,
    },
}


DRAFTERS = ["dspine", "dspine-kl", "dspine-tv", "dflash", "dflash-kl", "speculators"]


# ---- clocks ---------------------------------------------------------------------------------------------------------------------


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def milliseconds(step, count: int, warmup: int, device) -> dict[str, float]:
    """Median and extremes of `count` timed calls, each waited for, after `warmup` untimed ones, of which the first is the slowest."""
    for _ in range(warmup):
        step()
    wait(device)
    times = []
    for _ in range(count):
        started = time.perf_counter()
        step()
        wait(device)
        times.append(1000 * (time.perf_counter() - started))
    return {"median_ms": statistics.median(times), "min_ms": min(times), "max_ms": max(times)}


def back_to_back(step, count: int, device) -> float:
    """Milliseconds per call when calls follow each other, as in training, so that launches hide behind kernels."""
    wait(device)
    started = time.perf_counter()
    for _ in range(count):
        step()
    wait(device)
    return 1000 * (time.perf_counter() - started) / count


def profiler(device: torch.device):
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities)


def kernels(profile, steps: int, count: int, device: torch.device) -> dict:
    """Milliseconds per step in which the device computes, and its longest kernels (on a CPU: operations)."""
    cuda = device.type == "cuda"
    attribute = "self_device_time_total" if cuda else "self_cpu_time_total"
    kind = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    events = [
        e for e in profile.key_averages() if e.device_type == kind and not getattr(e, "is_user_annotation", False)
    ]
    events.sort(key=lambda e: -getattr(e, attribute))
    rows = [
        {
            "name": e.key[:120],
            "ms_per_step": round(getattr(e, attribute) / 1000 / steps, 4),
            "calls_per_step": round(e.count / steps, 2),
        }
        for e in events[:count]
    ]
    return {"busy_ms": sum(getattr(e, attribute) for e in events) / 1000 / steps, "kernels": rows}


# ---- what is timed --------------------------------------------------------------------------------------------------------------


class Shape:
    """Embeddings, head and one row of a section's shape, without the target's layers."""

    def __init__(self, name: str, args):
        shape = SHAPES[name]
        self.name, self.target, self.anchors = name, shape["target"], shape["anchors"]
        self.device = torch.device(args.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.block_size, self.overrides = args.block_size, shape["drafter"]
        config = self.target
        with torch.device(self.device):
            self.embed = nn.Embedding(config.vocab_size, config.hidden_size, dtype=self.dtype).requires_grad_(False)
            self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=self.dtype)
        self.head.requires_grad_(False)
        self.dataset = self.rows(1, shape)
        self.row = {k: v.to(self.device) for k, v in self.dataset[(0, 0)].items()}

    def rows(self, count: int, shape: dict | None = None) -> PackedDataset:
        shape, random = shape or SHAPES[self.name], np.random.default_rng(0)
        length = shape["document"]
        records = [
            {"input_ids": random.integers(100, self.target.vocab_size, size=length), "prompt_length": length // 4}
            for _ in range(count * max(1, shape["tokens"] // length))
        ]
        return PackedDataset(from_records(records), shape["tokens"], shape["anchors"])

    def config(self, kind: str) -> DSpineConfig:
        fields = self.overrides | {"num_hidden_layers": min(5, self.target.num_hidden_layers - 1)}
        if not kind.startswith("dspine"):
            fields |= {"injection": False, "refinement": False}
        return DSpineConfig.from_target(self.target, mask_token_id=16, block_size=self.block_size, **fields)

    def drafter(self, kind: str) -> DSpineModel:
        with torch.device(self.device):  # billions of random numbers are slow elsewhere
            drafter = DSpineModel(self.config(kind)).float()
        drafter.set_attn_implementation(PACKED_ATTENTION)
        return drafter

    def states(self, layers: int) -> torch.Tensor:
        """Stand-ins for the outputs of some of the target's layers, `[1, L, layers * d]`."""
        width = layers * self.target.hidden_size
        return torch.randn(1, self.dataset.length, width, device=self.device, dtype=self.dtype)

    def taps(self) -> torch.Tensor:
        return self.states(len(self.config("dflash").target_layer_ids))

    def final(self) -> torch.Tensor:
        return self.states(1)

    def autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")


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

    Raises:
        ImportError: the package is not there.
    """
    sys.path.append(str(Path(__file__).resolve().parent / "peers"))
    from speculators_peers import load_speculators

    speculators = load_speculators()
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


def time_step(result: dict, save, kind: str, shape: Shape, args) -> None:
    """Times, memory and kernels of one drafter's step."""
    device = shape.device
    if device.type == "cuda":
        torch.cuda.empty_cache()
    started = time.perf_counter()
    theirs, compile = kind == "speculators", args.compile
    while True:
        try:
            forward, step, model = speculators_step(shape, compile) if theirs else our_step(kind, shape, args)
            step()
            break
        except Exception as error:
            if not (theirs and compile) or isinstance(error, ImportError):
                raise
            # their compiled forward pass depends on the release of PyTorch
            result["compiled_error"] = f"{type(error).__name__}: {str(error)[:300]}"
        # only here is what the error held released
        compile = False
        save()
        torch.compiler.reset()
        gc.collect()
    wait(device)
    result["trained_parameters"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    result["seconds_to_first_step"] = time.perf_counter() - started
    save()
    result["step"] = milliseconds(step, args.steps, args.warmup, device)
    save()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    result["step_back_to_back_ms"] = back_to_back(step, args.steps, device)
    if device.type == "cuda":
        result["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 2**30
    save()
    if isinstance(model, DSpineModel):
        if "-" not in kind:  # what a distance costs is not counted
            sizes = estimate(model, None, shape.dataset.length, shape.anchors)
            result["tflop_per_step"] = sizes["drafter_tflop"]
            result["tflops"] = sizes["drafter_tflop"] / result["step_back_to_back_ms"] * 1000
        result["forward_only"] = milliseconds(forward, max(3, args.steps // 2), 2, device)
        save()
    if args.table:
        with profiler(device) as profile:
            for _ in range(3):
                step()
            wait(device)
        result |= kernels(profile, 3, args.table, device)


def make_target(shape: Shape, layers: int):
    config = shape.target
    config = config.__class__(**(config.to_dict() | {"num_hidden_layers": layers, "layer_types": None}))
    with torch.device(shape.device):
        return AutoModelForCausalLM.from_config(config, dtype=shape.dtype)


def time_target(result: dict, save, shape: Shape, args) -> None:
    """The target's pass up to the last tap."""
    layers = min(args.target_layers, shape.target.num_hidden_layers)
    target = make_target(shape, layers)
    taps_at = [i for i in shape.config("dflash").target_layer_ids if i < layers]
    runner = TargetRunner(target, taps_at, compile=args.compile)
    result["layers"] = max(taps_at) + 1
    result |= milliseconds(lambda: runner(shape.row), args.steps, args.warmup, shape.device)
    save()
    result["back_to_back_ms"] = back_to_back(lambda: runner(shape.row), args.steps, shape.device)


class StepClock(TrainerCallback):
    """Times the steps of a training run after the first `warmup`, and profiles the last `profiled`."""

    def __init__(self, warmup: int, steps: int, profiled: int, device: torch.device):
        self.begin, self.end, self.profiled, self.device = warmup, warmup + steps, profiled, device
        self.profile = profiler(device)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.begin:
            wait(self.device)
            self.started = time.perf_counter()
        elif state.global_step == self.end:
            wait(self.device)
            self.milliseconds = 1000 * (time.perf_counter() - self.started) / (self.end - self.begin)
            self.profile.__enter__()
        elif state.global_step == self.end + self.profiled:
            wait(self.device)
            self.profile.__exit__(None, None, None)


def time_trainer(result: dict, save, kind: str, shape: Shape, args) -> None:
    """Whole steps of `DSpineTrainer`: data, target, drafter, loss, optimizer, logging."""
    device, cuda, profiled = shape.device, shape.device.type == "cuda", 5
    target = make_target(shape, shape.target.num_hidden_layers)
    drafter = shape.drafter(kind)
    drafter.bind_target(target, init_transfer=True)
    clock = StepClock(20 if cuda else 2, args.trainer_steps, profiled, device)
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=1,
            max_steps=clock.end + profiled,
            bf16=cuda,
            use_cpu=not cuda,
            optim="adamw_torch_fused" if cuda else "adamw_torch",
            dataloader_num_workers=4 if cuda else 0,
            dataloader_persistent_workers=cuda,
            logging_steps=50,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = DSpineTrainer(
            drafter,
            options,
            target=target,
            train_dataset=shape.rows(16),
            loss_arguments=loss_arguments(kind, args),
            compile_drafter=args.compile,
            compile_target=args.compile,
            callbacks=[clock],
        )
        trainer.train()
    result["whole_step_ms"] = clock.milliseconds
    result |= kernels(clock.profile, profiled, args.table, device)


# ---- the run --------------------------------------------------------------------------------------------------------------------


class OutOfTime(BaseException):
    """A part ran past its limit. Not an `Exception`: compilers wrap those, and there is nothing to fall back to."""


@contextmanager
def time_limit(seconds: float):
    """Raises [`OutOfTime`] inside after so many seconds, as soon as the main thread runs Python again; 0: never."""

    def ring(*_):
        raise OutOfTime(f"ran past {seconds:g} s")

    if not seconds:
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attempt(part, result: dict, save, limit: float, *arguments) -> None:
    """Fills `result` with a part's figures, and where it fails with its error: that must not cost the others."""
    started = time.perf_counter()
    try:
        with time_limit(limit):
            part(result, save, *arguments)
    except (Exception, OutOfTime) as error:
        traceback.print_exc()
        result["error"] = f"{type(error).__name__}: {str(error)[:500]}"
    result["seconds"] = time.perf_counter() - started
    save()


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", default=["smollm2-135m"], choices=list(SHAPES))
    parser.add_argument("--drafters", nargs="+", default=["dspine"], choices=DRAFTERS)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--cross-entropy", default="auto", choices=["auto", "liger"])
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--table", type=int, default=25, help="kernels in the profile; 0: no profile")
    parser.add_argument("--target-layers", type=int, default=36, help="layers of the target timed apart; 0: none")
    parser.add_argument(
        "--trainer-steps", type=int, default=0, help="whole steps of the trainer that are timed; 0: none"
    )
    parser.add_argument("--part-limit", type=float, default=0, help="seconds for every part; 0: none")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out")
    args = parser.parse_args(argv)
    report = {"torch": torch.__version__, "device": args.device, "compiled": args.compile, "sections": {}}
    if args.device.startswith("cuda"):
        report["gpu"] = torch.cuda.get_device_name()

    def save():
        if args.out:
            written = Path(f"{args.out}.tmp")
            written.write_text(json.dumps(report, indent=1))
            written.replace(args.out)  # never half a file

    for name in args.sections:
        shape = Shape(name, args)
        result = {"tokens": shape.dataset.length, "anchors": shape.anchors, "block_size": args.block_size}
        report["sections"][name] = result
        parts = [(kind, time_step, (kind, shape, args)) for kind in args.drafters]
        if args.target_layers:
            parts.append(("target", time_target, (shape, args)))
        if args.trainer_steps:
            parts += [
                (f"trainer_{kind}", time_trainer, (kind, shape, args))
                for kind in args.drafters
                if kind != "speculators"
            ]
        for part, function, arguments in parts:
            result[part] = {}
            attempt(function, result[part], save, args.part_limit, *arguments)
            torch.compiler.reset()
            gc.collect()
            shown = {k: v for k, v in result[part].items() if k != "kernels"}
            print(name, part, json.dumps(shown, indent=1), flush=True)
            for kernel in result[part].get("kernels", ())[:12]:
                print(f"  {kernel['ms_per_step']:8.3f} ms {kernel['calls_per_step']:6.1f} x {kernel['name'][:90]}")
    return report


if __name__ == "__main__":
    main()
