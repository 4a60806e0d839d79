"""The Triton kernels of gated adjacent injection; `injection.py` launches them."""

import triton
import triton.language as tl

from .primitives import prefetch, sigmoid


@triton.jit
def feature_fwd_kernel(
    hidden,  # [N, B, d], rows by stride
    norm_weight,  # [d]
    feature_weight,  # [r, d]
    values,  # [splits, M, r] fp32
    squares,  # [splits, M] fp32
    M,
    B,
    d,
    r,
    chunk,
    stride_hn,
    stride_hk,
    SCALE: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """`y = P (w * h)` and the sum of squares of `h`, for one chunk of the channels.

    With SLICES > 1 as many products run side by side, each over its own channels, and are added at the end: where a tile has so few
    rows and columns that its warps could only repeat one another's work, they share the channels instead.
    """
    pid_r, pid_m, pid_s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    STEP: tl.constexpr = SLICES * BLOCK_D
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_r = pid_r * BLOCK_R + tl.arange(0, BLOCK_R)
    in_m = offs_m < M
    in_r = offs_r < r
    if PDL:
        # no load before the wait, of weights neither: the kernel before may have written them. The second-level cache always holds
        # what was written last, so asking that for them is safe. What the wait has passed is complete: the next kernel may start
        ITEM: tl.constexpr = feature_weight.dtype.element_ty.primitive_bitwidth // 8
        LINES: tl.constexpr = (STEP * ITEM + 127) // 128
        for start in range(0, chunk, STEP):
            offs_line = pid_s * chunk + start + tl.arange(0, LINES) * (128 // ITEM)
            exists = in_r[:, None] & (offs_line < d)[None, :]
            prefetch(feature_weight + tl.where(exists, offs_r[:, None] * d + offs_line[None, :], 0))
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows = hidden + (offs_m // B).to(tl.int64) * stride_hn + (offs_m % B).to(tl.int64) * stride_hk

    if SLICES == 1:
        b_y = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
        b_squares = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    else:
        b_y = tl.zeros((SLICES, BLOCK_M, BLOCK_R), dtype=tl.float32)
        b_squares = tl.zeros((SLICES, BLOCK_M, BLOCK_D), dtype=tl.float32)
    for start in range(0, chunk, STEP):
        if SLICES == 1:
            offs_d = pid_s * chunk + start + tl.arange(0, BLOCK_D)
            in_d = offs_d < d
            b_h = tl.load(rows[:, None] + offs_d[None, :], mask=in_m[:, None] & in_d[None, :], other=0.0)
            b_w = tl.load(norm_weight + offs_d, mask=in_d, other=0.0).to(tl.float32)[None, :]
            at_p = feature_weight + offs_r[:, None] * d + offs_d[None, :]
            b_p = tl.trans(tl.load(at_p, mask=in_r[:, None] & in_d[None, :], other=0.0))
        else:
            offs_d = tl.arange(0, SLICES)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
            offs_d += pid_s * chunk + start
            in_d = offs_d < d
            in_h = in_m[None, :, None] & in_d[:, None, :]
            b_h = tl.load(rows[None, :, None] + offs_d[:, None, :], mask=in_h, other=0.0)
            b_w = tl.load(norm_weight + offs_d, mask=in_d, other=0.0).to(tl.float32)[:, None, :]
            at_p = feature_weight + offs_r[None, :, None] * d + offs_d[:, None, :]
            b_p = tl.permute(tl.load(at_p, mask=in_r[None, :, None] & in_d[:, None, :], other=0.0), (0, 2, 1))
        b_h = b_h.to(tl.float32)
        b_squares += b_h * b_h
        b_y = tl.dot((b_h * (b_w * SCALE)).to(b_p.dtype), b_p, b_y, input_precision="ieee")
    if SLICES > 1:
        b_y = tl.sum(b_y, axis=0)

    at = pid_s.to(tl.int64) * M * r + offs_m.to(tl.int64)[:, None] * r + offs_r[None, :]
    tl.store(values + at, b_y / SCALE, mask=in_m[:, None] & in_r[None, :])
    if pid_r == 0:
        if SLICES == 1:
            b_rows = tl.sum(b_squares, axis=1)
        else:
            b_rows = tl.sum(tl.sum(b_squares, axis=2), axis=0)
        tl.store(squares + pid_s * M + offs_m, b_rows, mask=in_m)


@triton.jit
def added_parts(values, squares, offs_m, at, in_m, inside, M, r, SPLITS: tl.constexpr):
    """The parts of `feature_fwd_kernel`, added in order: `y` of the given rows, and their sums of squares."""
    b_y = tl.load(values + at, mask=inside, other=0.0)
    b_squares = tl.load(squares + offs_m, mask=in_m, other=0.0)
    for part in tl.static_range(1, SPLITS):
        b_y += tl.load(values + part * M * r + at, mask=inside, other=0.0)
        b_squares += tl.load(squares + part * M + offs_m, mask=in_m, other=0.0)
    return b_y, b_squares


@triton.jit
def normalised(b_y, b_squares, anchor, block, slot, offs_r, inside, d, r, eps, stride_an):
    """Features from `y`, the anchor's in rows of slot 0, and the scales of both norms."""
    h_scale = tl.rsqrt(b_squares / d + eps)
    b_y = b_y * h_scale[:, None]
    y_scale = tl.rsqrt(tl.sum(b_y * b_y, axis=1) / r + eps)
    is_anchor = (slot == 0)[:, None]
    z = anchor + block.to(tl.int64)[:, None] * stride_an + offs_r[None, :]
    b_z = tl.load(z, mask=inside & is_anchor, other=0.0).to(tl.float32)
    return tl.where(is_anchor, b_z, b_y * y_scale[:, None]), h_scale, y_scale


@triton.jit
def injection_fwd_kernel(
    hidden,  # [N, B, d], rows by stride
    anchor,  # [N, r]
    values,  # [splits, M, r] fp32, read if there are parts
    squares,  # [splits, M] fp32, read if there are parts
    gate_weight,  # [d, 2r]
    gate_bias,  # [d]
    write_weight,  # [d, r]
    out,  # [M, d]
    features,  # [M, r], written here if there are parts, else read
    M,
    B,
    d,
    r,
    eps,
    stride_hn,
    stride_hk,
    stride_an,
    SPLITS: tl.constexpr,
    HALO: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gate, write and residual. Every program holds its share of the weights at once.

    With SPLITS > 0 it first finishes the features of its rows itself. What a left neighbour contributes is multiplied in the
    neighbour's own row and then moved down by one: a tile of products is smaller than one of features. With HALO a tile begins with
    the last row of the tile before, for tiles that cut blocks in two.
    """
    pid_d, pid_m = tl.program_id(0), tl.program_id(1)
    offs_tile = tl.arange(0, BLOCK_M)
    offs_m = pid_m * (BLOCK_M - HALO) - HALO + offs_tile
    offs_d = pid_d * BLOCK_D + tl.arange(0, BLOCK_D)
    offs_r = tl.arange(0, BLOCK_R)
    in_m = (offs_m >= 0) & (offs_m < M)
    in_d = offs_d < d
    in_r = offs_r < r
    block = offs_m // B
    slot = offs_m % B
    in_weight = in_r[:, None] & in_d[None, :]
    inside = in_m[:, None] & in_d[None, :]
    at_gate = gate_weight + offs_d[None, :] * (2 * r) + offs_r[:, None]
    # weights and the residual stream are on their way before the wait: the kernel before let this one in only after all that ran
    # before that one was done, and writes neither. Weights are loaded transposed, since tl.trans would have each one wait for its
    # data before the next is asked for
    b_own = tl.load(at_gate, mask=in_weight, other=0.0)
    b_left = tl.load(at_gate + r, mask=in_weight, other=0.0)
    b_write = tl.load(write_weight + offs_d[None, :] * r + offs_r[:, None], mask=in_weight, other=0.0)
    b_bias = tl.load(gate_bias + offs_d, mask=in_d, other=0.0).to(tl.float32)
    at_h = hidden + block.to(tl.int64)[:, None] * stride_hn + slot.to(tl.int64)[:, None] * stride_hk + offs_d[None, :]
    b_h = tl.load(at_h, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    at_u = offs_m.to(tl.int64)[:, None] * r + offs_r[None, :]
    in_u = in_m[:, None] & in_r[None, :]
    kept = in_m & (offs_tile >= HALO)
    if SPLITS > 0:
        b_y, b_squares = added_parts(values, squares, offs_m, at_u, in_m, in_u, M, r, SPLITS)
        b_u, _, _ = normalised(b_y, b_squares, anchor, block, slot, offs_r, in_u, d, r, eps, stride_an)
        # rounded as the features are, since these are what the gate reads elsewhere
        b_u = b_u.to(features.dtype.element_ty)
    else:
        b_u = tl.load(features + at_u, mask=in_u, other=0.0)
    b_x = b_u.to(b_own.dtype)
    b_gate = tl.dot(b_x, b_own, input_precision="ieee") + b_bias[None, :]
    b_pair = tl.join(tl.dot(b_x, b_left, input_precision="ieee"), tl.dot(b_x, b_write, input_precision="ieee"))
    above = tl.maximum(offs_tile - 1, 0)[:, None, None]
    b_left, b_write = tl.split(tl.gather(b_pair, tl.broadcast_to(above, (BLOCK_M, BLOCK_D, 2)), axis=0))
    b_add = sigmoid(b_gate + b_left) * b_write
    b_out = tl.where((slot > 0)[:, None], b_h + b_add, b_h)
    at_out = offs_m.to(tl.int64)[:, None] * d + offs_d[None, :]
    tl.store(out + at_out, b_out.to(out.dtype.element_ty), mask=kept[:, None] & in_d[None, :])
    if SPLITS > 0:
        if pid_d == 0:
            tl.store(features + at_u, b_u, mask=kept[:, None] & in_r[None, :])


@triton.jit
def normalise_fwd_kernel(
    values,  # [splits, M, r] fp32, sums of `P (w * h)`
    squares,  # [splits, M] fp32, or None
    hidden,  # [N, B, d], rows by stride, read if `squares` is None
    anchor,  # [N, r]
    features,  # [M, r]
    pair,  # [M, 2r] or None: every row's feature and its left neighbour's, zero in slot 0
    stats,  # [2, M] fp32 or None: the scales of both norms
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
    if squares is None:
        b_y = tl.load(values + at, mask=inside, other=0.0)
        rows = hidden + block.to(tl.int64) * stride_hn + slot.to(tl.int64) * stride_hk
        b_sums = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        for start in range(0, d, BLOCK_D):
            offs_d = start + tl.arange(0, BLOCK_D)
            in_h = in_m[:, None] & (offs_d < d)[None, :]
            b_h = tl.load(rows[:, None] + offs_d[None, :], mask=in_h, other=0.0).to(tl.float32)
            b_sums += b_h * b_h
        b_squares = tl.sum(b_sums, axis=1)
    else:
        b_y, b_squares = added_parts(values, squares, offs_m, at, in_m, inside, M, r, SPLITS)
    b_u, h_scale, y_scale = normalised(b_y, b_squares, anchor, block, slot, offs_r, inside, d, r, eps, stride_an)
    b_u = b_u.to(features.dtype.element_ty)
    tl.store(features + at, b_u, mask=inside)
    if stats is not None:
        tl.store(stats + offs_m, h_scale, mask=in_m)
        tl.store(stats + M + offs_m, y_scale, mask=in_m)
    if pair is not None:
        at_pair = pair + offs_m.to(tl.int64)[:, None] * (2 * r) + offs_r[None, :]
        b_u = b_u.to(pair.dtype.element_ty)
        tl.store(at_pair, b_u, mask=inside)
        tl.store(at_pair + 3 * r, b_u, mask=inside & (slot + 1 < B)[:, None])
        tl.store(at_pair + r, tl.zeros_like(b_u), mask=inside & (slot == 0)[:, None])


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
def feature_bwd_kernel(
    grad_own,  # [M, r], rows by stride, gradient of u_k through the gate
    grad_left,  # [M, r], rows by the same stride, gradient of u_{k-1} through the gate, in row k
    grad_written,  # [M, r], gradient of u_{k-1} through the write, in row k
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
    """`dh = g + h_scale * w * (P^T dy) - radial * h`."""
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
