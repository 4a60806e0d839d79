"""The configurations in the kernels' tables against others, and against another version of the kernels."""

import functools
import importlib
import sys
import tempfile
import types
from pathlib import Path
from types import SimpleNamespace

import torch

from dspine.modeling_dspine import reference_dspine as reference
from kernel_benchmark.draft_pass import Drafter, kernel_operations
from kernel_benchmark.shapes import EPS, normal
from kernel_benchmark.timing import graph_times
from kernel_benchmark.training import training_inputs, training_times


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
        candidates = torch.randint(shape.V, (N, shape.B - 1, shape.K), device=drafter.x.device)
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
