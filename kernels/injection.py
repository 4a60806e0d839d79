"""Gated adjacent injection, forward and backward.

Both norms are scales of whole rows, so they commute with the products that follow: the first kernel multiplies the raw residual
stream by `P`, sums its squares on the way, and the scales are applied to the sums. What follows depends on the number of slots:

| slots (16 bits) | mode | launches of the forward |
| --- | --- | --- |
| up to 64 | "parts" | two: features in parts; their sum, gate and write |
| up to 256 | "reduced" | three: the sum of the parts, which too many programs would repeat, in a launch of its own |
| more, and whenever gradients are needed | "library" | five: cuBLAS makes the products with gate and write |

In 32 bits it is "library" for any number: matrix units of GPUs do not multiply in fp32, so nothing is gained by keeping weights on
chip. `forward_config` is that table with its tiles, all that is tuned here.

Dependent launch saves 2 us an injection in the first two modes, whose kernels ask for weights before they wait. Around cuBLAS it cost
11 us an injection in the draft pass of 1024 slots (3 us alone), and 2 % of a training step's injection, so "library" does without.

cuBLAS makes the products of many slots, since its clusters load a tile once for two multiprocessors, where a Triton tile with two
accumulators is held up by the traffic from the second-level cache. The backward starts from the two products that the forward stored
(two tensors of the size of the residual stream, as autograd would keep): cuBLAS multiplies and Triton fuses the rest around. Every
sum has a fixed order.
"""

from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from .injection_kernels import (
    feature_bwd_kernel,
    feature_fwd_kernel,
    injection_fwd_kernel,
    normalise_fwd_kernel,
    products_bwd_kernel,
    residual_bwd_kernel,
    write_fwd_kernel,
)
from .launch import (
    LARGE_MEMORY,
    cdiv,
    compile_together,
    compute_dtype,
    is_eager,
    launch,
    launch_options,
    needs_gradients,
    next_power_of_2,
    on_device,
    operand_scale,
    shared_memory,
)


@dataclass(frozen=True)
class Tile:
    """One program's share of a kernel's work, and its warps and stages.

    `slices` products over `channels` each run side by side, see `feature_fwd_kernel`.
    """

    slots: int
    rank: int
    channels: int
    num_warps: int
    num_stages: int
    slices: int = 1

    def blocks(self) -> dict[str, int]:
        return {"BLOCK_M": self.slots, "BLOCK_R": self.rank, "BLOCK_D": self.channels}


@dataclass(frozen=True)
class ForwardConfig:
    """The mode for a number of slots, into how many parts the channels are split for the features, and the tiles.

    Without a `feature` tile (many slots) cuBLAS makes the features' product as well. `gate` is the tile of "parts" and "reduced",
    whose rank is the whole rank. `dependent` says whether kernels are launched dependently, see `launch_options`.
    """

    mode: str
    splits: int
    feature: Tile | None
    gate: Tile | None = None
    dependent: bool = True


def forward_config(slots: int, rank: int, itemsize: int, memory: int = LARGE_MEMORY) -> ForwardConfig:
    """The tiles for a shape class: number of slots, whether the rank is at most 256, and 16 or 32 bits.

    Meant for d = 4096 and r = 256 in 16 bits on a Hopper GPU; the rest is chosen to fit registers and shared memory, of which a
    program can use `memory` bytes. The mode does not depend on that.
    """
    whole = max(next_power_of_2(rank), 16)
    wide = whole > 256
    if itemsize == 4 or slots > 4096:
        return ForwardConfig("library", 1, None, dependent=False)
    if slots <= 64:
        return ForwardConfig("parts", 4, Tile(16, 16, 64, 4, 5, slices=4), Tile(16, whole, 16 if wide else 64, 8, 1))
    if slots <= 256:
        gate = Tile(64, whole, 32 if wide else 64, 8, 1) if memory >= LARGE_MEMORY else Tile(32, whole, 16, 4, 1)
        return ForwardConfig("reduced", 16, Tile(64, 64, 64, 4, 4), gate)
    # 128 programs for the features of 512 slots, and of 1024
    splits = 16 if slots <= 512 else 8
    return ForwardConfig("library", splits, Tile(128, 128, 64, 8, 3), dependent=False)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b` in fp32 from operands in 16 bits, so that a sum over all slots or channels is rounded once, at its very end."""
    if a.dtype == torch.float32:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    with torch.autocast(a.device.type, enabled=False):
        return a.float() @ b.float()


def _compiled_for(config: ForwardConfig | str, hidden_states: torch.Tensor, feature_weight: torch.Tensor) -> tuple:
    """What decides which kernels a call needs, and in which versions."""
    N, B, d = hidden_states.shape
    r = feature_weight.shape[0]
    return config, N * B % 16 == 0, B, d, r, hidden_states.dtype, feature_weight.dtype


def _feature_parts(hidden_states, norm_weight, feature_weight, config) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches `feature_fwd_kernel`. Returns the parts `[splits, N B, r]` and their squares `[splits, N B]`, both fp32."""
    N, B, d = hidden_states.shape
    M, r = N * B, feature_weight.shape[0]
    tile = config.feature
    step = tile.slices * tile.channels
    chunk = cdiv(cdiv(d, config.splits), step) * step
    splits = cdiv(d, chunk)
    values = torch.empty((splits, M, r), dtype=torch.float32, device=hidden_states.device)
    squares = torch.empty((splits, M), dtype=torch.float32, device=hidden_states.device)
    launch(
        feature_fwd_kernel, (cdiv(r, tile.rank), cdiv(M, tile.slots), splits),
        hidden_states, norm_weight, feature_weight, values, squares, M, B, d, r, chunk,
        hidden_states.stride(0), hidden_states.stride(1),
        SCALE=operand_scale(feature_weight.dtype), SLICES=tile.slices, **tile.blocks(),
        **launch_options(hidden_states, tile.num_warps, tile.num_stages, config.dependent),
    )  # fmt: skip
    return values, squares


def _normalise(hidden_states, anchor_features, values, squares, features, pair, stats, eps, dependent) -> None:
    """Launches `normalise_fwd_kernel`; without `squares` it sums those of the residual stream itself."""
    N, B, d = hidden_states.shape
    splits, M, r = values.shape
    block_m = 1 if M <= 512 else 4
    launch(
        normalise_fwd_kernel, (cdiv(M, block_m),),
        values, squares, hidden_states, anchor_features, features, pair, stats,
        M, B, d, r, eps, hidden_states.stride(0), hidden_states.stride(1), anchor_features.stride(0),
        SPLITS=splits, BLOCK_M=block_m, BLOCK_R=max(next_power_of_2(r), 16),
        BLOCK_D=min(1024, max(next_power_of_2(d), 16)), **launch_options(hidden_states, 4, dependent=dependent),
    )  # fmt: skip


def fused_fwd(
    hidden_states: torch.Tensor,  # [N, B, d]
    anchor_features: torch.Tensor,  # [N, r]
    norm_weight: torch.Tensor,  # [d]
    feature_weight: torch.Tensor,  # [r, d]
    gate_weight: torch.Tensor,  # [d, 2r]
    gate_bias: torch.Tensor,  # [d]
    write_weight: torch.Tensor,  # [d, r]
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward of modes "parts" and "reduced". Returns the new residual stream and the features."""
    N, B, d = hidden_states.shape
    M, r = N * B, feature_weight.shape[0]
    config = forward_config(M, r, feature_weight.dtype.itemsize, shared_memory(hidden_states))
    weights = (norm_weight, feature_weight, gate_weight, gate_bias, write_weight)
    key = _compiled_for(config, hidden_states, feature_weight)
    compile_together(key, fused_fwd, hidden_states, anchor_features, *weights, eps)
    out = torch.empty((N, B, d), dtype=hidden_states.dtype, device=hidden_states.device)
    features = torch.empty((N, B, r), dtype=hidden_states.dtype, device=hidden_states.device)
    tile = config.gate
    # tiles that end where blocks end need no row of the tile before
    halo = int(tile.slots % B > 0)
    with on_device(hidden_states):
        values, squares = _feature_parts(hidden_states, norm_weight, feature_weight, config)
        splits = values.shape[0]
        if config.mode == "reduced":
            _normalise(hidden_states, anchor_features, values, squares, features, None, None, eps, config.dependent)
            splits = 0
        launch(
            injection_fwd_kernel, (cdiv(d, tile.channels), cdiv(M, tile.slots - halo)),
            hidden_states, anchor_features, values, squares, gate_weight, gate_bias, write_weight, out, features,
            M, B, d, r, eps, hidden_states.stride(0), hidden_states.stride(1), anchor_features.stride(0),
            SPLITS=splits, HALO=halo, **tile.blocks(),
            **launch_options(hidden_states, tile.num_warps, tile.num_stages, config.dependent),
        )  # fmt: skip
    return out, features


def library_fwd(
    hidden_states: torch.Tensor,
    anchor_features: torch.Tensor,
    norm_weight: torch.Tensor,
    feature_weight: torch.Tensor,
    gate_weight: torch.Tensor,
    gate_bias: torch.Tensor,
    write_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """The forward of mode "library", for any number of slots. Returns what `fused_fwd` does, and for the backward: both norms' scales
    `[2, N B]` (fp32), every slot's feature beside its left neighbour's `[N B, 2r]`, and the two products `[2, N B, d]`."""
    N, B, d = hidden_states.shape
    M, r = N * B, feature_weight.shape[0]
    dot_dtype, device = feature_weight.dtype, hidden_states.device
    config = forward_config(M, r, dot_dtype.itemsize)
    weights = (norm_weight, feature_weight, gate_weight, gate_bias, write_weight)
    key = _compiled_for(config, hidden_states, feature_weight)
    compile_together(key, library_fwd, hidden_states, anchor_features, *weights, eps)
    out = torch.empty((N, B, d), dtype=hidden_states.dtype, device=device)
    features = torch.empty((N, B, r), dtype=hidden_states.dtype, device=device)
    stats = torch.empty((2, M), dtype=torch.float32, device=device)
    pair = torch.empty((M, 2 * r), dtype=dot_dtype, device=device)
    products = torch.empty((2, M, d), dtype=dot_dtype, device=device)
    with on_device(hidden_states):
        if config.feature is None:
            # the norm's weight moves into P, a table far smaller than the residual stream
            folded = (feature_weight.float() * norm_weight.float()).to(dot_dtype)
            values, squares = _product(hidden_states.reshape(M, d).to(dot_dtype), folded.t())[None], None
        else:
            values, squares = _feature_parts(hidden_states, norm_weight, feature_weight, config)
        _normalise(hidden_states, anchor_features, values, squares, features, pair, stats, eps, config.dependent)
        torch.mm(pair, gate_weight.t(), out=products[0])
        torch.mm(pair[:, r:], write_weight.t(), out=products[1])
        block_m, block_d = 8, 512
        launch(
            write_fwd_kernel, (cdiv(d, block_d), cdiv(M, block_m)),
            hidden_states, products, gate_bias, out, M, B, d, hidden_states.stride(0), hidden_states.stride(1),
            BLOCK_M=block_m, BLOCK_D=block_d, **launch_options(hidden_states, 4, dependent=config.dependent),
        )  # fmt: skip
    return out, features, stats, pair, products


def library_bwd(
    grad_out: torch.Tensor,  # [N, B, d]
    grad_features: torch.Tensor,  # [N, B, r]
    hidden_states: torch.Tensor,
    pair: torch.Tensor,
    products: torch.Tensor,
    stats: torch.Tensor,
    anchor_dtype: torch.dtype,
    norm_weight: torch.Tensor,
    feature_weight: torch.Tensor,
    gate_weight: torch.Tensor,
    gate_bias: torch.Tensor,
    write_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """Returns the gradients of the forward's first seven arguments, in its order and dtypes."""
    N, B, d = hidden_states.shape
    M, r = N * B, feature_weight.shape[0]
    dot_dtype, device = feature_weight.dtype, hidden_states.device
    compile_together(
        _compiled_for("backward", hidden_states, feature_weight), library_bwd,
        grad_out, grad_features, hidden_states, pair, products, stats, anchor_dtype,
        norm_weight, feature_weight, gate_weight, gate_bias, write_weight, eps,
    )  # fmt: skip
    strides = (hidden_states.stride(0), hidden_states.stride(1))
    grad_out = grad_out.contiguous().view(M, d)
    grad_products = torch.empty_like(products)
    block_m, block_d, steps = 8, 256, 16
    tiles = cdiv(M, block_m * steps)
    grad_bias = torch.empty((tiles, d), dtype=torch.float32, device=device)
    with on_device(hidden_states):
        launch(
            products_bwd_kernel, (cdiv(d, block_d), tiles),
            grad_out, products, gate_bias, grad_products, grad_bias, M, B, d,
            STEPS=steps, BLOCK_M=block_m, BLOCK_D=block_d, **launch_options(hidden_states, 4, dependent=False),
        )  # fmt: skip
    grad_gate, grad_write = grad_products
    grad_pair = grad_gate @ gate_weight
    grad_written = grad_write @ write_weight
    grad_gate_weight = _product(grad_gate.t(), pair).to(gate_weight.dtype)
    grad_write_weight = _product(grad_write.t(), pair[:, r:]).to(write_weight.dtype)
    del grad_products, grad_gate, grad_write

    grad_anchor = torch.empty((N, r), dtype=anchor_dtype, device=device)
    grad_y, grad_y_scaled = torch.empty((2, M, r), dtype=dot_dtype, device=device)
    radial = torch.empty((M,), dtype=torch.float32, device=device)
    with on_device(hidden_states):
        launch(
            feature_bwd_kernel, (cdiv(M, 8),),
            grad_pair, grad_pair[:, r:], grad_written, grad_features.contiguous(), pair, stats,
            grad_anchor, grad_y, grad_y_scaled, radial, M, B, d, r, eps, grad_pair.stride(0), pair.stride(0),
            BLOCK_M=8, BLOCK_R=max(next_power_of_2(r), 16), **launch_options(hidden_states, 4, dependent=False),
        )  # fmt: skip
    # the norm weight scales columns of h before P, so one product over the slots gives the gradients of both
    grad_scaled = _product(grad_y_scaled.t(), hidden_states.reshape(M, d).to(dot_dtype))
    grad_feature_weight = (grad_scaled * norm_weight.float()).to(feature_weight.dtype)
    grad_norm_weight = (grad_scaled * feature_weight.float()).sum(0).to(norm_weight.dtype)

    grad_hidden = torch.empty((N, B, d), dtype=hidden_states.dtype, device=device)
    block_m, block_d = 8, 512
    with on_device(hidden_states):
        launch(
            residual_bwd_kernel, (cdiv(d, block_d), cdiv(M, block_m)),
            hidden_states, norm_weight, grad_out, grad_y @ feature_weight, stats, radial, grad_hidden,
            M, B, d, *strides, BLOCK_M=block_m, BLOCK_D=block_d, **launch_options(hidden_states, 4, dependent=False),
        )  # fmt: skip
    return (
        grad_hidden,
        grad_anchor,
        grad_norm_weight,
        grad_feature_weight,
        grad_gate_weight,
        grad_bias.sum(0).to(gate_bias.dtype),
        grad_write_weight,
    )


@torch.library.custom_op("dspine::gated_adjacent_injection", mutates_args=())
def _fused(
    hidden_states: torch.Tensor,
    anchor_features: torch.Tensor,
    norm_weight: torch.Tensor,
    feature_weight: torch.Tensor,
    gate_weight: torch.Tensor,
    gate_bias: torch.Tensor,
    write_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return fused_fwd(
        hidden_states, anchor_features, norm_weight, feature_weight, gate_weight, gate_bias, write_weight, eps
    )


@_fused.register_fake
def _(hidden_states, anchor_features, norm_weight, feature_weight, gate_weight, gate_bias, write_weight, eps):
    N, B, d = hidden_states.shape
    return hidden_states.new_empty((N, B, d)), hidden_states.new_empty((N, B, feature_weight.shape[0]))


@torch.library.custom_op("dspine::gated_adjacent_injection_library", mutates_args=())
def _library(
    hidden_states: torch.Tensor,
    anchor_features: torch.Tensor,
    norm_weight: torch.Tensor,
    feature_weight: torch.Tensor,
    gate_weight: torch.Tensor,
    gate_bias: torch.Tensor,
    write_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return library_fwd(
        hidden_states, anchor_features, norm_weight, feature_weight, gate_weight, gate_bias, write_weight, eps
    )


@_library.register_fake
def _(hidden_states, anchor_features, norm_weight, feature_weight, gate_weight, gate_bias, write_weight, eps):
    N, B, d = hidden_states.shape
    r = feature_weight.shape[0]
    return (
        hidden_states.new_empty((N, B, d)),
        hidden_states.new_empty((N, B, r)),
        hidden_states.new_empty((2, N * B), dtype=torch.float32),
        feature_weight.new_empty((N * B, 2 * r)),
        feature_weight.new_empty((2, N * B, d)),
    )


@torch.library.custom_op("dspine::gated_adjacent_injection_library_backward", mutates_args=())
def _library_backward(
    grad_out: torch.Tensor,
    grad_features: torch.Tensor,
    hidden_states: torch.Tensor,
    pair: torch.Tensor,
    products: torch.Tensor,
    stats: torch.Tensor,
    anchor_dtype: torch.dtype,
    norm_weight: torch.Tensor,
    feature_weight: torch.Tensor,
    gate_weight: torch.Tensor,
    gate_bias: torch.Tensor,
    write_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return library_bwd(
        grad_out, grad_features, hidden_states, pair, products, stats, anchor_dtype,
        norm_weight, feature_weight, gate_weight, gate_bias, write_weight, eps,
    )  # fmt: skip


@_library_backward.register_fake
def _(grad_out, grad_features, hidden_states, pair, products, stats, anchor_dtype, *weights_and_eps):
    N, B, d = hidden_states.shape
    grad_anchor = hidden_states.new_empty((N, pair.shape[-1] // 2), dtype=anchor_dtype)
    weights = [weight.new_empty(weight.shape) for weight in weights_and_eps[:-1]]
    return (hidden_states.new_empty((N, B, d)), grad_anchor, *weights)


def _library_setup_context(ctx, inputs, output):
    hidden_states, anchor_features, *weights, ctx.eps = inputs
    _, features, stats, pair, products = output
    ctx.anchor_dtype, ctx.features_like = anchor_features.dtype, (features.shape, features.dtype)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden_states, pair, products, stats, *weights)


def _grads(backward, ctx, grad_out, grad_features):
    hidden_states, pair, products, stats, *weights = ctx.saved_tensors
    if grad_out is None:
        grad_out = hidden_states.new_zeros(hidden_states.shape)
    if grad_features is None:
        shape, dtype = ctx.features_like
        grad_features = hidden_states.new_zeros(shape, dtype=dtype)
    grads = backward(
        grad_out, grad_features, hidden_states, pair, products, stats, ctx.anchor_dtype, *weights, ctx.eps
    )
    return (*grads, None)


def _library_autograd(ctx, grad_out, grad_features, *unused):
    return _grads(_library_backward, ctx, grad_out, grad_features)


_library.register_autograd(_library_autograd, setup_context=_library_setup_context)


class _EagerLibrary(torch.autograd.Function):
    """`_library` for eager calls, without the custom operator."""

    @staticmethod
    def forward(*args):
        return library_fwd(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _library_setup_context(ctx, inputs, output)
        ctx.mark_non_differentiable(*output[2:])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, grad_features, *unused):
        return _grads(library_bwd, ctx, grad_out, grad_features)


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
    slots = hidden_states.shape[0] * hidden_states.shape[1]
    eager = is_eager(*arguments)
    if needs_gradients(*arguments):
        return (_EagerLibrary.apply if eager else _library)(*arguments, eps)[:2]
    if forward_config(slots, feature_weight.shape[0], dtype.itemsize).mode == "library":
        return (library_fwd if eager else _library)(*arguments, eps)[:2]
    return (fused_fwd if eager else _fused)(*arguments, eps)
