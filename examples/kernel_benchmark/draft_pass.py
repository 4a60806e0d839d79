"""A backbone and a drafter with random weights, whose draft pass takes DSpine's operations as an argument; and the kernels' operations."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from dspine.modeling_dspine import reference_dspine as reference
from kernel_benchmark.shapes import EPS, normal


class Backbone:
    """Decoder layers like Qwen3's over a context that is already in the key/value buffers, plus output embeddings."""

    def __init__(self, shape, layers: int, head: torch.Tensor):
        self.shape, self.head = shape, head
        d, hd = shape.d, shape.head_dim
        qkv = (shape.heads + 2 * shape.kv_heads) * hd
        self.layers = [
            (
                normal(d, scale=0.1, mean=1.0),
                normal(qkv, d),
                normal(hd, scale=0.1, mean=1.0),
                normal(hd, scale=0.1, mean=1.0),
                normal(d, shape.heads * hd),
                normal(d, scale=0.1, mean=1.0),
                normal(2 * shape.intermediate, d),
                normal(d, shape.intermediate),
            )
            for _ in range(layers)
        ]
        self.norm = normal(d, scale=0.1, mean=1.0)
        position = torch.arange(shape.context, shape.context + shape.B, device=head.device)[:, None]
        angle = position / 1e6 ** (torch.arange(0, hd, 2, device=head.device) / hd)
        self.cos, self.sin = angle.cos().repeat(1, 2).bfloat16(), angle.sin().repeat(1, 2).bfloat16()
        self.run_layer = self.layer

    def set_batch(self, N: int) -> None:
        s = self.shape
        length = s.context + s.B
        self.caches = [normal(2, N, s.kv_heads, length, s.head_dim, scale=1.0) for _ in self.layers]

    def layer(self, x, cache, norm1, qkv, q_norm, k_norm, o, norm2, gate_up, down):
        s = self.shape
        N, B, d = x.shape
        heads = F.linear(F.rms_norm(x, (d,), norm1, EPS), qkv).view(N, B, -1, s.head_dim).transpose(1, 2)
        q, k, v = heads.split([s.heads, s.kv_heads, s.kv_heads], dim=1)
        q, k = F.rms_norm(q, (s.head_dim,), q_norm, EPS), F.rms_norm(k, (s.head_dim,), k_norm, EPS)
        q, k = self.rotate(q), self.rotate(k)
        cache[0, :, :, s.context :].copy_(k)
        cache[1, :, :, s.context :].copy_(v)
        # queries of one group side by side attend to their common keys; a block's mask would not change the cost
        q = q.reshape(N, s.kv_heads, -1, s.head_dim)
        a = F.scaled_dot_product_attention(q, cache[0], cache[1]).reshape(N, s.heads, B, s.head_dim)
        x = x + F.linear(a.transpose(1, 2).reshape(N, B, -1), o)
        gate, up = F.linear(F.rms_norm(x, (d,), norm2, EPS), gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, down)

    def rotate(self, x):
        half = x.shape[-1] // 2
        return x * self.cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * self.sin

    def logits(self, x):
        return F.linear(F.rms_norm(x, (self.shape.d,), self.norm, EPS), self.head)


class Drafter:
    """A DFlash draft pass, and the same with DSpine's operations, whose implementation is an argument."""

    def __init__(self, shape, head):
        self.shape, self.backbone = shape, Backbone(shape, shape.L, head)
        d, r = shape.d, shape.r
        self.injections = [
            (normal(d, scale=0.1, mean=1.0), normal(r, d), normal(d, 2 * r), normal(d), normal(d, r))
            for _ in range(shape.L)
        ]
        self.table = reference.rms(normal(shape.V, r, scale=1.0), EPS)

    def set_batch(self, N: int) -> None:
        s = self.shape
        self.backbone.set_batch(N)
        self.x = normal(N, s.B, s.d, scale=1.0)
        self.anchor = reference.rms(normal(N, s.r, scale=1.0), EPS)
        # half of the rows greedy, half sampled
        self.temperature = torch.tensor([0.0, 1.0], device=self.x.device).repeat(N)[:N].contiguous()
        self.uniforms = torch.rand(N, s.B - 1, device=self.x.device)

    def draft(self, inject=None):
        x, features = self.x, None
        for weights, cache, injection in zip(self.backbone.layers, self.backbone.caches, self.injections):
            before = x = self.backbone.run_layer(x, cache, *weights)
            if inject is not None:
                x, features = inject(x, self.anchor, *injection, EPS)
        return before, features, self.backbone.logits(x[:, 1:])

    def inject_all(self, inject):
        for injection in self.injections:
            out = inject(self.x, self.anchor, *injection, EPS)
        return out

    def cache_arguments(self, before, features, candidates):
        norm_weight, _, *gate_and_write = self.injections[-1]
        head = self.backbone.head
        return (
            before[:, 1:],
            features[:, 1:],
            self.anchor,
            candidates,
            self.table,
            head,
            self.backbone.norm,
            *gate_and_write,
            EPS,
        )

    def tail(self, ops, before, features, logits):
        _, candidates = ops.select_candidates(logits, self.shape.K)
        scores = ops.transition_cache(*self.cache_arguments(before, features, candidates))
        return ops.walk_transition_cache(scores, candidates, self.temperature, self.uniforms)


def kernel_operations() -> SimpleNamespace:
    from dspine.kernels.injection import gated_adjacent_injection
    from dspine.kernels.select_candidates import select_candidates
    from dspine.kernels.transition_cache import transition_cache
    from dspine.kernels.walk_transition_cache import walk_transition_cache

    return SimpleNamespace(
        gated_adjacent_injection=gated_adjacent_injection,
        select_candidates=select_candidates,
        transition_cache=transition_cache,
        walk_transition_cache=walk_transition_cache,
    )
