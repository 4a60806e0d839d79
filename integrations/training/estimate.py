"""What a run will need, from its shapes alone: parameters, floating-point operations, memory, time."""

from torch import nn

from dspine.modeling_dspine.modeling_dspine import DSpineModel

from .fused_cross_entropy import chunk_rows


def estimate(
    drafter: DSpineModel,
    target: nn.Module | None,
    tokens: int,
    anchors: int,
    tflops: float = 300.0,
    target_bytes: int = 2,
) -> dict[str, float]:
    """Estimates for one step of `anchors` blocks over a row of `tokens` tokens.

    Args:
        target: None leaves it out.
        tflops: achieved TFLOP/s to turn operations into seconds.
        target_bytes: bytes per number of the target and of activations.

    Returns:
        `drafter_parameters`, `export_mb` (bf16), `target_parameters`, `drafter_tflop`, `target_tflop` per step, `step_seconds`,
        and gigabytes: `optimizer_gb` (fp32 weights, gradients and two moments), `activations_gb`, `logits_gb` (one chunk),
        `target_gb` (weights and one pass), `peak_gb`.
    """
    config = drafter.config
    d, ffn, layers, block = config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.block_size
    q_width, kv_width = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    slots, rows, taps = anchors * block, anchors * (block - 1), len(config.target_layer_ids)
    parameters = sum(p.numel() for p in drafter.parameters())
    trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    terms = 2 if config.refinement else 1
    per_slot = layers * (2 * d * (q_width + kv_width) + 3 * d * ffn)
    if config.uses_transfer_space:
        per_slot += len(drafter.injections) * 4 * d * config.transfer_rank
    context = tokens * (taps * d * d + layers * 2 * d * kv_width)
    backbone = 6 * (slots * per_slot + context)
    if (
        config.soft_token_features
    ):  # attention over the whole table, its backward pass two and a half times the forward
        backbone += 14 * len(config.injection_layers) * slots * config.vocab_size * config.transfer_rank
    heads = terms * 4 * rows * config.vocab_size * d
    drafter_flop = backbone + heads
    # saved for the backward pass of a layer: norms, projections, attention, gated MLP
    saved = layers * (slots * (8 * d + 2 * q_width + 2 * kv_width + 4 * ffn) + tokens * 2 * kv_width)
    if config.uses_transfer_space:
        saved += layers * slots * (4 * d + 6 * config.transfer_rank)
    activations = target_bytes * (saved + tokens * (taps + 3) * d) + terms * rows * d * (2 * target_bytes + 4)
    logits = chunk_rows(rows, config.vocab_size, target_bytes) * config.vocab_size * target_bytes
    target_parameters = 0 if target is None else sum(p.numel() for p in target.parameters())
    target_flop = 2 * target_parameters * tokens
    text = None if target is None else target.config.get_text_config()
    width = 0 if text is None else (taps + 6) * d + 3 * (getattr(text, "intermediate_size", None) or 4 * d)
    target_memory = target_bytes * (target_parameters + tokens * width)
    optimizer = 4 * parameters + 12 * trained
    return {
        "drafter_parameters": parameters,
        "export_mb": parameters * 2 / 2**20,
        "target_parameters": target_parameters,
        "drafter_tflop": drafter_flop / 1e12,
        "target_tflop": target_flop / 1e12,
        "step_seconds": (drafter_flop + target_flop) / (tflops * 1e12),
        "optimizer_gb": optimizer / 2**30,
        "activations_gb": activations / 2**30,
        "logits_gb": logits / 2**30,
        "target_gb": target_memory / 2**30,
        "peak_gb": (optimizer + activations + logits + target_memory) / 2**30,
    }


__all__ = ["estimate"]
