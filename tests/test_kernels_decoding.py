"""Candidates, transition cache and walk in Triton against the reference: the same tokens, and scores as close to fp64 as eager's.

On a machine without a GPU the kernels run in Triton's interpreter, in fp32 and fp16; `-m gpu` adds bf16, shapes as in serving,
`torch.compile` and CUDA graphs.
"""

import pytest
import torch
from kernel_testing import DEVICE, DTYPES, assert_no_worse, poisoned_empty, upcast

from dspine.kernels import transition_cache as cache_module
from dspine.kernels.registry import check_select_candidates, check_transition_cache, check_walk_transition_cache
from dspine.kernels.select_candidates import _select_candidates, select_candidates
from dspine.kernels.transition_cache import TransitionConfig, _transition_cache, transition_cache
from dspine.kernels.walk_transition_cache import _walk_transition_cache, walk_transition_cache
from dspine.modeling_dspine import reference_dspine as reference
from dspine.modeling_dspine.registry_dspine import call, use_implementation


EPS = 1e-6


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def distinct_logits(N, T, V, dtype, seed=0):
    """Logits without a tie in any row, which 16 bits only have room for in small vocabularies."""
    ranks = torch.stack([torch.randperm(V, generator=generator(seed + row)) for row in range(N * T)])
    return ((ranks.view(N, T, V) - V // 2) / 64).to(DEVICE, dtype)


def stable_candidates(logits, K):
    values, tokens = logits.float().sort(dim=-1, descending=True, stable=True)
    return values[..., :K].to(logits.dtype), tokens[..., :K]


def make_cache_inputs(N, T, d, r, K, V, dtype, seed=0):
    random = generator(seed)

    def normal(*shape, scale=1.0, mean=0.0):
        return (mean + scale * torch.randn(shape, generator=random)).to(DEVICE, dtype)

    candidates = torch.stack([torch.randperm(V, generator=random)[:K] for _ in range(N * T)]).view(N, T, K).to(DEVICE)
    return [
        # views without the anchor slot, as the model hands them over
        normal(N, T + 1, d, scale=3.0)[:, 1:],
        normal(N, T + 1, r)[:, 1:],
        normal(N, r),
        candidates,
        normal(V, r),
        normal(V, d, scale=d**-0.5),
        normal(d, scale=0.2, mean=1.0),
        normal(d, 2 * r, scale=r**-0.5),
        normal(d, scale=0.5),
        normal(d, r, scale=r**-0.5),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N, T, V, K", [(2, 3, 1500, 5), (1, 1, 128, 16), (1, 2, 97, 1), (2, 1, 20, 20)])
def test_candidates_equal_the_reference(N, T, V, K, dtype):
    logits = distinct_logits(N, T + 1, V, dtype)[:, 1:]
    with poisoned_empty():
        values, tokens = select_candidates(logits, K)
    expected_values, expected_tokens = reference.select_candidates(logits, K)
    assert torch.equal(tokens, expected_tokens) and tokens.dtype == torch.int64
    assert torch.equal(values, expected_values) and values.dtype == dtype


def test_equal_logits_come_in_order_of_token_id():
    logits = torch.randn(3, 4, 700, generator=generator()).round().to(DEVICE)
    logits[0, 0] = 0.0
    logits[0, 1, ::2] = -0.0
    logits[0, 2, 9:] = float("-inf")
    for K in (1, 7, 16):
        values, tokens = select_candidates(logits, K)
        expected_values, expected_tokens = stable_candidates(logits, K)
        assert torch.equal(tokens, expected_tokens)
        assert torch.equal(values, expected_values)


CACHE_SHAPES = [
    pytest.param(*shape, id="N{}-T{}-d{}-r{}-K{}-V{}".format(*shape))
    for shape in [(2, 3, 70, 20, 5, 60), (1, 5, 96, 32, 16, 40), (3, 1, 33, 7, 17, 50)]
]


@pytest.mark.parametrize("splits, block_r", [(1, 32), (2, 32), (1, 16), (2, 16)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N, T, d, r, K, V", CACHE_SHAPES)
def test_scores_are_as_close_to_fp64_as_eager(N, T, d, r, K, V, dtype, splits, block_r, monkeypatch):
    monkeypatch.setattr(
        cache_module, "transition_config", lambda *args: TransitionConfig(2, 32, block_r, splits, 4, 2)
    )
    inputs = make_cache_inputs(N, T, d, r, K, V, dtype)
    with poisoned_empty():
        scores = transition_cache(*inputs, EPS)
    eager, truth = reference.transition_cache(*inputs, EPS), reference.transition_cache(*upcast(inputs), EPS)
    assert_no_worse("scores", scores, eager, truth, terms=2 * max(d, r))
    # the anchor is the left neighbour of the first slot in every row
    assert torch.equal(scores[:, 0], scores[:, 0, :1].expand(-1, K, -1))


def test_the_tiles_of_real_shapes():
    for slots in (15, 300):
        inputs = make_cache_inputs(slots // 15, 15, 130, 24, 16, 50, torch.float32)
        if slots > 15 and DEVICE == "cpu":
            config = cache_module.transition_config(slots, 16, 4096, 256, 2)
            assert config.splits == max(1, 128 // -(-slots // config.block_s))
            continue
        scores = transition_cache(*inputs, EPS)
        truth = reference.transition_cache(*upcast(inputs), EPS)
        assert_no_worse("scores", scores, reference.transition_cache(*inputs, EPS), truth, terms=260)


def make_walk_inputs(N, T, K, seed=0):
    random = generator(seed)
    scores = torch.randn(N, T, K, K, generator=random).to(DEVICE) * 3
    candidates = (
        torch.stack([torch.randperm(900, generator=random)[:K] for _ in range(N * T)]).view(N, T, K).to(DEVICE)
    )
    # greedy and sampled rows side by side
    temperature = torch.tensor([0.0, 1.0, 0.3, 5.0]).repeat(N)[:N].to(DEVICE)
    return scores, candidates, temperature, torch.rand(N, T, generator=random).to(DEVICE)


@pytest.mark.parametrize("N, T, K", [(4, 15, 16), (3, 7, 5), (1, 1, 1), (2, 4, 33), (5, 63, 2)])
def test_walk_equals_the_reference(N, T, K):
    scores, candidates, temperature, uniforms = make_walk_inputs(N, T, K)
    for sampling in ((temperature, uniforms), (None, None)):
        with poisoned_empty():
            tokens, q = walk_transition_cache(scores, candidates, *sampling)
        expected_tokens, expected_q = reference.walk_transition_cache(scores, candidates, *sampling)
        assert torch.equal(tokens, expected_tokens) and tokens.dtype == torch.int64
        # a softmax of K terms, each a quotient of correctly scaled exponentials
        torch.testing.assert_close(q, expected_q, rtol=1e-5, atol=(K + 2) * torch.finfo(torch.float32).eps)
        torch.testing.assert_close(
            q.sum(-1), torch.ones_like(q[..., 0]), rtol=0, atol=(K + 2) * torch.finfo(torch.float32).eps
        )


@pytest.mark.parametrize("N, T, K", [(4, 15, 16), (3, 7, 5)])
def test_guided_walk_equals_the_reference(N, T, K):
    scores, candidates, temperature, uniforms = make_walk_inputs(N, T, K)
    base = torch.randn(N, T, K, generator=generator(1)).to(DEVICE) * 3
    base[:, 1:, -1] = float("-inf")  # a candidate that fills up
    for sampling in ((temperature, uniforms), (None, None)):
        tokens, q = walk_transition_cache(scores, candidates, *sampling, base, 0.5)
        expected_tokens, expected_q = reference.walk_transition_cache(scores, candidates, *sampling, base, 0.5)
        assert torch.equal(tokens, expected_tokens)
        torch.testing.assert_close(q, expected_q, rtol=1e-5, atol=(K + 2) * torch.finfo(torch.float32).eps)
        plain, _ = walk_transition_cache(scores, candidates, *sampling)
        assert not torch.equal(tokens[0], plain[0])  # a greedy row
        assert torch.equal(walk_transition_cache(scores, candidates, *sampling, base, 0.0)[0], plain)


def test_walk_takes_the_first_of_equals_and_never_the_impossible():
    scores, candidates, _, uniforms = make_walk_inputs(2, 6, 8)
    scores = scores.round()
    tokens, _ = walk_transition_cache(scores, candidates)
    assert torch.equal(tokens, reference.walk_transition_cache(scores, candidates)[0])

    scores[..., 5:] = float("-inf")
    uniforms.fill_(1 - 2**-24)
    tokens, q = walk_transition_cache(scores, candidates, torch.ones(2, device=DEVICE), uniforms)
    where = (candidates == tokens[..., None]).float()
    assert (where.argmax(-1) < 5).all() and ((q * where).sum(-1) > 0).all()


def test_walk_draws_from_q():
    """One slot, many rows: the drawn tokens' frequencies follow q, within four standard deviations."""
    N, K = 64, 4
    scores = torch.randn(1, 1, 1, K, generator=generator()).expand(N, 1, K, K).contiguous().to(DEVICE)
    candidates = torch.arange(K, device=DEVICE).expand(N, 1, K).contiguous()
    # a lattice of uniforms: every frequency is within 1/N of its probability
    uniforms = ((torch.arange(N, device=DEVICE) + 0.5) / N)[:, None]
    tokens, q = walk_transition_cache(scores, candidates, torch.ones(N, device=DEVICE), uniforms)
    counts = torch.bincount(tokens[:, 0], minlength=K) / N
    assert (counts - q[0, 0]).abs().max() <= 1.5 / N


def decode(logits, inputs, sampling, K):
    _, candidates = call("select_candidates", logits, K)
    inputs = [*inputs[:3], candidates, *inputs[4:]]
    scores = call("transition_cache", *inputs, EPS)
    return call("walk_transition_cache", scores, candidates, *sampling)


def test_the_whole_tail_chooses_the_same_tokens():
    N, T, K, V = 2, 4, 4, 60
    inputs = make_cache_inputs(N, T, 48, 16, K, V, torch.float32)
    _, _, temperature, uniforms = make_walk_inputs(N, T, K)
    logits = distinct_logits(N, T, V, torch.float32)
    with use_implementation("triton"):
        tokens, q = decode(logits, inputs, (temperature, uniforms), K)
    with use_implementation("reference"):
        expected, expected_q = decode(logits, inputs, (temperature, uniforms), K)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(q, expected_q)


def test_custom_ops_are_well_formed():
    tests = ("test_schema", "test_faketensor")
    scores, candidates, temperature, uniforms = make_walk_inputs(2, 3, 4)
    torch.library.opcheck(_select_candidates, (distinct_logits(2, 2, 50, torch.float32), 3), test_utils=tests)
    for options in ((temperature, uniforms, None, 0.0), (None, None, scores[:, :, 0], 0.5)):
        torch.library.opcheck(_walk_transition_cache, (scores, candidates, *options), test_utils=tests)
    torch.library.opcheck(
        _transition_cache, (*make_cache_inputs(1, 2, 20, 16, 4, 30, torch.float32), EPS), test_utils=tests
    )


def test_traces_in_one_graph_through_the_registry():
    N, T, K, V = 1, 2, 4, 30
    inputs = make_cache_inputs(N, T, 20, 16, K, V, torch.float32)
    _, _, temperature, uniforms = make_walk_inputs(N, T, K)
    logits = distinct_logits(N, T, V, torch.float32)
    with use_implementation("triton"):
        compiled = torch.compile(decode, fullgraph=True, backend="aot_eager" if DEVICE == "cpu" else "inductor")
        actual = compiled(logits, inputs, (temperature, uniforms), K)
        expected = decode(logits, inputs, (temperature, uniforms), K)
    for a, e in zip(actual, expected):
        assert torch.equal(a, e)


def test_checks_tell_the_reason():
    logits = distinct_logits(2, 2, 100, torch.float32)
    assert check_select_candidates(logits, 16) is None
    assert "gradients" in check_select_candidates(logits.clone().requires_grad_(), 16)
    assert "between 1 and 64" in check_select_candidates(logits, 65)
    assert "contiguous" in check_select_candidates(logits.transpose(1, 2), 1)
    assert "float64" in check_select_candidates(logits.double(), 16)

    inputs = make_cache_inputs(1, 2, 20, 16, 4, 30, torch.float32)
    assert check_transition_cache(*inputs, EPS) is None
    assert "'none'" in check_transition_cache(*inputs, EPS, gate="none")
    assert "gradients" in check_transition_cache(*inputs[:9], inputs[9].clone().requires_grad_(), EPS)
    with torch.no_grad():
        assert check_transition_cache(*inputs[:9], inputs[9].clone().requires_grad_(), EPS) is None
    assert "contiguous" in check_transition_cache(*inputs[:5], inputs[5].t().contiguous().t(), *inputs[6:], EPS)

    scores, candidates, temperature, uniforms = make_walk_inputs(2, 3, 4)
    assert check_walk_transition_cache(scores, candidates, temperature, uniforms) is None
    assert "uniforms" in check_walk_transition_cache(scores, candidates, temperature)
    assert "contiguous" in check_walk_transition_cache(scores.transpose(-1, -2), candidates)
    assert "base_scores" in check_walk_transition_cache(scores, candidates, None, None, scores, 0.5)


LARGE = [
    pytest.param(*shape, id="N{}-T{}-d{}-r{}-K{}-V{}".format(*shape))
    for shape in [
        (1, 15, 4096, 256, 16, 151936),
        (8, 15, 4096, 256, 16, 151936),
        (32, 15, 4096, 256, 16, 32000),
        (64, 15, 4096, 256, 16, 151936),
        (3, 7, 2560, 512, 16, 32000),
        (5, 15, 576, 128, 32, 49152),
        (2, 63, 1000, 100, 64, 5001),
    ]
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("N, T, d, r, K, V", LARGE)
def test_real_shapes_on_a_gpu(N, T, d, r, K, V, dtype):
    logits = torch.randn(N, T + 1, V, device=DEVICE, dtype=dtype)[:, 1:]
    with poisoned_empty():
        values, tokens = select_candidates(logits, K)
    expected_values, expected_tokens = stable_candidates(logits, K)
    assert torch.equal(tokens, expected_tokens) and torch.equal(values, expected_values)

    # the gathered rows in fp64 are what bounds the oracle's memory, so the tables are no larger than needed
    inputs = make_cache_inputs(N, T, d, r, K, min(V, 4096), dtype)
    with poisoned_empty():
        scores = transition_cache(*inputs, EPS)
    for row in range(0, N, 8):
        part = [
            inputs[0][row : row + 8],
            inputs[1][row : row + 8],
            inputs[2][row : row + 8],
            inputs[3][row : row + 8],
            *inputs[4:],
        ]
        eager, truth = reference.transition_cache(*part, EPS), reference.transition_cache(*upcast(part), EPS)
        assert_no_worse("scores", scores[row : row + 8], eager, truth, terms=2 * d)

    _, _, temperature, uniforms = make_walk_inputs(N, T, K)
    for sampling in ((temperature, uniforms), (None, None)):
        chosen, q = walk_transition_cache(scores, tokens, *sampling)
        expected, expected_q = reference.walk_transition_cache(scores, tokens, *sampling)
        assert torch.equal(chosen, expected)
        torch.testing.assert_close(q, expected_q, rtol=1e-5, atol=(K + 2) * torch.finfo(torch.float32).eps)


@pytest.mark.gpu
def test_replays_in_a_cuda_graph():
    N, T, K, V = 4, 15, 16, 4000
    inputs = make_cache_inputs(N, T, 1024, 256, K, V, torch.bfloat16)
    _, _, temperature, uniforms = make_walk_inputs(N, T, K)
    logits = torch.randn(N, T, V, device=DEVICE)

    def function():
        return decode(logits, inputs, (temperature, uniforms), K)

    with use_implementation("triton"):
        function()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = function()
        for _ in range(3):
            logits.normal_()
            uniforms.uniform_()
            graph.replay()
            for a, b in zip(outputs, function()):
                assert torch.equal(a, b)
