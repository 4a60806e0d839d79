"""How kernels are judged: against the reference in fp64, relative to what the reference itself reaches in the dtype at hand."""

import contextlib
import math

import torch


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter computes bfloat16 wrongly
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])


def relative_error(actual: torch.Tensor, truth: torch.Tensor) -> float:
    actual, truth = actual.double(), truth.double()
    return ((actual - truth).norm() / truth.norm().clamp_min(1e-300)).item()


def assert_no_worse(name: str, actual: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor, terms: int) -> None:
    """The kernel may be as wrong as eager is in the same dtype, plus one rounding to that dtype (it rounds at other places) and
    the random walk of an fp32 sum of `terms` terms (it adds in another order)."""
    assert actual.shape == eager.shape and actual.dtype == eager.dtype, f"{name}: {actual.shape} {actual.dtype}"
    assert torch.isfinite(actual).all(), f"{name} has elements that were not written, or overflowed"
    rounding = torch.finfo(actual.dtype).eps / 2 + math.sqrt(terms) * torch.finfo(torch.float32).eps / 2
    error, allowed = relative_error(actual, truth), relative_error(eager, truth) + rounding
    assert error <= allowed, f"{name}: relative error {error:.2e}, eager's plus the bound is {allowed:.2e}"


@contextlib.contextmanager
def poisoned_empty():
    """Inside, `torch.empty` returns NaN (or a huge integer), so that an element no kernel writes shows."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(math.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)

    torch.empty = poisoned
    try:
        yield
    finally:
        torch.empty = empty


def upcast(arguments):
    """Floating-point tensors to fp64, everything else as it is."""
    return [a.detach().double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments]
