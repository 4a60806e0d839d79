"""The draft pass with and without injections, every operation alone, and whether kernels and references agree."""

import time
from types import SimpleNamespace

import torch

from dspine.modeling_dspine import reference_dspine as reference
from kernel_benchmark.draft_pass import kernel_operations
from kernel_benchmark.floors import against_floor, serving_work
from kernel_benchmark.shapes import EPS, normal
from kernel_benchmark.timing import START, capture, graph_times, interleaved_times


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
