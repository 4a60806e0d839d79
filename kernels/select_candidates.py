"""Top-K of the vocabulary in two launches.

The first streams the logits once and keeps only the largest of every chunk of neighbouring tokens. The K best tokens lie in the K
chunks with the best maxima (a token outside them is beaten by K maxima), so the second launch, one program per slot, picks K chunks
and then K tokens out of those chunks. Both pick by a key that holds logit and token id, which makes ties stable.
"""

import torch
import triton
import triton.language as tl

from .launch import cdiv, compile_together, is_plain, launch, launch_options, next_power_of_2, on_device


@triton.jit
def ordered_key(x, index):
    """An integer that orders pairs: larger `x` (fp32) first, then the smaller index. -0 counts as 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    # negative floats run backwards as integers
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def key_index(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def key_value(key):
    bits = (key >> 32).to(tl.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def best_keys(keys, K, LOWEST: tl.constexpr, BLOCK_K: tl.constexpr):
    """The K largest of the distinct `keys`, in order, as a vector of BLOCK_K; LOWEST where there are fewer."""
    offs_k = tl.arange(0, BLOCK_K)
    picked = tl.full((BLOCK_K,), LOWEST, dtype=tl.int64)
    for i in range(K):
        best = tl.max(keys, axis=0)
        picked = tl.where(offs_k == i, best, picked)
        keys = tl.where(keys == best, LOWEST, keys)
    return picked


@triton.jit
def chunk_maximum_fwd_kernel(
    logits,  # [N, T, V], rows by stride
    maxima,  # [N T, C] fp32
    T,
    V,
    C,
    stride_n,
    stride_t,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    pid_c, row = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    base = logits + (row // T).to(tl.int64) * stride_n + (row % T).to(tl.int64) * stride_t
    offs_c = pid_c * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_v = offs_c[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    b_x = tl.load(base + offs_v, mask=offs_v < V, other=float("-inf")).to(tl.float32)
    tl.store(maxima + row.to(tl.int64) * C + offs_c, tl.max(b_x, axis=1), mask=offs_c < C)


@triton.jit
def select_candidates_fwd_kernel(
    logits,  # [N, T, V], rows by stride
    maxima,  # [N T, C] fp32
    values,  # [N T, K]
    tokens,  # [N T, K] int64
    T,
    V,
    C,
    K,
    stride_n,
    stride_t,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    # below the key of any token
    LOWEST: tl.constexpr = -(2**63)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    offs_c = tl.arange(0, BLOCK_C)
    b_max = tl.load(maxima + row.to(tl.int64) * C + offs_c, mask=offs_c < C, other=float("-inf"))
    chunks = best_keys(tl.where(offs_c < C, ordered_key(b_max, offs_c), LOWEST), K, LOWEST, BLOCK_K)
    # with fewer chunks than candidates the rest of the picks is void
    exists = chunks != LOWEST
    start = tl.where(exists, key_index(chunks), 0) * CHUNK

    offs_v = start[:, None] + tl.arange(0, CHUNK)[None, :]
    inside = exists[:, None] & (offs_v < V)
    base = logits + (row // T).to(tl.int64) * stride_n + (row % T).to(tl.int64) * stride_t
    b_x = tl.load(base + offs_v, mask=inside, other=float("-inf")).to(tl.float32)
    keys = tl.where(inside, ordered_key(b_x, offs_v), LOWEST)
    best = best_keys(tl.reshape(keys, (BLOCK_K * CHUNK,)), K, LOWEST, BLOCK_K)

    offs_k = tl.arange(0, BLOCK_K)
    at = row.to(tl.int64) * K + offs_k
    tl.store(values + at, key_value(best).to(values.dtype.element_ty), mask=offs_k < K)
    tl.store(tokens + at, key_index(best).to(tl.int64), mask=offs_k < K)


def launches_dependently(rows: int) -> bool:
    """Whether the two kernels are launched dependently, see `launch_options`: with few rows it costs 1.5 us of 16, else it saves 1 us."""
    return rows > 64


def select_candidates_fwd(logits: torch.Tensor, num_candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches the two kernels on `[N, T, V]`; returns logits and token ids `[N, T, K]`."""
    N, T, V = logits.shape
    # so that the second kernel's program holds all maxima of a row
    chunk = 128 if V <= 128 * 2048 else 512
    chunks = cdiv(V, chunk)
    block_c = min(4096 // chunk, next_power_of_2(chunks))
    dependent = launches_dependently(N * T)
    key = ("select_candidates", dependent, T, V, num_candidates, logits.dtype)
    compile_together(key, select_candidates_fwd, logits, num_candidates)
    maxima = torch.empty((N * T, chunks), dtype=torch.float32, device=logits.device)
    values = torch.empty((N, T, num_candidates), dtype=logits.dtype, device=logits.device)
    tokens = torch.empty((N, T, num_candidates), dtype=torch.int64, device=logits.device)
    strides = (logits.stride(0), logits.stride(1))
    with on_device(logits):
        # one tile of 8 kB a program: several per program, in a loop, came out slower for 15 to 960 rows
        launch(
            chunk_maximum_fwd_kernel, (cdiv(chunks, block_c), N * T),
            logits, maxima, T, V, chunks, *strides,
            CHUNK=chunk, BLOCK_C=block_c, **launch_options(logits, 4, dependent=dependent),
        )  # fmt: skip
        launch(
            select_candidates_fwd_kernel, (N * T,),
            logits, maxima, values, tokens, T, V, chunks, num_candidates, *strides,
            CHUNK=chunk, BLOCK_C=next_power_of_2(chunks), BLOCK_K=next_power_of_2(num_candidates),
            **launch_options(logits, 4, dependent=dependent),
        )  # fmt: skip
    return values, tokens


@torch.library.custom_op("dspine::select_candidates", mutates_args=())
def _select_candidates(logits: torch.Tensor, num_candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    return select_candidates_fwd(logits, num_candidates)


@_select_candidates.register_fake
def _(logits, num_candidates):
    shape = (*logits.shape[:-1], num_candidates)
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int64)


def select_candidates(logits: torch.Tensor, num_candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `num_candidates` best tokens of every slot, best first, equal logits in order of token id.

    Logits must not be NaN. The last dimension must be contiguous, rows may have any stride.

    Args:
        logits: `[N, T, V]`.

    Returns:
        Their logits `[N, T, K]` and token ids `[N, T, K]` (int64).
    """
    if is_plain(logits):
        return select_candidates_fwd(logits, num_candidates)
    return _select_candidates(logits, num_candidates)
