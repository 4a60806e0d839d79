"""What the host functions of all kernels share: the dtype to multiply in, launch options, and the device to launch on."""

import contextlib
import functools
import os

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


def launch_options(tensor: torch.Tensor, num_warps: int, num_stages: int = 1) -> dict:
    """Keyword arguments of a launch. `PDL` switches on programmatic dependent launch, by which a kernel's blocks start, and may load
    weights, while the kernel before it finishes (Hopper and later; `DSPINE_PDL=0` switches it off)."""
    options = {"num_warps": num_warps, "num_stages": num_stages, "PDL": False}
    if tensor.is_cuda and _has_dependent_launch(tensor.device.index):
        options |= {"PDL": True, "launch_pdl": True}
    return options


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


def is_plain(*tensors: torch.Tensor) -> bool:
    """Whether a host function may launch directly, without the dispatcher's bookkeeping (tens of microseconds a call): no
    gradients, no tracing, no tensor subclass."""
    if torch.compiler.is_compiling() or needs_gradients(*tensors):
        return False
    return all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in tensors)
