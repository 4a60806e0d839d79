"""Sizes of the model whose operations are timed, and random tensors for it."""

from types import SimpleNamespace

import torch


EPS = 1e-6


def make_shape(tiny: bool) -> SimpleNamespace:
    if tiny:
        sizes = {
            "d": 256,
            "intermediate": 512,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 64,
            "V": 5000,
            "r": 64,
            "verifier_layers": 3,
        }
        return SimpleNamespace(**sizes, B=16, K=16, L=2, context=128, training_blocks=32)
    sizes = {"d": 4096, "intermediate": 12288, "heads": 32, "kv_heads": 8, "head_dim": 128, "V": 151936, "r": 256}
    return SimpleNamespace(**sizes, verifier_layers=36, B=16, K=16, L=5, context=1024, training_blocks=1536)


def normal(*shape, scale=0.02, mean=0.0):
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(mean, scale)
