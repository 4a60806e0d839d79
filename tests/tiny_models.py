"""Tiny targets and drafters that tests build from a seed, so that nothing needs to be downloaded."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from dspine.modeling_dspine import DSpineConfig, DSpineModel


MASK_ID = 96


def tiny_target_config(config_class=LlamaConfig, **overrides):
    fields = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return config_class(**(fields | overrides))


def tiny_target(config_class=LlamaConfig, seed=0, **overrides):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(tiny_target_config(config_class, **overrides)).eval()


def tiny_drafter(target, seed=1, spread=0.3, **overrides):
    """A bound random drafter; `spread` widens its weights so that it proposes varied tokens instead of one."""
    fields = {
        "mask_token_id": MASK_ID,
        "block_size": 6,
        "num_hidden_layers": 2,
        "transfer_rank": 8,
        "num_candidates": 8,
    }
    torch.manual_seed(seed)
    drafter = DSpineModel(DSpineConfig.from_target(target.config, **(fields | overrides))).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, spread)
    drafter.bind_target(target, init_transfer=True)
    return drafter


def scripted_drafter(target, answer: torch.Tensor, wrong_every: int | None = None, **overrides):
    """A drafter that proposes `answer` `[length]` at its positions (one token wrong now and then), to exercise acceptance.

    The proposal is replaced, not the loop: caches, masks and positions still come from a real drafter.
    """
    drafter = tiny_drafter(target, **overrides)
    propose, forward = drafter.propose, drafter.forward
    seen = {}

    def remember(**kwargs):
        slots = kwargs["noise_embeds"].shape[1]
        seen["positions"] = kwargs["position_ids"][:, -slots:]
        return forward(**kwargs)

    def scripted(outputs, anchor_ids, temperature=None, uniforms=None):
        proposal = propose(outputs, anchor_ids, temperature, uniforms)
        positions = seen["positions"][:, 1:].clamp_max(len(answer) - 1)
        tokens = answer[positions]
        if wrong_every:
            tokens = torch.where(positions % wrong_every == 0, (tokens + 1) % target.config.vocab_size, tokens)
        proposal.tokens = tokens
        proposal.candidates = tokens[..., None].expand(-1, -1, proposal.probs.shape[-1]).clone()
        proposal.probs = torch.zeros_like(proposal.probs)
        proposal.probs[..., 0] = 1.0
        proposal.candidates[..., 1:] = (tokens[..., None] + 1) % target.config.vocab_size
        return proposal

    drafter.propose, drafter.forward = scripted, remember
    return drafter
