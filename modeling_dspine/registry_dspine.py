"""Which implementation of each DSpine operation runs, and why another one does not.

Every operation has a slow, clear reference (`reference_dspine.py`). Faster ones register under the operation's name with the
same signature and a check that says in one sentence why they cannot run on given arguments. The choice, in this order:

1. `with use_implementation("reference"): ...` (or `use_implementation(gated_adjacent_injection="triton")`);
2. the environment variable `DSPINE_IMPL`, read when this module is imported, in the same words: `reference`, `triton` or `gated_adjacent_injection=triton,...`;
3. the implementation registered last whose check passes.

A choice by 1 or 2 is a demand: if that implementation cannot run, a ValueError gives the reason.
"""

import os
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from .reference_dspine import REFERENCES


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation; `check(*args, **kwargs)` returns None when it can, else the reason why not."""

    function: Callable
    check: Callable[..., str | None]


_implementations: dict[str, dict[str, Implementation]] = {
    op: {"reference": Implementation(function, lambda *args, **kwargs: None)} for op, function in REFERENCES.items()
}
_last_choice: dict[str, tuple[str, dict[str, str]]] = {}
_kernels_reason: str | None = "no operation has been called yet"
_kernels_loaded = False


def _parse(demand: str) -> dict[str, str]:
    """`"triton"` -> `{"*": "triton"}`; `"op=name,op2=name2"` -> `{op: name, op2: name2}`."""
    pairs = [part.split("=", 1) if "=" in part else ("*", part) for part in demand.split(",") if part.strip()]
    return {op.strip(): name.strip() for op, name in pairs}


# a plain module variable, not a ContextVar: `call` must trace under torch.compile(fullgraph=True)
_demanded: dict[str, str] = _parse(os.environ.get("DSPINE_IMPL", ""))


def register_implementation(op: str, name: str, function: Callable, check: Callable[..., str | None]) -> None:
    """Adds an implementation of `op`. Registering the same function again is allowed, another one under a taken name is not."""
    if op not in _implementations:
        raise ValueError(f"unknown operation {op!r}; known: {sorted(_implementations)}")
    known = _implementations[op].get(name)
    if known is not None and known.function is not function:
        raise ValueError(
            f"{op} already has an implementation called {name!r}; registered: {sorted(_implementations[op])}"
        )
    _implementations[op][name] = Implementation(function, check)


def _load_kernels() -> None:
    """Registers the Triton kernels on first use, if the `dspine` package and Triton are installed; keeps the reason if not."""
    global _kernels_loaded, _kernels_reason
    if _kernels_loaded:
        return
    _kernels_loaded = True
    try:
        from dspine.kernels.registry import register_kernels

        _kernels_reason = register_kernels(register_implementation)
    except ImportError as error:
        _kernels_reason = (
            f"the kernels could not be imported ({error}); install them with `pip install dspine[triton]`"
        )


@contextmanager
def use_implementation(name: str | None = None, **by_op: str):
    """Demands an implementation inside the `with` block: for all operations that have it (`name`), or one by one (`by_op`).

    Raises:
        ValueError: an operation or an implementation of that name does not exist.
    """
    global _demanded
    _load_kernels()
    for op, wanted in by_op.items():
        if op not in _implementations:
            raise ValueError(f"unknown operation {op!r}; known: {sorted(_implementations)}")
        if wanted not in _implementations[op]:
            raise ValueError(_absent(op, wanted))
    if name is not None and not any(name in table for table in _implementations.values()):
        raise ValueError(
            f"no operation has an implementation called {name!r}" + (f": {_kernels_reason}" if _kernels_reason else "")
        )
    before, _demanded = _demanded, by_op | ({"*": name} if name else {})
    try:
        yield
    finally:
        _demanded = before


def _absent(op: str, name: str) -> str:
    reason = f"; {_kernels_reason}" if _kernels_reason else ""
    return f"{op} has no implementation called {name!r}; registered: {sorted(_implementations[op])}{reason}"


def call(op: str, *args, **kwargs):
    """Runs operation `op` with the implementation chosen for these arguments (see the module's docstring)."""
    _load_kernels()
    table = _implementations[op]
    if op in _demanded or _demanded.get("*") in table:
        name = _demanded.get(op, _demanded.get("*"))
        if name not in table:
            raise ValueError(_absent(op, name))
        reason = table[name].check(*args, **kwargs)
        if reason is not None:
            raise ValueError(f"{op}: the implementation {name!r} was demanded but cannot run: {reason}")
        if not torch.compiler.is_compiling():  # a graph that reads it would be compiled again once it has changed
            _last_choice[op] = (
                name,
                {other: "another implementation was demanded" for other in table if other != name},
            )
        return table[name].function(*args, **kwargs)
    reasons = {}
    for name in reversed(table):
        reason = table[name].check(*args, **kwargs)
        if reason is None:
            if not torch.compiler.is_compiling():
                _last_choice[op] = (name, reasons)
            return table[name].function(*args, **kwargs)
        reasons[name] = reason
    raise AssertionError("the reference always runs")


def implementation_report() -> dict[str, dict]:
    """For every operation: `active` (the implementation of its last call), `available`, and `not_used` ({name: reason})."""
    _load_kernels()
    report = {}
    for op, table in _implementations.items():
        active, reasons = _last_choice.get(op, (None, {}))
        reasons = dict(reasons)
        if len(table) == 1 and _kernels_reason:
            reasons["triton"] = _kernels_reason
        report[op] = {"active": active, "available": list(table), "not_used": reasons}
    return report
