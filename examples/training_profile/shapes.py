"""The shapes that are timed, and what a training step needs of them: random weights, tokens and states."""

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, Qwen3Config

from dspine.integrations.training import PackedDataset, from_records
from dspine.integrations.training.masks import PACKED_ATTENTION
from dspine.modeling_dspine import DSpineConfig, DSpineModel


SHAPES = {
    "smollm2-135m": {
        "target": LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
        ),
        "drafter": {"transfer_rank": 128},
        "tokens": 20480,
        "anchors": 1536,
        "document": 320,
    },
    "qwen3-8b": {
        "target": Qwen3Config(
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=40960,
        ),
        "drafter": {"transfer_rank": 256},
        "tokens": 2048,
        "anchors": 512,
        "document": 2048,
    },
    "tiny": {
        "target": LlamaConfig(
            vocab_size=300,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
        ),
        "drafter": {"transfer_rank": 16},
        "tokens": 512,
        "anchors": 16,
        "document": 100,
    },
}


class Shape:
    """Embeddings, head and one row of a section's shape, without the target's layers."""

    def __init__(self, name: str, args):
        shape = SHAPES[name]
        self.name, self.target, self.anchors = name, shape["target"], shape["anchors"]
        self.device = torch.device(args.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.block_size, self.overrides = args.block_size, shape["drafter"]
        config = self.target
        with torch.device(self.device):
            self.embed = nn.Embedding(config.vocab_size, config.hidden_size, dtype=self.dtype).requires_grad_(False)
            self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=self.dtype)
        self.head.requires_grad_(False)
        self.dataset = self.rows(1, shape)
        self.row = {k: v.to(self.device) for k, v in self.dataset[(0, 0)].items()}

    def rows(self, count: int, shape: dict | None = None) -> PackedDataset:
        shape, random = shape or SHAPES[self.name], np.random.default_rng(0)
        length = shape["document"]
        records = [
            {"input_ids": random.integers(100, self.target.vocab_size, size=length), "prompt_length": length // 4}
            for _ in range(count * max(1, shape["tokens"] // length))
        ]
        return PackedDataset(from_records(records), shape["tokens"], shape["anchors"])

    def config(self, kind: str) -> DSpineConfig:
        fields = self.overrides | {"num_hidden_layers": min(5, self.target.num_hidden_layers - 1)}
        if not kind.startswith("dspine"):
            fields |= {"injection": False, "refinement": False}
        return DSpineConfig.from_target(self.target, mask_token_id=16, block_size=self.block_size, **fields)

    def drafter(self, kind: str) -> DSpineModel:
        with torch.device(self.device):  # billions of random numbers are slow elsewhere
            drafter = DSpineModel(self.config(kind)).float()
        drafter.set_attn_implementation(PACKED_ATTENTION)
        return drafter

    def states(self, layers: int) -> torch.Tensor:
        """Stand-ins for the outputs of some of the target's layers, `[1, L, layers * d]`."""
        width = layers * self.target.hidden_size
        return torch.randn(1, self.dataset.length, width, device=self.device, dtype=self.dtype)

    def taps(self) -> torch.Tensor:
        return self.states(len(self.config("dflash").target_layer_ids))

    def final(self) -> torch.Tensor:
        return self.states(1)

    def autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")
