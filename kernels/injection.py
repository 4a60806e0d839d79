"""Gated adjacent injection in Triton, forward and backward.

Both norms are scales of whole rows, so they commute with the products that follow: the first kernel multiplies the raw residual
stream by `P`, sums its squares on the way, and scales the result; the second normalises the features, gates and writes. The
forward therefore needs two launches and reads the residual stream twice. What differs between shapes is where the two norms are
finished, see `forward_config`.

The backward recomputes the gate (keeping it would cost two tensors of the size of the residual stream per layer), leaves the
products that only sum over slots or channels to cuBLAS, and fuses the rest around them. Every sum has a fixed order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .launch import cdiv, compute_dtype, is_plain, launch_options, next_power_of_2, on_device, operand_scale


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
def injection_parts_fwd_kernel(
    hidden,  # [N, B, d], rows by stride
    anchor,  # [N, r]
    values,  # [splits, M, r] fp32
    squares,  # [splits, M] fp32
    gate_weight,  # [d, 2r]
    gate_bias,  # [d]
    write_weight,  # [d, r]
    out,  # [M, d]
    features,  # [M, r]
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
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Few slots: every program finishes the features of its rows itself and holds its share of the weights at once."""
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
    # weights are on their way before the wait: `feature_fwd_kernel` let this kernel in only after all that ran before it was done.
    # They are loaded transposed, since tl.trans would have each one wait for its data before the next is asked for
    b_own = tl.load(at_gate, mask=in_weight, other=0.0)
    b_left = tl.load(at_gate + r, mask=in_weight, other=0.0)
    b_write = tl.load(write_weight + offs_d[None, :] * r + offs_r[:, None], mask=in_weight, other=0.0)
    b_bias = tl.load(gate_bias + offs_d, mask=in_d, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at_h = hidden + block.to(tl.int64)[:, None] * stride_hn + slot.to(tl.int64)[:, None] * stride_hk + offs_d[None, :]
    b_h = tl.load(at_h, mask=in_m[:, None] & in_d[None, :], other=0.0).to(tl.float32)

    written = in_m & (slot > 0)
    b_u, h_scale, y_scale = normalised_parts(
        values, squares, anchor, offs_m, offs_r, in_m, M, B, d, r, eps, stride_an, SPLITS, BLOCK_M, BLOCK_R
    )
    b_prev, _, _ = normalised_parts(
        values, squares, anchor, offs_m - 1, offs_r, written, M, B, d, r, eps, stride_an, SPLITS, BLOCK_M, BLOCK_R
    )
    # rounded as the features are, since these are what the gate reads elsewhere
    b_u = b_u.to(features.dtype.element_ty)
    b_prev = b_prev.to(features.dtype.element_ty).to(b_own.dtype)
    b_gate = tl.dot(b_u.to(b_own.dtype), b_own, input_precision="ieee")
    b_gate = tl.dot(b_prev, b_left, b_gate, input_precision="ieee") + b_bias[None, :]
    b_add = tl.sigmoid(b_gate) * tl.dot(b_prev, b_write, input_precision="ieee")
    b_out = tl.where(written[:, None], b_h + b_add, b_h)
    at_out = offs_m.to(tl.int64)[:, None] * d + offs_d[None, :]
    tl.store(out + at_out, b_out.to(out.dtype.element_ty), mask=in_m[:, None] & in_d[None, :])
    if pid_d == 0:
        at_u = offs_m.to(tl.int64)[:, None] * r + offs_r[None, :]
        tl.store(features + at_u, b_u, mask=in_m[:, None] & (offs_r < r)[None, :])
        tl.store(stats + offs_m, h_scale, mask=in_m)
        tl.store(stats + M + offs_m, y_scale, mask=in_m)


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
    b_out = tl.where((slot > 0)[:, None], b_h + tl.sigmoid(b_gate) * b_write, b_h)
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
    b_gate = tl.sigmoid(b_gate)
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
def injection_bwd_feature_kernel(
    grad_own,  # [M, r], gradient of u_k through the gate
    grad_left,  # [M, r], gradient of u_{k-1}, in row k
    grad_features,  # [M, r], gradient of the returned features
    features,  # [M, r]
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
    b_du += tl.load(grad_own + at, mask=inside & (slot > 0)[:, None], other=0.0).to(tl.float32)
    b_du += tl.load(grad_left + at + r, mask=has_successor, other=0.0).to(tl.float32)
    is_anchor = (slot == 0)[:, None]
    at_anchor = (offs_m // B).to(tl.int64)[:, None] * r + offs_r[None, :]
    tl.store(grad_anchor + at_anchor, b_du.to(grad_anchor.dtype.element_ty), mask=inside & is_anchor)

    b_u = tl.load(features + at, mask=inside, other=0.0).to(tl.float32)
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
    block = (offs_m // B).to(tl.int64)
    slot = (offs_m % B).to(tl.int64)
    inside = in_m[:, None] & in_d[None, :]
    at = offs_m.to(tl.int64)[:, None] * d + offs_d[None, :]
    b_h = tl.load(
        hidden + block[:, None] * stride_hn + slot[:, None] * stride_hk + offs_d[None, :], mask=inside, other=0.0
    )
    b_g = tl.load(grad_out + at, mask=inside, other=0.0).to(tl.float32)
    b_w = tl.load(norm_weight + offs_d, mask=in_d, other=0.0).to(tl.float32)
    h_scale = tl.load(stats + offs_m, mask=in_m, other=0.0)
    b_radial = tl.load(radial + offs_m, mask=in_m, other=0.0)
    b_dh = b_g + h_scale[:, None] * b_w[None, :] * b_dx - b_radial[:, None] * b_h.to(tl.float32)
    tl.store(grad_hidden + at, b_dh.to(grad_hidden.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Tile:
    """One program's share of a kernel's work (in "parts" all of the transfer space is one step), and its warps and stages."""

    slots: int
    rank: int
    channels: int
    num_warps: int
    num_stages: int

    def blocks(self) -> dict[str, int]:
        return {"BLOCK_M": self.slots, "BLOCK_R": self.rank, "BLOCK_D": self.channels}


@dataclass(frozen=True)
class ForwardConfig:
    """How far `feature_fwd_kernel` finishes the features, and the tiles of both kernels.

    - `"parts"` (few slots): channels are split among programs so that the whole chip streams the weights; the second kernel adds
      the parts and normalises.
    - `"scaled"`: a program sees whole rows of `h` but not of `y`; the second kernel applies the second norm to its products.
    - `"normalised"` (training): a program sees whole rows of both.
    """

    mode: str
    splits: int
    feature: Tile
    gate: Tile


@dataclass(frozen=True)
class BackwardConfig:
    """The tiles of the two backward kernels that multiply."""

    gate: Tile
    hidden: Tile


def forward_config(slots: int, rank: int, itemsize: int) -> ForwardConfig:
    """The tiles for a shape class: number of slots, whether the rank is at most 256, and 16 or 32 bits.

    Meant for d = 4096 and r = 256 in 16 bits on a Hopper GPU; the rest is chosen to fit shared memory and registers.
    """
    whole = max(next_power_of_2(rank), 16)
    wide = whole > 256
    if itemsize == 4:
        if slots <= 64:
            return ForwardConfig("parts", 4, Tile(16, 16, 64, 4, 2), Tile(16, whole, 16, 4, 1))
        return ForwardConfig("scaled", 1, Tile(32, 32, 32, 4, 2), Tile(32, 32, 32, 4, 2))
    if slots <= 64:
        if wide:
            return ForwardConfig("scaled", 1, Tile(16, 16, 256, 4, 4), Tile(16, 64, 32, 4, 4))
        return ForwardConfig("parts", 4, Tile(16, 16, 256, 4, 4), Tile(16, whole, 32, 8, 1))
    if slots <= 512 and not wide:
        return ForwardConfig("parts", 4, Tile(32, 32, 128, 4, 4), Tile(32, whole, 64, 8, 1))
    if slots <= 4096 or wide:
        return ForwardConfig("scaled", 1, Tile(64, 64, 64, 4, 4), Tile(128, 32, 64, 8, 3))
    return ForwardConfig("normalised", 1, Tile(128, whole, 32, 8, 4), Tile(128, 32, 128, 8, 3))


def backward_config(slots: int, rank: int, itemsize: int) -> BackwardConfig:
    """The tiles for a shape class, see `forward_config`."""
    if itemsize == 4:
        return BackwardConfig(Tile(32, 32, 32, 4, 2), Tile(32, 32, 32, 4, 2))
    if slots <= 512:
        return BackwardConfig(Tile(32, 32, 64, 4, 2), Tile(32, 32, 64, 4, 2))
    return BackwardConfig(Tile(128, 32, 128, 8, 3), Tile(128, 64, 128, 8, 3))


def injection_fwd(
    hidden_states: torch.Tensor,  # [N, B, d]
    anchor_features: torch.Tensor,  # [N, r]
    norm_weight: torch.Tensor,  # [d]
    feature_weight: torch.Tensor,  # [r, d]
    gate_weight: torch.Tensor,  # [d, 2r]
    gate_bias: torch.Tensor,  # [d]
    write_weight: torch.Tensor,  # [d, r]
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launches the forward. Returns the new residual stream, the features, and for the backward both norms' scales `[2, N B]` (fp32)."""
    N, B, d = hidden_states.shape
    M, r = N * B, feature_weight.shape[0]
    dot_dtype = feature_weight.dtype
    config = forward_config(M, r, dot_dtype.itemsize)
    device = hidden_states.device
    out = torch.empty((N, B, d), dtype=hidden_states.dtype, device=device)
    features = torch.empty((N, B, r), dtype=hidden_states.dtype, device=device)
    stats = torch.empty((2, M), dtype=torch.float32, device=device)

    tile, splits = config.feature, min(config.splits, cdiv(d, config.feature.channels))
    chunk = cdiv(cdiv(d, splits), tile.channels) * tile.channels
    splits = cdiv(d, chunk)
    squares = stats
    if config.mode == "parts":
        values = torch.empty((splits, M, r), dtype=torch.float32, device=device)
        squares = torch.empty((splits, M), dtype=torch.float32, device=device)
    elif config.mode == "scaled":
        values = torch.empty((M, r), dtype=dot_dtype, device=device)
    else:
        values = features
    strides = (hidden_states.stride(0), hidden_states.stride(1))
    with on_device(hidden_states):
        feature_fwd_kernel[(cdiv(r, tile.rank), cdiv(M, tile.slots), splits)](
            hidden_states, anchor_features, norm_weight, feature_weight, values, squares, stats,
            M, B, d, r, chunk, eps, *strides, anchor_features.stride(0),
            MODE=config.mode, SCALE=operand_scale(dot_dtype), **tile.blocks(),
            **launch_options(hidden_states, tile.num_warps, tile.num_stages),
        )  # fmt: skip
        tile = config.gate
        grid = (cdiv(d, tile.channels), cdiv(M, tile.slots))
        options = tile.blocks() | launch_options(hidden_states, tile.num_warps, tile.num_stages)
        if config.mode == "parts":
            injection_parts_fwd_kernel[grid](
                hidden_states, anchor_features, values, squares, gate_weight, gate_bias, write_weight, out, features, stats,
                M, B, d, r, eps, *strides, anchor_features.stride(0), SPLITS=splits, **options,
            )  # fmt: skip
        else:
            injection_fwd_kernel[grid](
                hidden_states, values, gate_weight, gate_bias, write_weight, out, features, stats,
                M, B, d, r, eps, *strides, NORMALISED=config.mode == "normalised", **options,
            )  # fmt: skip
    return out, features, stats


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b` in fp32 from operands in 16 bits, so that a sum over all slots is rounded once, at its very end."""
    if a.dtype == torch.float32:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def injection_bwd(
    grad_out: torch.Tensor,  # [N, B, d]
    grad_features: torch.Tensor,  # [N, B, r]
    hidden_states: torch.Tensor,
    features: torch.Tensor,
    stats: torch.Tensor,
    anchor_dtype: torch.dtype,
    norm_weight: torch.Tensor,
    feature_weight: torch.Tensor,
    gate_weight: torch.Tensor,
    gate_bias: torch.Tensor,
    write_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """Launches the backward. Returns the gradients of the forward's first seven arguments, in its order and dtypes."""
    N, B, d = hidden_states.shape
    M, r = N * B, feature_weight.shape[0]
    dot_dtype = feature_weight.dtype
    config = backward_config(M, r, dot_dtype.itemsize)
    device = hidden_states.device
    grad_out = grad_out.contiguous().view(M, d)
    grad_features = grad_features.contiguous()
    flat = features.view(M, r).to(dot_dtype)

    grad_products = torch.empty((M, 2 * d), dtype=dot_dtype, device=device)
    tile = config.gate
    grad_bias = torch.empty((cdiv(M, tile.slots), d), dtype=torch.float32, device=device)
    with on_device(hidden_states):
        injection_bwd_gate_kernel[(cdiv(d, tile.channels), cdiv(M, tile.slots))](
            grad_out, flat, gate_weight, gate_bias, write_weight, grad_products, grad_bias, M, B, d, r,
            **tile.blocks(), **launch_options(hidden_states, tile.num_warps, tile.num_stages),
        )  # fmt: skip
    grad_bias = grad_bias.sum(0).to(gate_bias.dtype)

    # rows of slot 0 are zero in grad_products, so pairing every row with the one before it does not cross the border of a block
    own, left = gate_weight.chunk(2, dim=-1)
    grad_own = grad_products[:, :d] @ own
    grad_left = grad_products @ torch.cat([left, write_weight])
    grad_from_left = _product(grad_products[1:].t(), flat[:-1])
    grad_gate_weight = torch.cat([_product(grad_products[:, :d].t(), flat), grad_from_left[:d]], dim=1).to(
        gate_weight.dtype
    )
    grad_write_weight = grad_from_left[d:].to(write_weight.dtype)
    del grad_products

    grad_anchor = torch.empty((N, r), dtype=anchor_dtype, device=device)
    grad_y, grad_y_scaled = torch.empty((2, M, r), dtype=dot_dtype, device=device)
    radial = torch.empty((M,), dtype=torch.float32, device=device)
    with on_device(hidden_states):
        injection_bwd_feature_kernel[(cdiv(M, 8),)](
            grad_own, grad_left, grad_features, features, stats, grad_anchor, grad_y, grad_y_scaled, radial, M, B, d, r, eps,
            BLOCK_M=8, BLOCK_R=max(next_power_of_2(r), 16), **launch_options(hidden_states, 4),
        )  # fmt: skip
    # the norm weight scales columns of h before P, so one product over the slots gives the gradients of both
    grad_scaled = _product(grad_y_scaled.t(), hidden_states.reshape(M, d).to(dot_dtype))
    grad_feature_weight = (grad_scaled * norm_weight.float()).to(feature_weight.dtype)
    grad_norm_weight = (grad_scaled * feature_weight.float()).sum(0).to(norm_weight.dtype)

    grad_hidden = torch.empty((N, B, d), dtype=hidden_states.dtype, device=device)
    tile = config.hidden
    with on_device(hidden_states):
        injection_bwd_hidden_kernel[(cdiv(d, tile.channels), cdiv(M, tile.slots))](
            hidden_states, norm_weight, feature_weight, grad_out, grad_y, stats, radial, grad_hidden,
            M, B, d, r, hidden_states.stride(0), hidden_states.stride(1),
            **tile.blocks(), **launch_options(hidden_states, tile.num_warps, tile.num_stages),
        )  # fmt: skip
    return (
        grad_hidden,
        grad_anchor,
        grad_norm_weight,
        grad_feature_weight,
        grad_gate_weight,
        grad_bias,
        grad_write_weight,
    )


@torch.library.custom_op("dspine::gated_adjacent_injection", mutates_args=())
def _injection(
    hidden_states: torch.Tensor,
    anchor_features: torch.Tensor,
    norm_weight: torch.Tensor,
    feature_weight: torch.Tensor,
    gate_weight: torch.Tensor,
    gate_bias: torch.Tensor,
    write_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return injection_fwd(
        hidden_states, anchor_features, norm_weight, feature_weight, gate_weight, gate_bias, write_weight, eps
    )


@_injection.register_fake
def _(hidden_states, anchor_features, norm_weight, feature_weight, gate_weight, gate_bias, write_weight, eps):
    N, B, d = hidden_states.shape
    out = hidden_states.new_empty((N, B, d))
    return (
        out,
        hidden_states.new_empty((N, B, feature_weight.shape[0])),
        hidden_states.new_empty((2, N * B), dtype=torch.float32),
    )


@torch.library.custom_op("dspine::gated_adjacent_injection_backward", mutates_args=())
def _injection_backward(
    grad_out: torch.Tensor,
    grad_features: torch.Tensor,
    hidden_states: torch.Tensor,
    features: torch.Tensor,
    stats: torch.Tensor,
    anchor_dtype: torch.dtype,
    norm_weight: torch.Tensor,
    feature_weight: torch.Tensor,
    gate_weight: torch.Tensor,
    gate_bias: torch.Tensor,
    write_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return injection_bwd(
        grad_out, grad_features, hidden_states, features, stats, anchor_dtype,
        norm_weight, feature_weight, gate_weight, gate_bias, write_weight, eps,
    )  # fmt: skip


@_injection_backward.register_fake
def _(grad_out, grad_features, hidden_states, features, stats, anchor_dtype, *weights_and_eps):
    N, B, d = hidden_states.shape
    grad_anchor = hidden_states.new_empty((N, features.shape[-1]), dtype=anchor_dtype)
    weights = [weight.new_empty(weight.shape) for weight in weights_and_eps[:-1]]
    return (hidden_states.new_empty((N, B, d)), grad_anchor, *weights)


def _setup_context(ctx, inputs, output):
    hidden_states, anchor_features, *weights, ctx.eps = inputs
    _, features, stats = output
    ctx.anchor_dtype = anchor_features.dtype
    ctx.save_for_backward(hidden_states, features, stats, *weights)


def _backward(ctx, grad_out, grad_features, grad_stats):
    hidden_states, features, stats, *weights = ctx.saved_tensors
    if grad_out is None:
        grad_out = hidden_states.new_zeros(hidden_states.shape)
    if grad_features is None:
        grad_features = features.new_zeros(features.shape)
    grads = _injection_backward(
        grad_out, grad_features, hidden_states, features, stats, ctx.anchor_dtype, *weights, ctx.eps
    )
    return (*grads, None)


_injection.register_autograd(_backward, setup_context=_setup_context)


def gated_adjacent_injection(
    hidden_states: torch.Tensor,  # [N, B, d]
    anchor_features: torch.Tensor,  # [N, r], z(anchor)
    norm_weight: torch.Tensor,  # [d]
    feature_weight: torch.Tensor,  # [r, d]
    gate_weight: torch.Tensor,  # [d, 2r]
    gate_bias: torch.Tensor,  # [d]
    write_weight: torch.Tensor,  # [d, r]
    eps: float,
    gate: str = "channel",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gated adjacent injection after one layer, see the reference of the same name.

    Rows of `hidden_states` may have any stride; its last dimension must be contiguous. Products run in autocast's dtype where it
    is on, with fp32 sums everywhere; gradients come back in the dtype of each argument.

    Returns the new residual stream `[N, B, d]` and the features `[N, B, r]`, both in the dtype of `hidden_states`.

    Raises:
        ValueError: `gate` is not "channel".
    """
    if gate != "channel":
        raise ValueError(f"only the gate form 'channel' has a kernel, got {gate!r}")
    dtype = compute_dtype(hidden_states)
    arguments = (
        hidden_states,
        anchor_features,
        norm_weight.contiguous(),
        feature_weight.to(dtype).contiguous(),
        gate_weight.to(dtype).contiguous(),
        gate_bias.contiguous(),
        write_weight.to(dtype).contiguous(),
    )
    if is_plain(*arguments):
        return injection_fwd(*arguments, eps)[:2]
    return _injection(*arguments, eps)[:2]
