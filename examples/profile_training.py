"""Times training steps on one GPU and says where the time goes.

    python examples/profile_training.py --out profile.json                       # SmolLM2-135M shape, 1,536 blocks of 16 slots
    python examples/profile_training.py --sections qwen3-8b --out profile.json   # Qwen3-8B shape, 2,048 tokens, 512 blocks

Weights and tokens are random: times do not depend on them. The drafter's step is everything but the target: forward pass, loss,
backward pass, clipping and optimizer. The target's pass is timed apart, with `--target-layers` layers of the real width.
"""

import argparse
import json
import statistics
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from dspine.integrations.training import (
    DSpineObjective,
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


def milliseconds(step, count: int, warmup: int, device) -> dict[str, float]:
    """Median and extremes of `count` timed calls after `warmup` untimed ones."""
    for _ in range(warmup):
        step()
    times = []
    for _ in range(count):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            import time

            started = time.perf_counter()
            step()
            times.append(1000 * (time.perf_counter() - started))
    return {"median_ms": statistics.median(times), "min_ms": min(times), "max_ms": max(times)}


def back_to_back(step, count: int, device) -> float:
    """Milliseconds per call when calls follow each other, as in training, so that launches hide behind kernels."""
    import time

    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(count):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - started) / count


def section(name: str, args) -> dict:
    device = torch.device(args.device)
    shape = SHAPES[name]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = shape["target"]
    overrides = shape["drafter"] | {"num_hidden_layers": min(5, config.num_hidden_layers - 1)}
    if args.dflash:
        overrides |= {"injection": False, "refinement": False}
    drafter = DSpineModel(
        DSpineConfig.from_target(config, mask_token_id=16, block_size=args.block_size, **overrides)
    ).to(device)
    drafter.set_attn_implementation(PACKED_ATTENTION)
    # embeddings and head of the target's size, without the layers between them
    embed = nn.Embedding(config.vocab_size, config.hidden_size, device=device, dtype=dtype).requires_grad_(False)
    head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, device=device, dtype=dtype).requires_grad_(
        False
    )
    drafter._binding = TargetBinding(embed, head, nn.ModuleList())
    random = np.random.default_rng(0)
    length = shape["document"]
    records = [
        {"input_ids": random.integers(100, config.vocab_size, size=length), "prompt_length": length // 4}
        for _ in range(max(1, shape["tokens"] // length))
    ]
    dataset = PackedDataset(from_records(records), shape["tokens"], shape["anchors"])
    row = {k: v.to(device) for k, v in dataset[(0, 0)].items()}
    taps = torch.randn(
        1, dataset.length, len(drafter.config.target_layer_ids) * config.hidden_size, device=device, dtype=dtype
    )
    arguments = LossArguments(cross_entropy_backend=args.cross_entropy)
    objective = DSpineObjective(drafter, arguments, compile=args.compile).train()
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4, fused=device.type == "cuda")
    flex = device.type == "cuda"

    def forward():
        masks = slot_masks(drafter.config, row["anchors"], row["document_starts"], flex)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return objective(context_hidden_states=taps, masks=masks, **row)["loss"]

    def step():
        forward().backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    sizes = estimate(drafter, None, dataset.length, shape["anchors"])
    result = {"shape": {k: shape[k] for k in ("tokens", "anchors")} | {"block_size": args.block_size}}
    result |= {"parameters": sizes["drafter_parameters"], "tflop_per_step": sizes["drafter_tflop"]}
    result["step"] = milliseconds(step, args.steps, args.warmup, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    result["step_back_to_back_ms"] = back_to_back(step, args.steps, device)
    if device.type == "cuda":
        result["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 2**30
    result["tflops"] = sizes["drafter_tflop"] / result["step_back_to_back_ms"] * 1000
    result["forward_only"] = milliseconds(forward, max(3, args.steps // 2), 2, device)
    if args.table:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(3):
                step()
            if device.type == "cuda":
                torch.cuda.synchronize()
        key = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
        print(profile.key_averages().table(sort_by=key, row_limit=args.table, max_name_column_width=70))
        attribute = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
        events = sorted(profile.key_averages(), key=lambda e: -getattr(e, attribute, 0))[: args.table]
        result["kernels"] = [
            {"name": e.key[:120], "ms_per_step": getattr(e, attribute, 0) / 3000, "calls_per_step": e.count / 3}
            for e in events
        ]
    if args.target_layers:
        layers = min(args.target_layers, config.num_hidden_layers)
        config = config.__class__(**(config.to_dict() | {"num_hidden_layers": layers, "layer_types": None}))
        with torch.device(device):
            target = AutoModelForCausalLM.from_config(config, dtype=dtype)
        taps_at = [i for i in drafter.config.target_layer_ids if i < layers]
        runner = TargetRunner(target, taps_at, compile=args.compile)
        result["target"] = {"layers": layers} | milliseconds(lambda: runner(row), args.steps, args.warmup, device)
    return result


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", default=["smollm2-135m"], choices=list(SHAPES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--cross-entropy", default="auto", choices=["auto", "liger"])
    parser.add_argument("--dflash", action="store_true", help="without injection and refinement")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--table", type=int, default=25, help="kernels in the profile; 0: no profile")
    parser.add_argument("--target-layers", type=int, default=36, help="layers of the target timed apart; 0: none")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out")
    args = parser.parse_args(argv)
    report = {"torch": torch.__version__, "device": args.device, "compiled": args.compile, "sections": {}}
    if args.device.startswith("cuda"):
        report["gpu"] = torch.cuda.get_device_name()
    for name in args.sections:
        report["sections"][name] = section(name, args)
        shown = {k: v for k, v in report["sections"][name].items() if k != "kernels"}
        print(name, json.dumps(shown, indent=1))
        if args.out:
            Path(args.out).write_text(json.dumps(report, indent=1))
    return report


if __name__ == "__main__":
    main()
