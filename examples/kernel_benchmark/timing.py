"""Times of CUDA graphs, measured in turn."""

import statistics
import time

import torch


# what `--budget` counts from
START = time.perf_counter()


def capture(function, unroll: int = 1, gradients: bool = False) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.set_grad_enabled(gradients):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.set_grad_enabled(gradients), torch.cuda.graph(graph):
        for _ in range(unroll):
            function()
    return graph


def interleaved_times(launches: dict, rounds: int = 15, target_ms: float = 4.0) -> dict:
    """Median microseconds of every launch, measured in turn, round after round."""
    samples, repeats = {name: [] for name in launches}, {}
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def measure(launch, times):
        start.record()
        for _ in range(times):
            launch()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / times

    for name, launch in launches.items():
        measure(launch, 2)
        repeats[name] = max(2, min(200, round(target_ms * 1e3 / measure(launch, 2))))
    for _ in range(rounds):
        for name, launch in launches.items():
            samples[name].append(measure(launch, repeats[name]))
    return {name: statistics.median(values) for name, values in samples.items()}


def graph_times(functions: dict, unroll: int = 1, **kwargs) -> dict:
    graphs = {name: capture(function, unroll) for name, function in functions.items()}
    return {
        name: us / unroll for name, us in interleaved_times({n: g.replay for n, g in graphs.items()}, **kwargs).items()
    }
