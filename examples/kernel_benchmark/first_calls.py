"""Seconds of every operation's first call, which compiles its kernels, in a process of its own."""

import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from dspine.modeling_dspine import reference_dspine as reference
from kernel_benchmark.draft_pass import Drafter, kernel_operations
from kernel_benchmark.shapes import EPS, normal
from kernel_benchmark.training import training_inputs


# what the process of its own runs
SCRIPT = str(Path(__file__).resolve().parents[1] / "benchmark_kernels.py")


def time_first_calls(shape) -> dict:
    """Seconds of the imports and of every operation's first call at every number of slots with kernels of its own, one after another;
    meant for a process of its own, with an empty Triton cache."""
    torch.mm(normal(64, 64), normal(64, 64))
    seconds = {}

    def timed(name, function):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        result = function()
        torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - begin
        return result

    timed("import of triton", lambda: importlib.import_module("triton.language"))
    ops = timed("import of the kernels", kernel_operations)
    drafter = Drafter(SimpleNamespace(**vars(shape) | {"L": 1}), normal(shape.V, shape.d))
    for N in (1, 8, 32, 64):
        drafter.set_batch(N)
        logits = normal(N, shape.B - 1, shape.V, scale=1.0)
        candidates = logits.topk(shape.K).indices
        features = reference.rms(normal(N, shape.B, shape.r, scale=1.0), EPS)
        scores = normal(N, shape.B - 1, shape.K, shape.K, scale=1.0)
        cache_arguments = drafter.cache_arguments(drafter.x, features, candidates)
        walk_arguments = scores, candidates, drafter.temperature, drafter.uniforms
        with torch.no_grad():
            slots = f"{N * shape.B} slots"
            timed(f"injection, {slots}", functools.partial(drafter.inject_all, ops.gated_adjacent_injection))
            timed(f"candidates, {slots}", functools.partial(ops.select_candidates, logits, shape.K))
            timed(f"transition cache, {slots}", functools.partial(ops.transition_cache, *cache_arguments))
            timed(f"walk, {slots}", functools.partial(ops.walk_transition_cache, *walk_arguments))
    del logits, drafter, cache_arguments
    inputs, grads = training_inputs(shape)
    slots = f"{shape.training_blocks * shape.B} slots"
    outputs = timed(f"injection with gradients, {slots}", lambda: ops.gated_adjacent_injection(*inputs, EPS))
    timed(f"its backward, {slots}", lambda: torch.autograd.grad(outputs, inputs, grads))
    return seconds


def measure_first_calls(report, shape, args):
    with tempfile.TemporaryDirectory(prefix="dspine-first-") as folder:
        output = Path(folder) / "seconds.json"
        command = [sys.executable, SCRIPT, "--first-calls", "--output", str(output), *["--tiny"] * args.tiny]
        environment = os.environ | {"TRITON_CACHE_DIR": f"{folder}/triton"}
        subprocess.run(command, env=environment, timeout=90, check=True, stdout=subprocess.DEVNULL)
        report["first_call"] = json.loads(output.read_text())
