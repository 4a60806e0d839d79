"""What the host functions of all kernels share: the dtype to multiply in, how kernels are launched and compiled, and on what device."""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Executor, ThreadPoolExecutor

import torch


def compute_dtype(hidden_states: torch.Tensor) -> torch.dtype:
    """The dtype matrix products run in: autocast's where it is on, else that of `hidden_states`."""
    kind = hidden_states.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_states.dtype


def operand_scale(dtype: torch.dtype) -> float:
    """A power of two for products of the residual stream and a norm weight, so that a large channel does not overflow in fp16.

    Scaling by a power of two loses nothing, and the norm's scale is applied to the fp32 sum afterwards.
    """
    return 2.0**-6 if dtype == torch.float16 else 1.0


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


@functools.cache
def _has_dependent_launch(index: int) -> bool:
    if os.environ.get("DSPINE_PDL", "1") == "0" or torch.version.hip or torch.cuda.get_device_capability(index)[0] < 9:
        return False
    import triton.language as tl

    return hasattr(tl.extra.cuda, "gdc_wait")


def launch_options(tensor: torch.Tensor, num_warps: int, num_stages: int = 1, dependent: bool = True) -> dict:
    """Keyword arguments of a launch. `dependent` asks for programmatic dependent launch, by which a kernel's blocks start, and may
    load weights, while the kernel before it finishes (Hopper and later; `DSPINE_PDL=0` switches it off)."""
    options = {"num_warps": num_warps, "num_stages": num_stages, "PDL": False}
    if dependent and tensor.is_cuda and _has_dependent_launch(tensor.device.index):
        options |= {"PDL": True, "launch_pdl": True}
    return options


class _Collecting(threading.local):
    """Where a thread's launches go while `compile_together` collects them."""

    pool: Executor | None = None
    device: torch.device | None = None


_collecting = _Collecting()
_compiled_classes: set[Hashable] = set()


def launch(kernel, grid: tuple[int, ...], *args, **options) -> None:
    """Launches a Triton kernel, or hands it to a thread to compile while `compile_together` collects."""
    if _collecting.pool is None:
        kernel[grid](*args, **options)
    else:
        _collecting.pool.submit(_compile, _collecting.device, kernel, grid, args, options)


def _compile(device: torch.device, kernel, grid, args, options) -> None:
    # an error is left for the launch that follows, which meets it again and reports it
    with contextlib.suppress(Exception), torch.cuda.device(device):
        # `run` builds the launcher and loads the kernel
        getattr(kernel.warmup(*args, grid=grid, **options), "run", None)


def compile_together(key: Hashable, function: Callable, *args) -> None:
    """Compiles all kernels that a host function launches side by side, in threads: the first call of a shape class takes as long as
    its slowest kernel, not as all of them (the compiler lets go of Python's lock).

    The function runs once without its launches, so its products see tensors that nobody filled; their results are thrown away. It
    does nothing after the first call with a key, off CUDA, and during the capture of a CUDA graph, where kernels compile one by one.

    Args:
        key: what the kernels are compiled for, apart from the device.
        function: called with `args`, whose first is a tensor on the device to compile for; it launches with `launch`.
    """
    device = args[0].device
    if device.type != "cuda" or (device, key) in _compiled_classes or _collecting.pool is not None:
        return
    if torch.cuda.is_current_stream_capturing():
        return
    _compiled_classes.add((device, key))
    import triton

    # what Triton works out once per process, so that not every thread does
    triton.runtime.driver.active.get_current_device()
    once = getattr(triton.runtime.cache, "triton_key", None) or getattr(triton.compiler.compiler, "triton_key", None)
    if once is not None:
        once()
    with ThreadPoolExecutor(max_workers=8, thread_name_prefix="dspine-compile") as pool:
        _collecting.pool, _collecting.device = pool, device
        try:
            function(*args)
        finally:
            _collecting.pool = _collecting.device = None


# what one program can use on the GPUs that the tables are meant for (Hopper, and Blackwell for data centres)
LARGE_MEMORY = 227 * 1024


@functools.cache
def _shared_memory(index: int) -> int:
    return getattr(torch.cuda.get_device_properties(index), "shared_memory_per_block_optin", LARGE_MEMORY)


def shared_memory(tensor: torch.Tensor) -> int:
    """Bytes of shared memory that one program can use on the tensor's device; other GPUs than the above have 99 to 163 kB."""
    return _shared_memory(tensor.device.index) if tensor.is_cuda else LARGE_MEMORY


def on_device(tensor: torch.Tensor):
    """Makes the tensor's GPU the current one, since Triton launches there."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


def needs_gradients(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def is_eager(*tensors: torch.Tensor) -> bool:
    """Whether the call is neither traced nor made with tensor subclasses, so that a custom operator, which both need, can be spared:
    it costs tens of microseconds a call, and the first one imports `torch._dynamo`, which takes seconds."""
    if torch.compiler.is_compiling():
        return False
    return all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in tensors)


def is_plain(*tensors: torch.Tensor) -> bool:
    """Whether a host function may launch directly: eager, and without gradients."""
    return is_eager(*tensors) and not needs_gradients(*tensors)
