"""Registers the Triton kernels with the operations they replace. Importing this file does not import Triton."""

import importlib.util


def register_kernels(register) -> str | None:
    """Calls `register(op, "triton", function, check)` for every kernel; returns the reason if there are none to register."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; install it with `pip install dspine[triton]`"
    return "this release has no Triton kernels yet"
