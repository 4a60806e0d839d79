"""What the GPU can do at best: its measured ceilings, the work of every operation, and a time against both."""

import torch

from kernel_benchmark.shapes import normal
from kernel_benchmark.timing import interleaved_times


def measure_ceilings(report, shape, args):
    source = normal(2**24 if args.tiny else 2**30, scale=1.0)
    target = torch.empty_like(source)
    size = 1024 if args.tiny else 8192
    a, b = normal(size, size, scale=1.0), normal(size, size, scale=1.0)
    times = interleaved_times({"copy": lambda: target.copy_(source), "matmul": lambda: a @ b}, rounds=7, target_ms=20)
    report["ceilings"] = {
        "copy_bytes_per_s": 2 * source.numel() * 2 / times["copy"] * 1e6,
        "matmul_flops_per_s": 2 * size**3 / times["matmul"] * 1e6,
    }


def serving_work(shape, N: int) -> dict:
    """Fewest bytes (each input read and each output written once) and floating-point operations of every operation."""
    d, r, K, V, B = shape.d, shape.r, shape.K, shape.V, shape.B
    M, T = N * B, B - 1
    weights = 4 * r * d * 2
    neighbours = N * T * K
    cache_flops = 2 * neighbours * 2 * r * d + 2 * N * T * r * d + 2 * neighbours * K * d
    return {
        "injection": {"bytes": weights + 2 * (2 * M * d + M * r), "flops": 2 * M * 4 * r * d},
        "select_candidates": {"bytes": 2 * N * T * V, "flops": 0},
        "transition_cache": {"bytes": 2 * (3 * r * d + neighbours * (d + r) + N * T * d), "flops": cache_flops},
        "walk_transition_cache": {"bytes": 2 * neighbours * K + 4 * neighbours, "flops": 0},
    }


def backward_work(shape, M: int) -> dict:
    """Of a backward that starts from the stored products of gate and write: six products of M x r x d for these, two for the feature."""
    d, r = shape.d, shape.r
    return {"bytes": 2 * (5 * M * d + 2 * M * r + 2 * 4 * r * d), "flops": 2 * M * r * d * 8}


def against_floor(us: float, work: dict, ceilings: dict) -> dict:
    bytes_us = work["bytes"] / ceilings["copy_bytes_per_s"] * 1e6
    flops_us = work["flops"] / ceilings["matmul_flops_per_s"] * 1e6
    return {
        "us": us,
        "memory_floor_us": bytes_us,
        "arithmetic_floor_us": flops_us,
        "times_floor": us / max(bytes_us, flops_us),
        "achieved_TB_per_s": work["bytes"] / us / 1e6,
        "achieved_TFLOP_per_s": work["flops"] / us / 1e6,
    }
