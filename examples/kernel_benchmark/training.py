"""One injection, forward and backward, at a training step's number of slots."""

import time

import torch
import torch._functorch.config

from dspine.modeling_dspine import reference_dspine as reference
from kernel_benchmark.draft_pass import kernel_operations
from kernel_benchmark.floors import against_floor, backward_work, serving_work
from kernel_benchmark.shapes import EPS, normal
from kernel_benchmark.timing import START, capture, interleaved_times


def training_inputs(shape):
    """Inputs that need gradients, and gradients of the outputs."""
    blocks = shape.training_blocks
    inputs = [
        normal(blocks, shape.B, shape.d, scale=1.0),
        reference.rms(normal(blocks, shape.r, scale=1.0), EPS),
        normal(shape.d, scale=0.1, mean=1.0),
        normal(shape.r, shape.d),
        normal(shape.d, 2 * shape.r),
        normal(shape.d),
        normal(shape.d, shape.r),
    ]
    grads = [normal(blocks, shape.B, shape.d, scale=1.0), normal(blocks, shape.B, shape.r, scale=1.0)]
    return [tensor.requires_grad_() for tensor in inputs], grads


def training_times(function, inputs, grads, **kwargs) -> dict:
    """Microseconds of forward and backward in CUDA graphs; the backward is what both take together less the forward."""

    def both():
        return torch.autograd.grad(function(*inputs, EPS), inputs, grads)

    graphs = {
        "forward": capture(lambda: function(*inputs, EPS), gradients=True),
        "both": capture(both, gradients=True),
    }
    us = interleaved_times({name: graph.replay for name, graph in graphs.items()}, **kwargs)
    return {"forward": us["forward"], "backward": us["both"] - us["forward"]}


def measure_training(report, shape, args):
    """Forward and backward of one injection at a training step's number of slots."""
    ops = kernel_operations()
    M = shape.training_blocks * shape.B
    inputs, grads = training_inputs(shape)
    variants = {"triton": ops.gated_adjacent_injection, "eager": reference.gated_adjacent_injection}
    if time.perf_counter() - START < args.budget:
        variants["compiled"] = torch.compile(reference.gated_adjacent_injection, dynamic=False)
    # a graph's backward is captured more than once
    torch._functorch.config.donated_buffer = False
    times = {}
    for name, function in variants.items():
        us = training_times(function, inputs, grads, rounds=7, target_ms=10)
        times |= {f"{name}_{part}": value for part, value in us.items()}
        torch.cuda.empty_cache()
    forward = {
        "bytes": serving_work(shape, shape.training_blocks)["injection"]["bytes"],
        "flops": 2 * M * 4 * shape.r * shape.d,
    }
    report["training"] = {
        "slots": M,
        "us": times,
        "forward": against_floor(times["triton_forward"], forward, report["ceilings"]),
        "backward": against_floor(times["triton_backward"], backward_work(shape, M), report["ceilings"]),
    }
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            torch.autograd.grad(ops.gated_adjacent_injection(*inputs, EPS), inputs, grads)
        torch.cuda.synchronize()
    rows = {}
    for event in profile.key_averages():
        rows[event.key[:80]] = rows.get(event.key[:80], 0) + event.device_time_total / 3
    report["training"]["kernels_us"] = dict(sorted(rows.items(), key=lambda row: -row[1])[:16])
