"""What DSpine's own operations cost next to the backbone, on one GPU, with random weights in the shape of Qwen3-8B.

    python examples/benchmark_kernels.py --output examples/results/kernels_h200.json --plot examples/results/kernels_h200.png

Every number of a run comes from one process. Serving is timed as CUDA graphs, whose replays are interleaved so that a drifting clock
meets all variants alike; the cost of the injections inside the draft pass is the difference between the pass with and without them,
which leaves no weights in the cache that a real pass would have pushed out.

`--sweep` instead times, for every size class, the configuration in the kernels' tables against some others and, with `--rival`,
against the `kernels/` of another commit, and says which wins:

    git archive COMMIT kernels | tar x -C /tmp/rival
    python examples/benchmark_kernels.py --sweep --rival /tmp/rival/kernels --output /tmp/sweep.json

A section that fails is recorded with its error, and the others go on.
"""

import argparse
import dataclasses
import functools
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import types
from pathlib import Path
from types import SimpleNamespace

import torch
import torch._functorch.config
import torch.nn.functional as F

from dspine.modeling_dspine import reference_dspine as reference


EPS = 1e-6
START = time.perf_counter()


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file with all figures")
    parser.add_argument("--plot", type=Path, help="PNG file (needs matplotlib)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument(
        "--budget", type=float, default=210, help="seconds after which comparisons with torch.compile are left out"
    )
    parser.add_argument(
        "--first-calls", action="store_true", help="time every operation's first call instead, without other figures"
    )
    parser.add_argument("--sweep", action="store_true", help="compare configurations of the kernels instead")
    parser.add_argument(
        "--rival", type=Path, help="with --sweep: folder `kernels` of another version, timed beside this one"
    )
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the script")
    return parser.parse_args()


def make_shape(tiny: bool) -> SimpleNamespace:
    if tiny:
        sizes = {
            "d": 256,
            "intermediate": 512,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 64,
            "V": 5000,
            "r": 64,
            "verifier_layers": 3,
        }
        return SimpleNamespace(**sizes, B=16, K=16, L=2, context=128, training_blocks=32)
    sizes = {"d": 4096, "intermediate": 12288, "heads": 32, "kv_heads": 8, "head_dim": 128, "V": 151936, "r": 256}
    return SimpleNamespace(**sizes, verifier_layers=36, B=16, K=16, L=5, context=1024, training_blocks=1536)


def normal(*shape, scale=0.02, mean=0.0):
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(mean, scale)


# --- timing ---------------------------------------------------------------------------------------------------------------------


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


# --- the model ------------------------------------------------------------------------------------------------------------------


class Backbone:
    """Decoder layers like Qwen3's over a context that is already in the key/value buffers, plus output embeddings."""

    def __init__(self, shape, layers: int, head: torch.Tensor):
        self.shape, self.head = shape, head
        d, hd = shape.d, shape.head_dim
        qkv = (shape.heads + 2 * shape.kv_heads) * hd
        self.layers = [
            (
                normal(d, scale=0.1, mean=1.0),
                normal(qkv, d),
                normal(hd, scale=0.1, mean=1.0),
                normal(hd, scale=0.1, mean=1.0),
                normal(d, shape.heads * hd),
                normal(d, scale=0.1, mean=1.0),
                normal(2 * shape.intermediate, d),
                normal(d, shape.intermediate),
            )
            for _ in range(layers)
        ]
        self.norm = normal(d, scale=0.1, mean=1.0)
        position = torch.arange(shape.context, shape.context + shape.B, device="cuda")[:, None]
        angle = position / 1e6 ** (torch.arange(0, hd, 2, device="cuda") / hd)
        self.cos, self.sin = angle.cos().repeat(1, 2).bfloat16(), angle.sin().repeat(1, 2).bfloat16()
        self.run_layer = self.layer

    def set_batch(self, N: int) -> None:
        s = self.shape
        length = s.context + s.B
        self.caches = [normal(2, N, s.kv_heads, length, s.head_dim, scale=1.0) for _ in self.layers]

    def layer(self, x, cache, norm1, qkv, q_norm, k_norm, o, norm2, gate_up, down):
        s = self.shape
        N, B, d = x.shape
        heads = F.linear(F.rms_norm(x, (d,), norm1, EPS), qkv).view(N, B, -1, s.head_dim).transpose(1, 2)
        q, k, v = heads.split([s.heads, s.kv_heads, s.kv_heads], dim=1)
        q, k = F.rms_norm(q, (s.head_dim,), q_norm, EPS), F.rms_norm(k, (s.head_dim,), k_norm, EPS)
        q, k = self.rotate(q), self.rotate(k)
        cache[0, :, :, s.context :].copy_(k)
        cache[1, :, :, s.context :].copy_(v)
        # queries of one group side by side attend to their common keys; a block's mask would not change the cost
        q = q.reshape(N, s.kv_heads, -1, s.head_dim)
        a = F.scaled_dot_product_attention(q, cache[0], cache[1]).reshape(N, s.heads, B, s.head_dim)
        x = x + F.linear(a.transpose(1, 2).reshape(N, B, -1), o)
        gate, up = F.linear(F.rms_norm(x, (d,), norm2, EPS), gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, down)

    def rotate(self, x):
        half = x.shape[-1] // 2
        return x * self.cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * self.sin

    def logits(self, x):
        return F.linear(F.rms_norm(x, (self.shape.d,), self.norm, EPS), self.head)


class Drafter:
    """A DFlash draft pass, and the same with DSpine's operations, whose implementation is an argument."""

    def __init__(self, shape, head):
        self.shape, self.backbone = shape, Backbone(shape, shape.L, head)
        d, r = shape.d, shape.r
        self.injections = [
            (normal(d, scale=0.1, mean=1.0), normal(r, d), normal(d, 2 * r), normal(d), normal(d, r))
            for _ in range(shape.L)
        ]
        self.table = reference.rms(normal(shape.V, r, scale=1.0), EPS)

    def set_batch(self, N: int) -> None:
        s = self.shape
        self.backbone.set_batch(N)
        self.x = normal(N, s.B, s.d, scale=1.0)
        self.anchor = reference.rms(normal(N, s.r, scale=1.0), EPS)
        # half of the rows greedy, half sampled
        self.temperature = torch.tensor([0.0, 1.0], device="cuda").repeat(N)[:N].contiguous()
        self.uniforms = torch.rand(N, s.B - 1, device="cuda")

    def draft(self, inject=None):
        x, features = self.x, None
        for weights, cache, injection in zip(self.backbone.layers, self.backbone.caches, self.injections):
            before = x = self.backbone.run_layer(x, cache, *weights)
            if inject is not None:
                x, features = inject(x, self.anchor, *injection, EPS)
        return before, features, self.backbone.logits(x[:, 1:])

    def inject_all(self, inject):
        for injection in self.injections:
            out = inject(self.x, self.anchor, *injection, EPS)
        return out

    def cache_arguments(self, before, features, candidates):
        norm_weight, _, *gate_and_write = self.injections[-1]
        head = self.backbone.head
        return (
            before[:, 1:],
            features[:, 1:],
            self.anchor,
            candidates,
            self.table,
            head,
            self.backbone.norm,
            *gate_and_write,
            EPS,
        )

    def tail(self, ops, before, features, logits):
        _, candidates = ops.select_candidates(logits, self.shape.K)
        scores = ops.transition_cache(*self.cache_arguments(before, features, candidates))
        return ops.walk_transition_cache(scores, candidates, self.temperature, self.uniforms)


def kernel_operations() -> SimpleNamespace:
    from dspine.kernels.injection import gated_adjacent_injection
    from dspine.kernels.select_candidates import select_candidates
    from dspine.kernels.transition_cache import transition_cache
    from dspine.kernels.walk_transition_cache import walk_transition_cache

    return SimpleNamespace(
        gated_adjacent_injection=gated_adjacent_injection,
        select_candidates=select_candidates,
        transition_cache=transition_cache,
        walk_transition_cache=walk_transition_cache,
    )


# --- floors ---------------------------------------------------------------------------------------------------------------------


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


# --- sections -------------------------------------------------------------------------------------------------------------------


def measure_ceilings(report, shape, args):
    source = torch.empty(2**24 if args.tiny else 2**30, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    size = 1024 if args.tiny else 8192
    a, b = normal(size, size, scale=1.0), normal(size, size, scale=1.0)
    times = interleaved_times({"copy": lambda: target.copy_(source), "matmul": lambda: a @ b}, rounds=7, target_ms=20)
    report["ceilings"] = {
        "copy_bytes_per_s": 2 * source.numel() * 2 / times["copy"] * 1e6,
        "matmul_flops_per_s": 2 * size**3 / times["matmul"] * 1e6,
    }


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
        command = [sys.executable, __file__, "--first-calls", "--output", str(output), *["--tiny"] * args.tiny]
        environment = os.environ | {"TRITON_CACHE_DIR": f"{folder}/triton"}
        subprocess.run(command, env=environment, timeout=90, check=True, stdout=subprocess.DEVNULL)
        report["first_call"] = json.loads(output.read_text())


def measure_serving(report, shape, args, drafter, N):
    ops = kernel_operations()
    drafter.set_batch(N)
    out = report["serving"][str(N)] = {}
    with torch.no_grad():
        before, features, logits = drafter.draft(ops.gated_adjacent_injection)
        _, candidates = ops.select_candidates(logits, shape.K)
        cache_arguments = drafter.cache_arguments(before, features, candidates)
        scores = ops.transition_cache(*cache_arguments)
        features = features.clone()
    check_agreement(out, shape, drafter, ops, before, logits)

    from dspine.kernels import launch

    functions = {
        "draft": lambda: drafter.draft(),
        "draft_with_injections": lambda: drafter.draft(ops.gated_adjacent_injection),
    }
    graphs = {name: capture(function) for name, function in functions.items()}
    dependent_launch = launch._has_dependent_launch
    launch._has_dependent_launch = lambda index: False
    graphs["draft_with_injections_without_dependent_launch"] = capture(functions["draft_with_injections"])
    launch._has_dependent_launch = dependent_launch
    out["us"] = interleaved_times({name: graph.replay for name, graph in graphs.items()}, rounds=21, target_ms=8)
    out["draft_compiled"] = drafter.backbone.run_layer != drafter.backbone.layer
    graphs.clear()

    alone = {
        "injections_alone": lambda: drafter.inject_all(ops.gated_adjacent_injection),
        "select_candidates": lambda: ops.select_candidates(logits, shape.K),
        "transition_cache": lambda: ops.transition_cache(*cache_arguments),
        "walk_transition_cache": lambda: ops.walk_transition_cache(
            scores, candidates, drafter.temperature, drafter.uniforms
        ),
        "tail": lambda: drafter.tail(ops, before, features, logits),
        "tail_dflash": lambda: logits.argmax(-1),
    }
    out["us"] |= graph_times(alone, unroll=4, rounds=9)

    us = out["us"]
    us["injections_in_draft"] = us["draft_with_injections"] - us["draft"]
    out["injections_share"] = us["injections_in_draft"] / us["draft"]
    out["tail_share"] = us["tail"] / us["draft"]
    work = serving_work(shape, N)
    out["floors"] = {
        "injection": against_floor(us["injections_in_draft"] / shape.L, work["injection"], report["ceilings"]),
        **{name: against_floor(us[name], work[name], report["ceilings"]) for name in list(work)[1:]},
    }


def check_agreement(out, shape, drafter, ops, before, logits):
    """The kernels must agree with the references on this very data, or the times mean nothing."""
    with torch.no_grad():
        arguments = (before[:8], drafter.anchor[:8], *drafter.injections[-1], EPS)
        actual, features = ops.gated_adjacent_injection(*arguments)
        expected = reference.gated_adjacent_injection(
            *[a.double() if isinstance(a, torch.Tensor) else a for a in arguments]
        )[0]
        values, candidates = ops.select_candidates(logits[:8], shape.K)
        sorted_values, sorted_tokens = logits[:8].sort(dim=-1, descending=True, stable=True)
        drafter_anchor, drafter.anchor = drafter.anchor, drafter.anchor[:8]
        cache_arguments = drafter.cache_arguments(before[:8], features, candidates)
        drafter.anchor = drafter_anchor
        scores = ops.transition_cache(*cache_arguments)
        expected_scores = reference.transition_cache(*cache_arguments)
        tokens, _ = ops.walk_transition_cache(scores, candidates, drafter.temperature[:8], drafter.uniforms[:8])
        expected_tokens, _ = reference.walk_transition_cache(
            scores, candidates, drafter.temperature[:8], drafter.uniforms[:8]
        )
    out["agreement"] = {
        "injection_relative_error": ((actual - expected).norm() / expected.norm()).item(),
        "candidates_equal": torch.equal(candidates, sorted_tokens[..., : shape.K]),
        "scores_relative_difference": (
            (scores - expected_scores).float().norm() / expected_scores.float().norm()
        ).item(),
        "tokens_equal": torch.equal(tokens, expected_tokens),
    }


def measure_references(report, shape, args, drafter, N, compiled):
    """The references, eager or under torch.compile, in CUDA graphs as well."""
    names = list(reference.REFERENCES)
    functions = [reference.REFERENCES[name] for name in names]
    if compiled:
        torch._dynamo.reset()
        functions = [torch.compile(function, dynamic=False) for function in functions]
    ops, suffix = SimpleNamespace(**dict(zip(names, functions))), "compiled" if compiled else "eager"
    drafter.set_batch(N)
    logits = normal(N, shape.B - 1, shape.V, scale=1.0)
    candidates = logits.topk(shape.K).indices
    features = reference.rms(normal(N, shape.B, shape.r, scale=1.0), EPS)
    scores = normal(N, shape.B - 1, shape.K, shape.K, scale=1.0)
    cases = {
        "injections_alone": lambda: drafter.inject_all(ops.gated_adjacent_injection),
        "select_candidates": lambda: ops.select_candidates(logits, shape.K),
        "transition_cache": lambda: ops.transition_cache(*drafter.cache_arguments(drafter.x, features, candidates)),
        "walk_transition_cache": lambda: ops.walk_transition_cache(
            scores, candidates, drafter.temperature, drafter.uniforms
        ),
    }
    if compiled and N > 1:
        # the walk's compilation takes longest, since its loop is unrolled, for a time that hardly depends on the batch
        del cases["walk_transition_cache"]
    for name, function in cases.items():
        within = not compiled or time.perf_counter() - START < args.budget
        times = graph_times({name: function}, unroll=2, rounds=7) if within else {name: None}
        report["serving"][str(N)]["us"][f"{name}_{suffix}"] = times[name]


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


def measure_rounds(report, shape, args, drafter):
    """Draft pass, choice of tokens and verification of 16 tokens a row by a target of the drafter's layers."""
    ops = kernel_operations()
    verifier = Backbone(shape, shape.verifier_layers, drafter.backbone.head)
    verifier.run_layer = drafter.backbone.run_layer

    def verify():
        x = drafter.x
        for weights, cache in zip(verifier.layers, verifier.caches):
            x = verifier.run_layer(x, cache, *weights)
        return verifier.logits(x).argmax(-1)

    def dflash():
        drafter.draft()[2].argmax(-1)
        verify()

    def dspine():
        drafter.tail(ops, *drafter.draft(ops.gated_adjacent_injection))
        verify()

    report["rounds"] = {}
    for N in [n for n in args.batches if n <= 8]:
        drafter.set_batch(N)
        verifier.set_batch(N)
        us = graph_times({"dflash": dflash, "dspine": dspine}, rounds=15, target_ms=20)
        report["rounds"][str(N)] = {"us": us, "extra": us["dspine"] / us["dflash"] - 1}


# --- configurations -----------------------------------------------------------------------------------------------------------------


def import_rival(folder: Path) -> SimpleNamespace:
    """The operations of another version's `kernels/`, under another name and in another namespace of custom operators."""
    package, copy = "rival_kernels", Path(tempfile.mkdtemp(prefix="dspine-rival-"))
    for path in folder.glob("*.py"):
        (copy / path.name).write_text(path.read_text().replace('custom_op("dspine::', 'custom_op("dspine_rival::'))
    sys.modules[package] = types.ModuleType(package)
    sys.modules[package].__path__ = [str(copy)]
    names = ("gated_adjacent_injection", "select_candidates", "transition_cache", "walk_transition_cache")
    modules = ("injection", *names[1:])
    imported = {name: importlib.import_module(f"{package}.{module}") for name, module in zip(names, modules)}
    return SimpleNamespace(**{name: getattr(module, name) for name, module in imported.items()})


def sweep(report, shape, args):
    """The kernels' tables against other configurations and, with `--rival`, against another version of the kernels, per size class."""
    from dspine.kernels import injection, launch, select_candidates, transition_cache
    from dspine.kernels.injection import ForwardConfig, Tile
    from dspine.kernels.transition_cache import TransitionConfig

    ops, whole = kernel_operations(), shape.r
    rival = import_rival(args.rival) if args.rival else None
    # weights of more layers than fit the second-level cache, since a backbone's layers would have emptied it
    layers, shape.L = shape.L, 16
    drafter = Drafter(shape, normal(shape.V, shape.d))
    results = report["sweep"] = {}

    def contest(name, module, attribute, configs, function, expected=None):
        """Times `function(operations)`, which returns microseconds and what was computed, with every configuration."""
        times, errors = {}, {}

        def enter(label, operations):
            try:
                times[label], actual = function(operations)
                if expected is not None:
                    errors[label] = ((actual - expected).norm() / expected.norm()).item()
            except Exception as error:  # too much shared memory, for one
                times[label] = None
                print(f"  {name}, {label}: {type(error).__name__}: {str(error)[:200]}", flush=True)

        original, dependent_launch = getattr(module, attribute), launch._has_dependent_launch
        try:
            enter("table", ops)
            launch._has_dependent_launch = lambda index: False
            enter("table, without dependent launch", ops)
            launch._has_dependent_launch = dependent_launch
            if rival is not None:
                enter("rival", rival)
            for label, config in configs.items():
                setattr(module, attribute, lambda *a, config=config: config)
                enter(label, ops)
        finally:
            setattr(module, attribute, original)
            launch._has_dependent_launch = dependent_launch
        measured = {label: us for label, us in times.items() if us is not None}
        winner = min(measured, key=measured.get) if measured else None
        results[name] = {"us": times, "relative_error": errors, "winner": winner}
        listed = "; ".join(f"{label} {us:.1f}" for label, us in sorted(measured.items(), key=lambda item: item[1]))
        print(f"{name}: {listed} -> {winner}", flush=True)
        if errors:
            print(f"  relative errors {min(errors.values()):.2e} to {max(errors.values()):.2e}", flush=True)

    def time_in_graph(function, per=1, unroll=2):
        with torch.no_grad():
            actual = function()
        return graph_times({"x": function}, unroll=unroll, rounds=7)["x"] / per, actual

    few, some, many = Tile(16, 16, 64, 4, 5, 4), Tile(64, 64, 64, 4, 4), Tile(128, 128, 64, 8, 3)
    injections = {
        1: {
            "32 channels": ForwardConfig("parts", 4, few, Tile(16, whole, 32, 8, 1)),
            "32 channels, 4 warps": ForwardConfig("parts", 4, few, Tile(16, whole, 32, 4, 1)),
            "2 parts": ForwardConfig("parts", 2, few, Tile(16, whole, 64, 8, 1)),
            "16 warps": ForwardConfig("parts", 4, few, Tile(16, whole, 64, 16, 1)),
            "reduced": ForwardConfig("reduced", 8, Tile(16, 16, 64, 4, 3, 4), Tile(16, whole, 64, 8, 1)),
        },
        8: {
            "32 channels": ForwardConfig("reduced", 16, some, Tile(64, whole, 32, 4, 1)),
            "32 features": ForwardConfig("reduced", 8, Tile(64, 32, 128, 4, 3), Tile(64, whole, 64, 8, 1)),
            "library": ForwardConfig("library", 16, some, dependent=False),
        },
        32: {
            "reduced": ForwardConfig("reduced", 16, some, Tile(64, whole, 64, 8, 1)),
            "reduced, 8 parts": ForwardConfig("reduced", 8, Tile(64, 128, 64, 4, 4), Tile(64, whole, 64, 8, 1)),
            "library, 8 parts": ForwardConfig("library", 8, Tile(64, 128, 64, 4, 4), dependent=False),
            "library, one part": ForwardConfig("library", 1, None, dependent=False),
            "with dependent launch": ForwardConfig("library", 16, many),
        },
        64: {
            "library, one part": ForwardConfig("library", 1, None, dependent=False),
            "library, 16 parts": ForwardConfig("library", 16, Tile(64, 128, 64, 4, 4), dependent=False),
            "with dependent launch": ForwardConfig("library", 8, many),
        },
    }
    for N in args.batches:
        drafter.set_batch(N)
        last = (drafter.x, drafter.anchor, *drafter.injections[-1], EPS)
        expected = reference.gated_adjacent_injection(*[a.float() if isinstance(a, torch.Tensor) else a for a in last])

        def inject_all(operations):
            us, (out, _) = time_in_graph(lambda: drafter.inject_all(operations.gated_adjacent_injection), per=shape.L)
            return us, out.float()

        contest(f"injection, batch {N}", injection, "forward_config", injections.get(N, {}), inject_all, expected[0])

    caches = {
        1: {
            "32 channels": TransitionConfig(4, 32, whole, 32, 4, 3),
            "128 rows": TransitionConfig(8, 32, whole, 64, 8, 3),
        },
        8: {
            "64 channels": TransitionConfig(8, 64, whole, 8, 8, 2),
            "16 channels": TransitionConfig(8, 16, whole, 8, 8, 4),
        },
        32: {
            "64 channels": TransitionConfig(8, 64, whole, 2, 8, 2),
            "one part": TransitionConfig(8, 32, whole, 1, 8, 3),
            "64 rows": TransitionConfig(4, 64, whole, 1, 4, 2),
        },
        64: {
            "64 channels": TransitionConfig(8, 64, whole, 1, 8, 2),
            "16 channels": TransitionConfig(8, 16, whole, 1, 8, 4),
        },
    }
    for N in args.batches:
        drafter.set_batch(N)
        candidates = torch.randint(shape.V, (N, shape.B - 1, shape.K), device="cuda")
        features = reference.rms(normal(N, shape.B, shape.r, scale=1.0), EPS)
        arguments = drafter.cache_arguments(drafter.x, features, candidates)
        expected = reference.transition_cache(*arguments).float()

        def make_cache(operations, arguments=arguments):
            us, scores = time_in_graph(lambda: operations.transition_cache(*arguments))
            return us, scores.float()

        contest(
            f"transition cache, batch {N}",
            transition_cache,
            "transition_config",
            caches.get(N, {}),
            make_cache,
            expected,
        )
        logits = normal(N, shape.B - 1, shape.V, scale=1.0)
        contest(
            f"candidates, batch {N}",
            select_candidates,
            "launches_dependently",
            {"with dependent launch": True},
            lambda operations, logits=logits: time_in_graph(lambda: operations.select_candidates(logits, shape.K)),
        )
        scores = expected.bfloat16()
        walks = {
            "greedy": {},
            "mixed": {"temperature": drafter.temperature, "uniforms": drafter.uniforms},
        }
        times = {}
        for label, how in walks.items():
            walk = functools.partial(ops.walk_transition_cache, scores, candidates, **how)
            times[label] = time_in_graph(walk)[0]
        results[f"walk, batch {N}"] = {"us": times}
        print(f"walk, batch {N}:", "; ".join(f"{label} {us:.1f}" for label, us in times.items()), flush=True)
        del logits
    drafter, shape.L = None, layers
    torch.cuda.empty_cache()

    inputs, grads = training_inputs(shape)
    parts = {}

    def training(operations):
        us = training_times(operations.gated_adjacent_injection, inputs, grads, rounds=7, target_ms=10)
        torch.cuda.empty_cache()
        parts[len(parts)] = us
        print(f"  training: forward {us['forward']:.0f}, backward {us['backward']:.0f}", flush=True)
        return sum(us.values()), None

    contest(
        "training, forward and backward",
        injection,
        "forward_config",
        {"with dependent launch": ForwardConfig("library", 1, None)},
        training,
    )
    results["training, forward and backward"]["parts"] = list(parts.values())


# --- output ---------------------------------------------------------------------------------------------------------------------


def run_section(report, name, function, *arguments):
    begin = time.perf_counter()
    try:
        function(report, *arguments)
    except Exception as error:
        report["errors"][name] = "".join(traceback.format_exception(error))[-3000:]
        print(f"{name} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
    finally:
        torch.cuda.empty_cache()
        report["section_s"][name] = time.perf_counter() - begin


def print_table(report):
    ceilings = report.get("ceilings")
    if ceilings:
        copy, matmul = ceilings["copy_bytes_per_s"] / 1e12, ceilings["matmul_flops_per_s"] / 1e12
        print(f"\n{report['device']}: copy {copy:.2f} TB/s, matmul {matmul:.0f} TFLOP/s")
    print("seconds of first calls:", {name: round(value, 2) for name, value in report.get("first_call", {}).items()})
    for N, out in report["serving"].items():
        us = {name: value for name, value in out.get("us", {}).items() if value is not None}
        if "injections_in_draft" not in us:
            continue
        print(f"\nbatch {N}: draft pass {us['draft']:.1f} us; agreement {out['agreement']}")
        print(
            f"  five injections {us['injections_in_draft']:.1f} us = {out['injections_share']:.2%} (goal 3 %)",
            end="; ",
        )
        print(f"tail {us['tail']:.1f} us = {out['tail_share']:.2%} (goal 100 us at batch 1, 5 % at 64)")
        for name in (
            "draft_with_injections",
            "draft_with_injections_without_dependent_launch",
        ):
            print(f"  {name}: {us[name]:.1f}", end="")
        print("\n  " + ", ".join(f"{name} {value:.1f}" for name, value in us.items() if not name.startswith("draft")))
        for name, floor in out["floors"].items():
            print(
                f"  {name:22s} {floor['us']:8.1f} us, {floor['times_floor']:5.1f}x floor ({floor['memory_floor_us']:.1f} memory,"
                f" {floor['arithmetic_floor_us']:.1f} arithmetic), {floor['achieved_TB_per_s']:.2f} TB/s, {floor['achieved_TFLOP_per_s']:.0f} TFLOP/s"
            )
    if "training" in report:
        training = report["training"]
        print(
            f"\ntraining, {training['slots']} slots:", {name: round(value) for name, value in training["us"].items()}
        )
        for name in ("forward", "backward"):
            floor = training[name]
            print(
                f"  {name}: {floor['us']:.0f} us, memory floor {floor['memory_floor_us']:.0f}, arithmetic floor {floor['arithmetic_floor_us']:.0f}"
            )
        print("  kernels:", {name[:48]: round(value) for name, value in training["kernels_us"].items()})
    for N, out in report.get("rounds", {}).items():
        print(
            f"round at batch {N}: DFlash {out['us']['dflash']:.0f} us, DSpine {out['us']['dspine']:.0f} us: {out['extra']:+.2%} (goal +1.5 %)"
        )
    print("errors:", {name: text.strip().splitlines()[-1][:200] for name, text in report["errors"].items()} or "none")
    print("seconds:", {name: round(value) for name, value in report["section_s"].items()})


def plot(report, path: Path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    batches = [N for N, out in report["serving"].items() if "injections_share" in out]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5))
    for axis, (name, goal, title) in zip(
        axes, (("injections", 3, "five injections"), ("tail", 5, "choice of tokens"))
    ):
        axis.bar(batches, [100 * report["serving"][N][f"{name}_share"] for N in batches], color="#4C72B0", width=0.5)
        axis.axhline(goal, color="#C44E52", linestyle="--", linewidth=1, label=f"goal {goal} %")
        axis.set_title(title)
        axis.set_xlabel("batch")
        axis.set_ylabel("% of the draft pass")
        axis.legend()
    figure.suptitle(f"DSpine's own operations, {report['device']}")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main():
    args = parse_arguments()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    torch.manual_seed(0)
    shape = make_shape(args.tiny)
    if args.first_calls:
        seconds = time_first_calls(shape)
        args.output.write_text(json.dumps(seconds, indent=1) + "\n")
        for name, value in seconds.items():
            print(f"{name}: {value:.2f} s", flush=True)
        return
    import triton

    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "shape": vars(shape),
        "serving": {},
        "errors": {},
        "section_s": {},
    }
    if args.sweep:
        run_section(report, "sweep", sweep, shape, args)
    else:
        run_section(report, "first_calls", measure_first_calls, shape, args)
        run_section(report, "ceilings", measure_ceilings, shape, args)
        drafter = Drafter(shape, normal(shape.V, shape.d))

        def compile_layer(report):
            # the strongest baseline: the backbone's small operations fused
            compiled = torch.compile(drafter.backbone.layer, dynamic=False)
            drafter.set_batch(args.batches[0])
            with torch.no_grad():
                compiled(drafter.x, drafter.backbone.caches[0], *drafter.backbone.layers[0])
            drafter.backbone.run_layer = compiled

        run_section(report, "compile_layer", compile_layer)
        for N in args.batches:
            run_section(report, f"serving_{N}", measure_serving, shape, args, drafter, N)
            run_section(report, f"eager_{N}", measure_references, shape, args, drafter, N, False)
        run_section(report, "training", measure_training, shape, args)
        run_section(report, "rounds", measure_rounds, shape, args, drafter)
        for N in args.batches:
            if N != 32:  # between sizes that are compared
                run_section(report, f"compiled_{N}", measure_references, shape, args, drafter, N, True)
    report["total_s"] = time.perf_counter() - START
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=1, default=dataclasses.asdict) + "\n")
    if args.plot and not args.sweep:
        run_section(report, "plot", plot, args.plot)
    if not args.sweep:
        print_table(report)


if __name__ == "__main__":
    main()
