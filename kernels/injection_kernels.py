"""The Triton kernels of gated adjacent injection; `injection.py` launches them."""

import triton
import triton.language as tl

from .primitives import sigmoid


@triton.jit
def feature_fwd_kernel(
    hidden,  # [N, B, d], rows by stride
    anchor,  # [N, r]
    norm_weight,  # [d]
    feature_weight,  # [r, d]
    values,  # "parts": [splits, M, r] fp32, else [M, r]
    squares,  # "parts": [splits, M] fp32
    stats,  # else [2, M] fp32: rsqrt of the mean squares of h, and of y
    M,
    B,
    d,
    r,
    chunk,
    eps,
    stride_hn,
    stride_hk,
    stride_an,
    MODE: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """`y = P (w * h)` and the sum of squares of `h`, finished as far as one program sees of a row."""
    pid_r, pid_m, pid_s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # nothing may be read before the wait, weights neither: the kernel before may have written them. What this wait has passed is
    # complete, so the next kernel may be let in at once
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_r = pid_r * BLOCK_R + tl.arange(0, BLOCK_R)
    in_m = offs_m < M
    in_r = offs_r < r
    block = offs_m // B
    slot = offs_m % B
    rows = hidden + block.to(tl.int64) * stride_hn + slot.to(tl.int64) * stride_hk

    b_y = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    b_squares = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for start in range(0, chunk, BLOCK_D):
        offs_d = pid_s * chunk + start + tl.arange(0, BLOCK_D)
        in_d = offs_d < d
        b_h = tl.load(rows[:, None] + offs_d[None, :], mask=in_m[:, None] & in_d[None, :], other=0.0).to(tl.float32)
        b_w = tl.load(norm_weight + offs_d, mask=in_d, other=0.0).to(tl.float32) * SCALE
        b_p = tl.load(
            feature_weight + offs_r[:, None] * d + offs_d[None, :], mask=in_r[:, None] & in_d[None, :], other=0.0
        )
        b_squares += tl.sum(b_h * b_h, axis=1)
        b_y = tl.dot((b_h * b_w[None, :]).to(b_p.dtype), tl.trans(b_p), b_y, input_precision="ieee")

    at = offs_m.to(tl.int64)[:, None] * r + offs_r[None, :]
    inside = in_m[:, None] & in_r[None, :]
    if MODE == "parts":
        tl.store(values + pid_s.to(tl.int64) * M * r + at, b_y / SCALE, mask=inside)
        if pid_r == 0:
            tl.store(squares + pid_s * M + offs_m, b_squares, mask=in_m)
    else:
        h_scale = tl.rsqrt(b_squares / d + eps)
        b_y = b_y * (h_scale / SCALE)[:, None]
        if MODE == "normalised":
            y_scale = tl.rsqrt(tl.sum(b_y * b_y, axis=1) / r + eps)
            b_y = b_y * y_scale[:, None]
            tl.store(stats + M + offs_m, y_scale, mask=in_m)
        is_anchor = slot == 0
        z = anchor + block.to(tl.int64)[:, None] * stride_an + offs_r[None, :]
        b_z = tl.load(z, mask=inside & is_anchor[:, None], other=0.0).to(tl.float32)
        b_y = tl.where(is_anchor[:, None], b_z, b_y)
        tl.store(values + at, b_y.to(values.dtype.element_ty), mask=inside)
        if pid_r == 0:
            tl.store(stats + offs_m, h_scale, mask=in_m)


@triton.jit
def normalised_parts(
    values,
    squares,
    anchor,
    rows,
    offs_r,
    wanted,
    M,
    B,
    d,
    r,
    eps,
    stride_an,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Features of the given rows from the partial sums of `feature_fwd_kernel`, added in order, and the rows' two scales."""
    inside = wanted[:, None] & (offs_r < r)[None, :]
    at = rows.to(tl.int64)[:, None] * r + offs_r[None, :]
    b_y = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    b_squares = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for part in tl.static_range(SPLITS):
        b_y += tl.load(values + part * M * r + at, mask=inside, other=0.0)
        b_squares += tl.load(squares + part * M + rows, mask=wanted, other=0.0)
    h_scale = tl.rsqrt(b_squares / d + eps)
    b_y = b_y * h_scale[:, None]
    y_scale = tl.rsqrt(tl.sum(b_y * b_y, axis=1) / r + eps)
    is_anchor = wanted & (rows % B == 0)
    z = anchor + (rows // B).to(tl.int64)[:, None] * stride_an + offs_r[None, :]
    b_z = tl.load(z, mask=inside & is_anchor[:, None], other=0.0).to(tl.float32)
    return tl.where(is_anchor[:, None], b_z, b_y * y_scale[:, None]), h_scale, y_scale


@triton.jit
def injection_whole_fwd_kernel(
    hidden,  # [N, B, d], rows by stride
    anchor,  # [N, r]
    values,  # [splits, M, r] fp32, read if there are parts
    squares,  # [splits, M] fp32, read if there are parts
    gate_weight,  # [d, 2r]
    gate_bias,  # [d]
    write_weight,  # [d, r]
    out,  # [M, d]
    features,  # [M, r], written here if there are parts, else read
    stats,  # [2, M] fp32, written here if there are parts
    M,
    B,
    d,
    r,
    eps,
    stride_hn,
    stride_hk,
    stride_an,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every program holds its share of the weights at once. With SPLITS > 0 it first finishes the features of its rows itself."""
    pid_d, pid_m = tl.program_id(0), tl.program_id(1)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = pid_d * BLOCK_D + tl.arange(0, BLOCK_D)
    offs_r = tl.arange(0, BLOCK_R)
    in_m = offs_m < M
    in_d = offs_d < d
    block = offs_m // B
    slot = offs_m % B
    in_weight = (offs_r < r)[:, None] & in_d[None, :]
    at_gate = gate_weight + offs_d[None, :] * (2 * r) + offs_r[:, None]
    # weights and the residual stream are on their way before the wait: the kernel before let this one in only after all that ran
    # before that one was done, and writes neither. Weights are loaded transposed, since tl.trans would have each one wait for its data before the next is asked for
    b_own = tl.load(at_gate, mask=in_weight, other=0.0)
    b_left = tl.load(at_gate + r, mask=in_weight, other=0.0)
    b_write = tl.load(write_weight + offs_d[None, :] * r + offs_r[:, None], mask=in_weight, other=0.0)
    b_bias = tl.load(gate_bias + offs_d, mask=in_d, other=0.0).to(tl.float32)
    at_h = hidden + block.to(tl.int64)[:, None] * stride_hn + slot.to(tl.int64)[:, None] * stride_hk + offs_d[None, :]
    b_h = tl.load(at_h, mask=in_m[:, None] & in_d[None, :], other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    written = in_m & (slot > 0)
    at_u = offs_m.to(tl.int64)[:, None] * r + offs_r[None, :]
    if SPLITS > 0:
        b_u, h_scale, y_scale = normalised_parts(
            values, squares, anchor, offs_m, offs_r, in_m, M, B, d, r, eps, stride_an, SPLITS, BLOCK_M, BLOCK_R
        )
        b_prev, _, _ = normalised_parts(
            values, squares, anchor, offs_m - 1, offs_r, written, M, B, d, r, eps, stride_an, SPLITS, BLOCK_M, BLOCK_R
        )
        # rounded as the features are, since these are what the gate reads elsewhere
        b_u = b_u.to(features.dtype.element_ty)
        b_prev = b_prev.to(features.dtype.element_ty).to(b_own.dtype)
    else:
        b_u = tl.load(features + at_u, mask=in_m[:, None] & (offs_r < r)[None, :], other=0.0)
        b_prev = tl.load(features + at_u - r, mask=written[:, None] & (offs_r < r)[None, :], other=0.0).to(b_own.dtype)
    b_gate = tl.dot(b_u.to(b_own.dtype), b_own, input_precision="ieee")
    b_gate = tl.dot(b_prev, b_left, b_gate, input_precision="ieee") + b_bias[None, :]
    b_add = sigmoid(b_gate) * tl.dot(b_prev, b_write, input_precision="ieee")
    b_out = tl.where(written[:, None], b_h + b_add, b_h)
    at_out = offs_m.to(tl.int64)[:, None] * d + offs_d[None, :]
    tl.store(out + at_out, b_out.to(out.dtype.element_ty), mask=in_m[:, None] & in_d[None, :])
    if SPLITS > 0:
        if pid_d == 0:
            tl.store(features + at_u, b_u, mask=in_m[:, None] & (offs_r < r)[None, :])
            tl.store(stats + offs_m, h_scale, mask=in_m)
            tl.store(stats + M + offs_m, y_scale, mask=in_m)


@triton.jit
def normalise_fwd_kernel(
    values,  # [splits, M, r] fp32, sums of `P (w * h)`
    squares,  # [splits, M] fp32, unless FROM_ROWS
    hidden,  # [N, B, d], rows by stride, read if FROM_ROWS
    anchor,  # [N, r]
    features,  # [M, r]
    pair,  # [M, 2r], written if PAIR: every row's feature and its left neighbour's, zero in slot 0
    stats,  # [2, M] fp32
    M,
    B,
    d,
    r,
    eps,
    stride_hn,
    stride_hk,
    stride_an,
    SPLITS: tl.constexpr,
    FROM_ROWS: tl.constexpr,
    PAIR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Finishes the features once, where so many programs would read them that each finishing them itself costs more than a launch."""
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_r = tl.arange(0, BLOCK_R)
    in_m = offs_m < M
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    block = offs_m // B
    slot = offs_m % B
    inside = in_m[:, None] & (offs_r < r)[None, :]
    at = offs_m.to(tl.int64)[:, None] * r + offs_r[None, :]
    b_y = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    for part in tl.static_range(SPLITS):
        b_y += tl.load(values + part * M * r + at, mask=inside, other=0.0)
    if FROM_ROWS:
        rows = hidden + block.to(tl.int64) * stride_hn + slot.to(tl.int64) * stride_hk
        b_sums = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        for start in range(0, d, BLOCK_D):
            offs_d = start + tl.arange(0, BLOCK_D)
            in_h = in_m[:, None] & (offs_d < d)[None, :]
            b_h = tl.load(rows[:, None] + offs_d[None, :], mask=in_h, other=0.0).to(tl.float32)
            b_sums += b_h * b_h
        b_squares = tl.sum(b_sums, axis=1)
    else:
        b_squares = tl.zeros((BLOCK_M,), dtype=tl.float32)
        for part in tl.static_range(SPLITS):
            b_squares += tl.load(squares + part * M + offs_m, mask=in_m, other=0.0)
    h_scale = tl.rsqrt(b_squares / d + eps)
    b_y = b_y * h_scale[:, None]
    y_scale = tl.rsqrt(tl.sum(b_y * b_y, axis=1) / r + eps)
    is_anchor = slot == 0
    z = anchor + block.to(tl.int64)[:, None] * stride_an + offs_r[None, :]
    b_z = tl.load(z, mask=inside & is_anchor[:, None], other=0.0).to(tl.float32)
    b_u = tl.where(is_anchor[:, None], b_z, b_y * y_scale[:, None]).to(features.dtype.element_ty)
    tl.store(features + at, b_u, mask=inside)
    tl.store(stats + offs_m, h_scale, mask=in_m)
    tl.store(stats + M + offs_m, y_scale, mask=in_m)
    if PAIR:
        at_pair = pair + offs_m.to(tl.int64)[:, None] * (2 * r) + offs_r[None, :]
        b_u = b_u.to(pair.dtype.element_ty)
        tl.store(at_pair, b_u, mask=inside)
        tl.store(at_pair + 3 * r, b_u, mask=inside & (slot + 1 < B)[:, None])
        tl.store(at_pair + r, tl.zeros_like(b_u), mask=inside & is_anchor[:, None])


@triton.jit
def write_fwd_kernel(
    hidden,  # [N, B, d], rows by stride
    products,  # [2, M, d]: `G [u_k ; u_{k-1}]` and `U u_{k-1}`
    gate_bias,  # [d]
    out,  # [M, d]
    M,
    B,
    d,
    stride_hn,
    stride_hk,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gate, write and residual of finished products."""
    pid_d, pid_m = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = pid_d * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = offs_d < d
    block = (offs_m // B).to(tl.int64)
    slot = offs_m % B
    inside = (offs_m < M)[:, None] & in_d[None, :]
    written = inside & (slot > 0)[:, None]
    at = offs_m.to(tl.int64)[:, None] * d + offs_d[None, :]
    at_h = hidden + block[:, None] * stride_hn + slot.to(tl.int64)[:, None] * stride_hk + offs_d[None, :]
    b_h = tl.load(at_h, mask=inside, other=0.0).to(tl.float32)
    b_gate = tl.load(products + at, mask=written, other=0.0).to(tl.float32)
    b_write = tl.load(products + M.to(tl.int64) * d + at, mask=written, other=0.0).to(tl.float32)
    b_bias = tl.load(gate_bias + offs_d, mask=in_d, other=0.0).to(tl.float32)
    b_out = b_h + sigmoid(b_gate + b_bias[None, :]) * b_write
    tl.store(out + at, b_out.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_and_write(
    values, gate_weight, gate_bias, write_weight, slot, offs_m, in_m, offs_d, in_d, r, eps,
    NORMALISED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`G [u_k ; u_{k-1}] + b` and `U u_{k-1}` for one tile, walking over the transfer space.

    Without NORMALISED the values still lack the norm's scale in the rows of slots k >= 1. It is applied to the products.
    """
    written = in_m & (slot > 0)
    b_own = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    b_write = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    b_left = b_own
    own_squares = tl.zeros((BLOCK_M,), dtype=tl.float32)
    left_squares = own_squares
    at_values = values + offs_m.to(tl.int64)[:, None] * r
    for start in range(0, r, BLOCK_R):
        offs_r = start + tl.arange(0, BLOCK_R)
        in_r = offs_r < r
        in_weight = in_d[:, None] & in_r[None, :]
        at_gate = gate_weight + offs_d[:, None] * (2 * r) + offs_r[None, :]
        w_own = tl.load(at_gate, mask=in_weight, other=0.0)
        w_left = tl.load(at_gate + r, mask=in_weight, other=0.0)
        w_write = tl.load(write_weight + offs_d[:, None] * r + offs_r[None, :], mask=in_weight, other=0.0)
        b_u = tl.load(at_values + offs_r[None, :], mask=in_m[:, None] & in_r[None, :], other=0.0)
        b_prev = tl.load(at_values + (offs_r[None, :] - r), mask=written[:, None] & in_r[None, :], other=0.0)
        if not NORMALISED:
            own_squares += tl.sum(b_u.to(tl.float32) * b_u.to(tl.float32), axis=1)
            left_squares += tl.sum(b_prev.to(tl.float32) * b_prev.to(tl.float32), axis=1)
        b_u = b_u.to(w_own.dtype)
        b_prev = b_prev.to(w_own.dtype)
        b_own = tl.dot(b_u, tl.trans(w_own), b_own, input_precision="ieee")
        if NORMALISED:
            b_own = tl.dot(b_prev, tl.trans(w_left), b_own, input_precision="ieee")
        else:
            b_left = tl.dot(b_prev, tl.trans(w_left), b_left, input_precision="ieee")
        b_write = tl.dot(b_prev, tl.trans(w_write), b_write, input_precision="ieee")
    own_scale = own_squares
    if not NORMALISED:
        own_scale = tl.rsqrt(own_squares / r + eps)
        # the left neighbour of slot 1 is the anchor, whose feature needs no norm
        left_scale = tl.where(slot == 1, 1.0, tl.rsqrt(left_squares / r + eps))
        b_own = b_own * own_scale[:, None] + b_left * left_scale[:, None]
        b_write = b_write * left_scale[:, None]
    b_bias = tl.load(gate_bias + offs_d, mask=in_d, other=0.0).to(tl.float32)
    return b_own + b_bias[None, :], b_write, own_scale


@triton.jit
def injection_fwd_kernel(
    hidden,  # [N, B, d], rows by stride
    values,  # [M, r]: the features if NORMALISED, else those before the second norm
    gate_weight,  # [d, 2r]
    gate_bias,  # [d]
    write_weight,  # [d, r]
    out,  # [M, d]
    features,  # [M, r], written here unless NORMALISED
    stats,  # [2, M] fp32
    M,
    B,
    d,
    r,
    eps,
    stride_hn,
    stride_hk,
    NORMALISED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Many slots: gate and write as a product that walks over the transfer space, with the residual added in its epilogue."""
    pid_d, pid_m = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = pid_d * BLOCK_D + tl.arange(0, BLOCK_D)
    in_m = offs_m < M
    in_d = offs_d < d
    block = offs_m // B
    slot = offs_m % B
    b_gate, b_write, own_scale = gate_and_write(
        values,
        gate_weight,
        gate_bias,
        write_weight,
        slot,
        offs_m,
        in_m,
        offs_d,
        in_d,
        r,
        eps,
        NORMALISED,
        BLOCK_M,
        BLOCK_R,
        BLOCK_D,
    )
    inside = in_m[:, None] & in_d[None, :]
    at_h = hidden + block.to(tl.int64)[:, None] * stride_hn + slot.to(tl.int64)[:, None] * stride_hk + offs_d[None, :]
    b_h = tl.load(at_h, mask=inside, other=0.0).to(tl.float32)
    b_out = tl.where((slot > 0)[:, None], b_h + sigmoid(b_gate) * b_write, b_h)
    tl.store(out + offs_m.to(tl.int64)[:, None] * d + offs_d[None, :], b_out.to(out.dtype.element_ty), mask=inside)
    if not NORMALISED:
        if pid_d == 0:
            scale = tl.where(slot == 0, 1.0, own_scale)
            for start in range(0, r, BLOCK_R):
                offs_r = start + tl.arange(0, BLOCK_R)
                at_u = offs_m.to(tl.int64)[:, None] * r + offs_r[None, :]
                in_u = in_m[:, None] & (offs_r < r)[None, :]
                b_u = tl.load(values + at_u, mask=in_u, other=0.0).to(tl.float32) * scale[:, None]
                tl.store(features + at_u, b_u.to(features.dtype.element_ty), mask=in_u)
            tl.store(stats + M + offs_m, own_scale, mask=in_m)


@triton.jit
def injection_bwd_gate_kernel(
    grad_out,  # [M, d]
    features,  # [M, r]
    gate_weight,  # [d, 2r]
    gate_bias,  # [d]
    write_weight,  # [d, r]
    grad_products,  # [M, 2d]: gradients of the gate's and of the write's product
    grad_bias,  # [m tiles, d] fp32, summed by the caller
    M,
    B,
    d,
    r,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Recomputes gate and write of a tile and turns the gradient of the residual stream into those of the two products."""
    pid_d, pid_m = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = pid_d * BLOCK_D + tl.arange(0, BLOCK_D)
    in_m = offs_m < M
    in_d = offs_d < d
    slot = offs_m % B
    b_gate, b_write, _ = gate_and_write(
        features,
        gate_weight,
        gate_bias,
        write_weight,
        slot,
        offs_m,
        in_m,
        offs_d,
        in_d,
        r,
        0.0,
        True,
        BLOCK_M,
        BLOCK_R,
        BLOCK_D,
    )
    b_gate = sigmoid(b_gate)
    inside = in_m[:, None] & in_d[None, :]
    # slot 0 is not written to, so both its gradients are zero; the products over slots rely on that at the borders of blocks
    written = inside & (slot > 0)[:, None]
    b_g = tl.load(grad_out + offs_m.to(tl.int64)[:, None] * d + offs_d[None, :], mask=written, other=0.0).to(
        tl.float32
    )
    b_dwrite = b_g * b_gate
    b_dgate = b_dwrite * b_write * (1.0 - b_gate)
    at = grad_products + offs_m.to(tl.int64)[:, None] * (2 * d) + offs_d[None, :]
    tl.store(at, b_dgate.to(grad_products.dtype.element_ty), mask=inside)
    tl.store(at + d, b_dwrite.to(grad_products.dtype.element_ty), mask=inside)
    tl.store(grad_bias + pid_m * d + offs_d, tl.sum(b_dgate, axis=0), mask=in_d)


@triton.jit
def products_bwd_kernel(
    grad_out,  # [M, d]
    products,  # [2, M, d]
    gate_bias,  # [d]
    grad_products,  # [2, M, d]
    grad_bias,  # [m tiles, d] fp32, summed by the caller
    M,
    B,
    d,
    STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """The gradients of the two saved products."""
    pid_d, pid_m = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
    offs_d = pid_d * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = offs_d < d
    b_bias = tl.load(gate_bias + offs_d, mask=in_d, other=0.0).to(tl.float32)
    second = M.to(tl.int64) * d
    b_sums = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for step in range(STEPS):
        offs_m = (pid_m * STEPS + step) * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = (offs_m < M)[:, None] & in_d[None, :]
        # slot 0 is not written to: both its gradients are zero
        written = inside & (offs_m % B > 0)[:, None]
        at = offs_m.to(tl.int64)[:, None] * d + offs_d[None, :]
        b_g = tl.load(grad_out + at, mask=written, other=0.0).to(tl.float32)
        b_gate = tl.load(products + at, mask=written, other=0.0).to(tl.float32)
        b_write = tl.load(products + second + at, mask=written, other=0.0).to(tl.float32)
        b_gate = sigmoid(b_gate + b_bias[None, :])
        b_dwrite = b_g * b_gate
        b_dgate = b_dwrite * b_write * (1.0 - b_gate)
        tl.store(grad_products + at, b_dgate.to(grad_products.dtype.element_ty), mask=inside)
        tl.store(grad_products + second + at, b_dwrite.to(grad_products.dtype.element_ty), mask=inside)
        b_sums += b_dgate
    tl.store(grad_bias + pid_m * d + offs_d, tl.sum(b_sums, axis=0), mask=in_d)


@triton.jit
def injection_bwd_feature_kernel(
    grad_own,  # [M, r], rows by stride, gradient of u_k through the gate
    grad_left,  # [M, r], rows by the same stride, gradient of u_{k-1}, in row k
    grad_written,  # [M, r] or None, what is not yet in grad_left
    grad_features,  # [M, r], gradient of the returned features
    features,  # [M, r], rows by stride
    stats,  # [2, M] fp32
    grad_anchor,  # [N, r]
    grad_y,  # [M, r]
    grad_y_scaled,  # [M, r], the same times the scale of the first norm
    radial,  # [M] fp32, how much of h its own gradient loses
    M,
    B,
    d,
    r,
    eps,
    stride_g,
    stride_u,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gradients that reach a feature from its own gate, its successor and outside, and their way back through the second norm."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_r = tl.arange(0, BLOCK_R)
    in_m = offs_m < M
    slot = offs_m % B
    inside = in_m[:, None] & (offs_r < r)[None, :]
    at = offs_m.to(tl.int64)[:, None] * r + offs_r[None, :]
    has_successor = inside & (slot + 1 < B)[:, None]
    b_du = tl.load(grad_features + at, mask=inside, other=0.0).to(tl.float32)
    at_g = offs_m.to(tl.int64)[:, None] * stride_g + offs_r[None, :]
    b_du += tl.load(grad_own + at_g, mask=inside & (slot > 0)[:, None], other=0.0).to(tl.float32)
    b_du += tl.load(grad_left + at_g + stride_g, mask=has_successor, other=0.0).to(tl.float32)
    if grad_written is not None:
        b_du += tl.load(grad_written + at + r, mask=has_successor, other=0.0).to(tl.float32)
    is_anchor = (slot == 0)[:, None]
    at_anchor = (offs_m // B).to(tl.int64)[:, None] * r + offs_r[None, :]
    tl.store(grad_anchor + at_anchor, b_du.to(grad_anchor.dtype.element_ty), mask=inside & is_anchor)

    at_u = offs_m.to(tl.int64)[:, None] * stride_u + offs_r[None, :]
    b_u = tl.load(features + at_u, mask=inside, other=0.0).to(tl.float32)
    h_scale = tl.load(stats + offs_m, mask=in_m, other=0.0)
    y_scale = tl.load(stats + M + offs_m, mask=in_m, other=0.0)
    along = tl.sum(b_du * b_u, axis=1)
    b_dy = tl.where(is_anchor, 0.0, y_scale[:, None] * (b_du - b_u * (along / r)[:, None]))
    tl.store(grad_y + at, b_dy.to(grad_y.dtype.element_ty), mask=inside)
    tl.store(grad_y_scaled + at, (b_dy * h_scale[:, None]).to(grad_y_scaled.dtype.element_ty), mask=inside)
    # the second norm ignores the length of y but for eps, so <dy, y> = <du, u> eps y_scale^2; summing dy * y would be all rounding
    b_radial = along * eps * y_scale * y_scale * h_scale * h_scale / d
    tl.store(radial + offs_m, tl.where(slot == 0, 0.0, b_radial), mask=in_m)


@triton.jit
def injection_bwd_hidden_kernel(
    hidden,  # [N, B, d], rows by stride
    norm_weight,  # [d]
    feature_weight,  # [r, d]
    grad_out,  # [M, d]
    grad_y,  # [M, r]
    stats,  # [2, M] fp32
    radial,  # [M] fp32
    grad_hidden,  # [M, d]
    M,
    B,
    d,
    r,
    stride_hn,
    stride_hk,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """`dh = g + h_scale * w * (P^T dy) - radial * h`: the product with `P` and the first norm's backward in one epilogue."""
    pid_d, pid_m = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = pid_d * BLOCK_D + tl.arange(0, BLOCK_D)
    in_m = offs_m < M
    in_d = offs_d < d
    block = (offs_m // B).to(tl.int64)
    slot = (offs_m % B).to(tl.int64)
    inside = in_m[:, None] & in_d[None, :]
    at = offs_m.to(tl.int64)[:, None] * d + offs_d[None, :]
    # asked for before the product, which hides how long they take
    b_h = tl.load(
        hidden + block[:, None] * stride_hn + slot[:, None] * stride_hk + offs_d[None, :], mask=inside, other=0.0
    )
    b_g = tl.load(grad_out + at, mask=inside, other=0.0)
    b_dx = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for start in range(0, r, BLOCK_R):
        offs_r = start + tl.arange(0, BLOCK_R)
        in_r = offs_r < r
        at_y = grad_y + offs_m.to(tl.int64)[:, None] * r + offs_r[None, :]
        b_dy = tl.load(at_y, mask=in_m[:, None] & in_r[None, :], other=0.0)
        b_p = tl.load(
            feature_weight + offs_r[:, None] * d + offs_d[None, :], mask=in_r[:, None] & in_d[None, :], other=0.0
        )
        b_dx = tl.dot(b_dy, b_p, b_dx, input_precision="ieee")
    b_g = b_g.to(tl.float32)
    b_w = tl.load(norm_weight + offs_d, mask=in_d, other=0.0).to(tl.float32)
    h_scale = tl.load(stats + offs_m, mask=in_m, other=0.0)
    b_radial = tl.load(radial + offs_m, mask=in_m, other=0.0)
    b_dh = b_g + h_scale[:, None] * b_w[None, :] * b_dx - b_radial[:, None] * b_h.to(tl.float32)
    tl.store(grad_hidden + at, b_dh.to(grad_hidden.dtype.element_ty), mask=inside)


@triton.jit
def residual_bwd_kernel(
    hidden,  # [N, B, d], rows by stride
    norm_weight,  # [d]
    grad_out,  # [M, d]
    grad_scaled,  # [M, d], `P^T dy`
    stats,  # [2, M] fp32
    radial,  # [M] fp32
    grad_hidden,  # [M, d]
    M,
    B,
    d,
    stride_hn,
    stride_hk,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """What `injection_bwd_hidden_kernel` does after its product."""
    pid_d, pid_m = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = pid_d * BLOCK_D + tl.arange(0, BLOCK_D)
    in_m = offs_m < M
    in_d = offs_d < d
    block = (offs_m // B).to(tl.int64)
    slot = (offs_m % B).to(tl.int64)
    inside = in_m[:, None] & in_d[None, :]
    at = offs_m.to(tl.int64)[:, None] * d + offs_d[None, :]
    at_h = hidden + block[:, None] * stride_hn + slot[:, None] * stride_hk + offs_d[None, :]
    b_h = tl.load(at_h, mask=inside, other=0.0).to(tl.float32)
    b_g = tl.load(grad_out + at, mask=inside, other=0.0).to(tl.float32)
    b_dx = tl.load(grad_scaled + at, mask=inside, other=0.0).to(tl.float32)
    b_w = tl.load(norm_weight + offs_d, mask=in_d, other=0.0).to(tl.float32)
    h_scale = tl.load(stats + offs_m, mask=in_m, other=0.0)
    b_radial = tl.load(radial + offs_m, mask=in_m, other=0.0)
    b_dh = b_g + h_scale[:, None] * b_w[None, :] * b_dx - b_radial[:, None] * b_h
    tl.store(grad_hidden + at, b_dh.to(grad_hidden.dtype.element_ty), mask=inside)
