"""Gated adjacent injection in Triton against the reference: values and every gradient, in every shape its forward takes.

On a machine without a GPU the kernels run in Triton's interpreter, in fp32 and fp16; `-m gpu` adds bf16 shapes as in training and
serving, `torch.compile` and CUDA graphs.
"""

import subprocess
import sys
import threading

import pytest
import torch
from kernel_testing import DEVICE, DTYPES, assert_no_worse, poisoned_empty, upcast

from dspine.kernels import injection, launch
from dspine.kernels.injection import ForwardConfig, Tile
from dspine.kernels.registry import check_gated_adjacent_injection
from dspine.modeling_dspine.reference_dspine import gated_adjacent_injection as reference
from dspine.modeling_dspine.registry_dspine import call, implementation_report, use_implementation


EPS = 1e-6
NAMES = [
    "hidden_states",
    "anchor_features",
    "norm_weight",
    "feature_weight",
    "gate_weight",
    "gate_bias",
    "write_weight",
]
# the smallest tiles, so that a small input spans several in every direction
FORWARD = {
    "parts": ForwardConfig("parts", 3, Tile(16, 16, 32, 4, 2), Tile(16, 32, 32, 4, 1)),
    "parts-sliced": ForwardConfig("parts", 2, Tile(16, 16, 16, 4, 2, slices=4), Tile(32, 32, 16, 4, 1)),
    "reduced": ForwardConfig("reduced", 3, Tile(16, 16, 32, 4, 2), Tile(16, 32, 32, 4, 1)),
    "library": ForwardConfig("library", 1, None),
    "library-parts": ForwardConfig("library", 3, Tile(16, 16, 32, 4, 2)),
}


@pytest.fixture(params=list(FORWARD))
def mode(request, monkeypatch):
    monkeypatch.setattr(injection, "forward_config", lambda *args: FORWARD[request.param])
    return request.param


@pytest.fixture(params=[name for name in FORWARD if name.startswith("library")])
def mode_with_gradients(request, monkeypatch):
    monkeypatch.setattr(injection, "forward_config", lambda *args: FORWARD[request.param])
    return request.param


def make_inputs(N, B, d, r, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0, mean=0.0):
        return (mean + scale * torch.randn(shape, generator=generator)).to(DEVICE, dtype)

    return [
        normal(N, B, d, scale=3.0),
        normal(N, r),
        normal(d, scale=0.2, mean=1.0),
        normal(r, d, scale=d**-0.5),
        normal(d, 2 * r, scale=r**-0.5),
        normal(d, scale=0.5),
        normal(d, r, scale=r**-0.5),
    ]


def values_and_gradients(function, inputs, grads):
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    outputs = function(*inputs, EPS)
    return [*outputs, *torch.autograd.grad(outputs, inputs, grads)]


def compare(inputs, gradients=True, function=injection.gated_adjacent_injection):
    """Checks the values without gradients, and then both with them, which may take another way through the kernels."""
    N, B, d = inputs[0].shape
    r, dtype = inputs[3].shape[0], inputs[0].dtype
    terms = max(N * B, 2 * d, 2 * r)
    names = ["residual stream", "features"]
    with poisoned_empty(), torch.no_grad():
        values = function(*inputs, EPS)
    eager, truth = reference(*inputs, EPS), reference(*upcast(inputs), EPS)
    for name, a, e, t in zip(names, values, eager, truth):
        assert_no_worse(name, a, e, t, terms)
    if not gradients:
        return list(values)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in ((N, B, d), (N, B, r))]
    with poisoned_empty():
        actual = values_and_gradients(function, inputs, grads)
    eager = values_and_gradients(reference, inputs, grads)
    truth = values_and_gradients(reference, upcast(inputs), upcast(grads))
    for name, a, e, t in zip(names + [f"gradient of {name}" for name in NAMES], actual, eager, truth):
        assert_no_worse(name, a, e, t, terms)
    return [*values, *actual]


SHAPES = [
    pytest.param(*shape, id="N{}-B{}-d{}-r{}".format(*shape))
    for shape in [(7, 5, 70, 20), (1, 16, 96, 32), (9, 2, 33, 7)]
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N, B, d, r", SHAPES)
def test_values_and_gradients(mode, N, B, d, r, dtype):
    compare(make_inputs(N, B, d, r, dtype), gradients=mode.startswith("library"))


@pytest.mark.parametrize("slots, itemsize", [(16, 2), (16, 4), (128, 2), (272, 2), (528, 2), (80, 4)])
def test_the_tiles_of_real_shapes(slots, itemsize):
    d, r = (80, 24) if slots <= 128 else (40, 12)
    compare(make_inputs(slots // 16, 16, d, r, {2: torch.float16, 4: torch.float32}[itemsize]))


def test_rows_may_have_any_stride(mode):
    inputs = make_inputs(3, 5, 70, 20, torch.float32)
    packed = injection.gated_adjacent_injection(*inputs, EPS)
    strided = list(inputs)
    strided[0] = torch.nn.functional.pad(inputs[0].transpose(0, 1), (0, 0, 1, 2)).transpose(0, 1)[1:4]
    strided[1] = torch.stack([inputs[1], inputs[1]], dim=1)[:, 0]
    assert strided[0].stride() != inputs[0].stride() and strided[1].stride() != inputs[1].stride()
    for a, b in zip(injection.gated_adjacent_injection(*strided, EPS), packed):
        assert torch.equal(a, b)
    compare(strided, gradients=mode.startswith("library"))


def test_nothing_crosses_the_border_of_a_block(mode):
    inputs = make_inputs(4, 5, 70, 20, torch.float32)
    before = injection.gated_adjacent_injection(*inputs, EPS)
    inputs[0][1] = float("nan")
    inputs[1][1] = float("nan")
    after = injection.gated_adjacent_injection(*inputs, EPS)
    for a, b in zip(after, before):
        assert torch.equal(a[[0, 2, 3]], b[[0, 2, 3]])


def test_slot_zero_keeps_its_residual_and_takes_the_anchor(mode):
    inputs = make_inputs(3, 5, 70, 20, torch.float32)
    out, features = injection.gated_adjacent_injection(*inputs, EPS)
    assert torch.equal(out[:, 0], inputs[0][:, 0])
    assert torch.equal(features[:, 0], inputs[1])


def test_backward_is_deterministic(mode_with_gradients):
    inputs = make_inputs(3, 5, 70, 20, torch.float32)
    for a, b in zip(compare(inputs), compare(inputs)):
        assert torch.equal(a, b)


def test_a_large_channel_does_not_overflow_in_fp16(mode):
    inputs = make_inputs(2, 5, 70, 20, torch.float16)
    inputs[0][..., 3] = 3e4
    inputs[2][3] = 8.0
    out, features = injection.gated_adjacent_injection(*inputs, EPS)
    truth = reference(*upcast(inputs), EPS)
    eager = reference(*inputs, EPS)
    assert_no_worse("residual stream", out, eager[0], truth[0], terms=140)
    assert_no_worse("features", features, eager[1], truth[1], terms=140)


def test_only_one_output_is_differentiated(mode_with_gradients):
    inputs = [tensor.requires_grad_() for tensor in make_inputs(2, 5, 40, 12, torch.float32)]
    for which in (0, 1):
        actual = torch.autograd.grad(injection.gated_adjacent_injection(*inputs, EPS)[which].sum(), inputs)
        truth = torch.autograd.grad(reference(*inputs, EPS)[which].sum(), inputs, allow_unused=True)
        for name, a, t in zip(NAMES, actual, truth):
            torch.testing.assert_close(
                a, torch.zeros_like(a) if t is None else t, msg=lambda m, name=name: f"{name}: {m}"
            )


@pytest.mark.parametrize("name", ["parts", "library"])
def test_autocast_returns_gradients_in_the_dtype_of_the_weights(name, monkeypatch):
    monkeypatch.setattr(injection, "forward_config", lambda *args: FORWARD[name])
    low = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    inputs = make_inputs(2, 5, 70, 20, torch.float32)
    inputs[0], inputs[1] = inputs[0].to(low), inputs[1].to(low)
    grads = [torch.randn(2, 5, 70, device=DEVICE).to(low), torch.randn(2, 5, 20, device=DEVICE).to(low)]
    with torch.autocast(DEVICE, dtype=low):
        actual = values_and_gradients(injection.gated_adjacent_injection, inputs, grads)
        eager = values_and_gradients(reference, inputs, grads)
    truth = values_and_gradients(reference, upcast(inputs), upcast(grads))
    for name, a, e, t in zip(["residual stream", "features", *NAMES], actual, eager, truth):
        assert a.dtype == e.dtype, name
        # gradients of weights come back in fp32, but through products in the low dtype
        assert_no_worse(name, a.to(low), e.to(low), t, terms=140)


def test_custom_ops_are_well_formed(monkeypatch):
    monkeypatch.setattr(injection, "forward_config", lambda *args: FORWARD["parts"])
    inputs = make_inputs(2, 3, 20, 16, torch.float32)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(injection._fused, (*inputs, EPS), test_utils=tests)
    tests += ("test_autograd_registration", "test_aot_dispatch_static")
    inputs = [tensor.requires_grad_() for tensor in inputs]
    torch.library.opcheck(injection._library, (*inputs, EPS), test_utils=tests)


@pytest.mark.parametrize("gradients", [False, True], ids=["inference", "training"])
def test_traces_in_one_graph_through_the_registry(gradients, monkeypatch):
    monkeypatch.setattr(injection, "forward_config", lambda *args: FORWARD["parts"])
    inputs = [tensor.requires_grad_(gradients) for tensor in make_inputs(2, 3, 20, 16, torch.float32)]

    def function(*inputs):
        return call("gated_adjacent_injection", *inputs, EPS)

    with use_implementation(gated_adjacent_injection="triton"):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        actual = compiled(*inputs)
        expected = function(*inputs)
        assert implementation_report()["gated_adjacent_injection"]["active"] == "triton"
    if gradients:
        actual = [*actual, *torch.autograd.grad(actual[0].sum(), inputs)]
        expected = [*expected, *torch.autograd.grad(expected[0].sum(), inputs)]
    for a, e in zip(actual, expected):
        assert torch.equal(a, e)


def test_checks_tell_the_reason(monkeypatch):
    good = make_inputs(2, 5, 32, 16, torch.float32)
    assert check_gated_adjacent_injection(*good, EPS) is None
    assert "'rank'" in check_gated_adjacent_injection(*good, EPS, gate="rank")
    assert "bias" in check_gated_adjacent_injection(*good[:5], None, good[6], EPS)
    assert "2 <= B <= 64" in check_gated_adjacent_injection(*make_inputs(1, 65, 32, 16, torch.float32), EPS)
    assert "at most 512" in check_gated_adjacent_injection(*make_inputs(1, 2, 8, 513, torch.float32), EPS)
    assert "float64" in check_gated_adjacent_injection(*upcast(good), EPS)
    assert "dtype of hidden_states" in check_gated_adjacent_injection(good[0].half(), *good[1:], EPS)
    assert "contiguous" in check_gated_adjacent_injection(
        good[0].transpose(1, 2).contiguous().transpose(1, 2), *good[1:], EPS
    )
    if DEVICE == "cpu":
        assert "bfloat16" in check_gated_adjacent_injection(*[tensor.bfloat16() for tensor in good], EPS)
        monkeypatch.setattr("dspine.kernels.registry.INTERPRETED", False)
    assert "CUDA" in check_gated_adjacent_injection(*[tensor.cpu() for tensor in good], EPS) or DEVICE == "cuda"
    with pytest.raises(ValueError, match="'none'"):
        injection.gated_adjacent_injection(*good, EPS, gate="none")


def test_importing_the_registry_does_not_import_triton():
    code = "import sys, dspine.kernels.registry as r; r.register_kernels(lambda *args: None); sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


LARGE = [
    pytest.param(*shape, id="N{}-B{}-d{}-r{}".format(*shape))
    for shape in [
        (1, 16, 4096, 256),
        (8, 16, 4096, 256),
        (32, 16, 4096, 256),
        (64, 16, 4096, 256),
        (300, 16, 2560, 256),
        (5, 16, 576, 128),
        (7, 8, 1000, 300),
    ]
    + [(3, 64, 4096, 512), (301, 16, 1024, 64)]
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("N, B, d, r", LARGE)
def test_real_shapes_on_a_gpu(N, B, d, r, dtype):
    first = compare(make_inputs(N, B, d, r, dtype))
    for a, b in zip(compare(make_inputs(N, B, d, r, dtype)), first):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_the_first_call_of_a_shape_class_compiles_in_threads(monkeypatch):
    compiled, original = [], launch._compile

    def record(device, kernel, *args):
        compiled.append((kernel.fn.__name__, threading.current_thread() is threading.main_thread()))
        original(device, kernel, *args)

    monkeypatch.setattr(launch, "_compiled_classes", set())
    monkeypatch.setattr(launch, "_compile", record)
    inputs = [tensor.requires_grad_() for tensor in make_inputs(3, 16, 192, 48, torch.bfloat16)]

    def function():
        out, features = injection.gated_adjacent_injection(*inputs, EPS)
        return [out, features, *torch.autograd.grad(out.float().sum() + features.float().sum(), inputs)]

    first, second = function(), function()
    names = {"feature_fwd_kernel", "normalise_fwd_kernel", "write_fwd_kernel"}
    names |= {"products_bwd_kernel", "feature_bwd_kernel", "residual_bwd_kernel"}
    # every kernel once, and none in the thread that launches
    assert sorted(compiled) == sorted((name, False) for name in names)
    for a, b in zip(first, second):
        assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("gradients", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("N", [4, 64])
def test_compiles_on_a_gpu(N, gradients):
    inputs = [tensor.requires_grad_(gradients) for tensor in make_inputs(N, 16, 512, 128, torch.bfloat16)]

    def function(*inputs):
        return call("gated_adjacent_injection", *inputs, EPS)

    with use_implementation(gated_adjacent_injection="triton"):
        actual, expected = torch.compile(function, fullgraph=True)(*inputs), function(*inputs)
    if gradients:
        actual = [*actual, *torch.autograd.grad(actual[0].sum(), inputs)]
        expected = [*expected, *torch.autograd.grad(expected[0].sum(), inputs)]
    for a, e in zip(actual, expected):
        assert torch.equal(a, e)


@pytest.mark.gpu
@pytest.mark.parametrize("N", [1, 8, 64])
def test_replays_in_a_cuda_graph(N):
    inputs = make_inputs(N, 16, 1024, 256, torch.bfloat16)
    chained = [inputs[0], *inputs[1:]]

    def function():
        # several layers in a row, so that launches overlap as they do in a drafter
        hidden = chained[0]
        for _ in range(5):
            hidden, features = injection.gated_adjacent_injection(hidden, *chained[1:], EPS)
        return hidden, features

    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function()
    for seed in (1, 2, 3):
        chained[0].copy_(make_inputs(N, 16, 1024, 256, torch.bfloat16, seed)[0])
        graph.replay()
        for a, b in zip(outputs, function()):
            assert torch.equal(a, b)
