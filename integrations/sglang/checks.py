"""What is refused at start, each with one sentence, so that nothing is served that this integration cannot honour."""


def check_draft(config, block_size: int) -> None:
    """Checks that a DSpine configuration can be served with blocks of `block_size` slots.

    Raises:
        ValueError: it cannot.
    """
    if not 2 <= block_size <= config.block_size:
        raise ValueError(
            f"--speculative-num-draft-tokens must be between 2 and the drafter's trained block size {config.block_size}, got {block_size}"
        )
    if config.mask_token_id is None:
        raise ValueError("mask_token_id is not set in the drafter's config.json, so its blocks have no input")
    if config.is_causal is False and "sliding_attention" in config.layer_types:
        raise ValueError(
            "SGLang's sliding-window draft layers are causal, but the drafter was configured with is_causal=false"
        )
    if float(config.input_embedding_scale) != 1.0:
        raise ValueError(
            f"targets that scale their input embeddings are not supported in SGLang yet (input_embedding_scale={config.input_embedding_scale})"
        )
    if getattr(config, "soft_token_features", False):
        raise ValueError("drafters with soft_token_features=true are not supported in SGLang")
    if config.hidden_act != "silu":
        raise ValueError(
            f"SGLang's draft layers use silu, the drafter was configured with hidden_act={config.hidden_act!r}"
        )


def check_server(args) -> None:
    """Checks the resolved server arguments (any object with SGLang's field names).

    Raises:
        ValueError: an option contradicts what a DSpine drafter does.
    """
    refused = {
        "enable_dp_attention": "data-parallel attention gives ranks different batches, and the decoding tail needs all of them",
        "enable_dp_lm_head": "the decoding tail needs the output head sharded over the tensor-parallel group",
        "speculative_use_block_verification": "drafts are accepted token by token with the q that proposed them",
    }
    for name, reason in refused.items():
        if getattr(args, name, False):
            raise ValueError(f"--{name.replace('_', '-')} is not supported with DSPINE: {reason}")
    if not str(getattr(args, "device", None) or "cuda").startswith("cuda"):
        raise ValueError(f"DSPINE is served on CUDA devices only, got --device {args.device}")
    if getattr(args, "pp_size", 1) != 1:
        raise ValueError(f"DSPINE supports no pipeline parallelism, got --pp-size {args.pp_size}")
    if getattr(args, "disaggregation_mode", "null") != "null":
        raise ValueError("DSPINE does not support disaggregated prefill and decode")
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        value = getattr(args, name, None)
        if value is not None and float(value) != 1.0:
            raise ValueError(
                f"--{name.replace('_', '-')} must be 1.0 with DSPINE, which accepts exactly and not by threshold, got {value}"
            )


def check_target(config, target) -> None:
    """Checks that the drafter was made for this target (SGLang's `ModelConfig`).

    Raises:
        ValueError: a size differs; the message names it and both values.
    """
    text = target.hf_text_config
    pairs = {
        "hidden_size": (text.hidden_size, config.hidden_size),
        "num_hidden_layers": (text.num_hidden_layers, config.num_target_layers),
        "vocab_size": (target.vocab_size, config.vocab_size),
    }
    for name, (got, wanted) in pairs.items():
        if got != wanted:
            raise ValueError(
                f"the drafter was made for a target with {name}={wanted}, the served one has {name}={got}"
            )
    if not 0 <= config.mask_token_id < target.vocab_size:
        raise ValueError(
            f"mask_token_id must be a row of the target's embedding, 0 to {target.vocab_size - 1}, got {config.mask_token_id}"
        )
