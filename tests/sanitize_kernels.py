"""Runs every kernel once or twice on small inputs, to be watched by compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/sanitize_kernels.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck python tests/sanitize_kernels.py

Without the caching allocator every tensor is an allocation of its own, so that memcheck sees accesses past its end. racecheck watches
shared memory. A first run without the sanitizer fills Triton's cache, which saves the watched ones the time to compile. Arguments
choose cases by name; `--list` prints the names.
"""

import sys
import time

import torch

from dspine.kernels import injection, select_candidates, transition_cache, walk_transition_cache
from dspine.modeling_dspine import reference_dspine as reference


EPS = 1e-6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOW = torch.bfloat16 if DEVICE == "cuda" else torch.float16


def normal(*shape, scale=1.0, dtype=LOW):
    return (scale * torch.randn(shape)).to(DEVICE, dtype)


def injection_inputs(N, B, d, r, dtype=LOW):
    return [
        normal(N, B, d, dtype=dtype),
        normal(N, r, dtype=dtype),
        1 + normal(d, scale=0.1, dtype=dtype),
        normal(r, d, scale=d**-0.5, dtype=dtype),
        normal(d, 2 * r, scale=r**-0.5, dtype=dtype),
        normal(d, dtype=dtype),
        normal(d, r, scale=r**-0.5, dtype=dtype),
    ]


def inject(N, B, d, r, mode, dtype=LOW):
    """With the tiles of real shapes; odd sizes, so that masks matter."""
    inputs = injection_inputs(N, B, d, r, dtype)
    assert injection.forward_config(N * B, r, dtype.itemsize).mode == mode
    with torch.no_grad():
        out, _ = injection.gated_adjacent_injection(*inputs, EPS)
    return [(out, reference.gated_adjacent_injection(*inputs, EPS)[0])]


def train(N, B, d, r, dtype=LOW):
    inputs = [tensor.requires_grad_() for tensor in injection_inputs(N, B, d, r, dtype)]
    results = []
    for function in (injection.gated_adjacent_injection, reference.gated_adjacent_injection):
        out, features = function(*inputs, EPS)
        results.append(torch.autograd.grad(out.float().square().sum() + features.float().sum(), inputs))
    return list(zip(*results))


def choose(N, T, d, r, K, V, dtype=LOW):
    logits = torch.stack([torch.randperm(V) for _ in range(N * T)]).view(N, T, V).to(DEVICE, torch.float32)
    _, candidates = select_candidates.select_candidates(logits, K)
    assert torch.equal(candidates, reference.select_candidates(logits, K)[1])
    _, anchor, norm, _, gate_weight, gate_bias, write_weight = injection_inputs(N, 2, d, r, dtype)
    arguments = (
        normal(N, T + 1, d, dtype=dtype)[:, 1:],
        normal(N, T + 1, r, dtype=dtype)[:, 1:],
        anchor,
        candidates,
        normal(V, r, dtype=dtype),
        normal(V, d, scale=d**-0.5, dtype=dtype),
        norm,
        gate_weight,
        gate_bias,
        write_weight,
        EPS,
    )
    scores = transition_cache.transition_cache(*arguments)
    temperature = torch.tensor([0.0, 1.0]).repeat(N)[:N].to(DEVICE)
    uniforms = torch.rand(N, T).to(DEVICE)
    for sampling in ((None, None), (temperature, uniforms)):
        tokens, _ = walk_transition_cache.walk_transition_cache(scores, candidates, *sampling)
        assert torch.equal(tokens, reference.walk_transition_cache(scores, candidates, *sampling)[0])
    return [(scores, reference.transition_cache(*arguments))]


CASES = {
    "injection-parts": lambda: inject(2, 16, 300, 60, "parts"),
    "injection-halo": lambda: inject(7, 5, 300, 60, "parts"),
    "injection-reduced": lambda: inject(9, 13, 300, 256, "reduced"),
    "injection-library": lambda: inject(40, 16, 300, 100, "library"),
    "training": lambda: train(9, 13, 300, 60),
    "training-fp32": lambda: train(3, 5, 70, 20, torch.float32),
    "choice": lambda: choose(2, 3, 300, 60, 5, 3000),
    "choice-aligned": lambda: choose(3, 15, 320, 256, 16, 3000),
    "choice-many": lambda: choose(9, 15, 128, 64, 16, 500),
}


def main():
    torch.manual_seed(0)
    if "--list" in sys.argv:
        raise SystemExit("\n".join(CASES))
    for name in sys.argv[1:] or CASES:
        begin = time.perf_counter()
        pairs = CASES[name]()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        worst = max(((a - b).float().norm() / b.float().norm().clamp_min(1e-9)).item() for a, b in pairs)
        verdict = "ok" if worst < 0.05 else "WRONG"
        print(f"{name}: relative difference {worst:.1e} {verdict}, {time.perf_counter() - begin:.1f} s", flush=True)
        if verdict != "ok":
            raise SystemExit(1)


if __name__ == "__main__":
    main()
