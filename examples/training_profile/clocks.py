"""Times of a step, and the kernels it spends them in."""

import statistics
import time

import torch


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
