"""Device functions that several kernels share."""

import triton
import triton.language as tl


# the interpreter knows no PTX
_PTX = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def sigmoid(x):
    """Of fp32 values, in four instructions where `tl.sigmoid` takes seventeen: it also treats denormal numbers, and divides in full.

    In kernels that multiply matrices the gate's instructions run while the matrix units wait, so their number shows.
    """
    if _PTX:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .f32 t;
            mul.ftz.f32 t, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 t, t;
            add.ftz.f32 t, t, 0f3F800000;
            rcp.approx.ftz.f32 $0, t;
            }
            """,
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.sigmoid(x)


@triton.jit
def prefetch(at):
    """Asks the second-level cache for the 128 bytes around every address. Addresses must be valid; nothing waits for the data."""
    if _PTX:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // $0", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )
