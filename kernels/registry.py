"""Registers the Triton kernels with the operations they replace. Importing this file does not import Triton.

Every kernel has a check that says in one sentence why it cannot run on given arguments, else returns None. Checks run on every call,
also while `torch.compile` traces, so they only look at attributes: no device work, no synchronisation.
"""

import importlib.util
import os

import torch


MAX_RANK = 512
MAX_SLOTS = 64
MAX_CANDIDATES = 64

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Triton decides when a kernel is defined whether it will be interpreted, so one process is either interpreted or not
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


def register_kernels(register) -> str | None:
    """Calls `register(op, "triton", function, check)` for every kernel; returns the reason if there are none to register."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; install it with `pip install dspine[triton]`"
    register("gated_adjacent_injection", "triton", gated_adjacent_injection, check_gated_adjacent_injection)
    register("select_candidates", "triton", select_candidates, check_select_candidates)
    register("transition_cache", "triton", transition_cache, check_transition_cache)
    register("walk_transition_cache", "triton", walk_transition_cache, check_walk_transition_cache)
    return None


def gated_adjacent_injection(*args, **kwargs):
    from .injection import gated_adjacent_injection as function

    return function(*args, **kwargs)


def select_candidates(*args, **kwargs):
    from .select_candidates import select_candidates as function

    return function(*args, **kwargs)


def transition_cache(*args, **kwargs):
    from .transition_cache import transition_cache as function

    return function(*args, **kwargs)


def walk_transition_cache(*args, **kwargs):
    from .walk_transition_cache import walk_transition_cache as function

    return function(*args, **kwargs)


def check_gated_adjacent_injection(
    hidden_states,
    anchor_features,
    norm_weight,
    feature_weight,
    gate_weight,
    gate_bias,
    write_weight,
    eps,
    gate="channel",
) -> str | None:
    reason = _gate_reason(gate, gate_weight, gate_bias)
    reason = reason or _device_reason(hidden_states, anchor_features, feature_weight, gate_weight, write_weight)
    if reason is not None:
        return reason
    if hidden_states.dim() != 3 or not 2 <= hidden_states.shape[1] <= MAX_SLOTS:
        return f"hidden_states must be [N, B, d] with 2 <= B <= {MAX_SLOTS}, got {list(hidden_states.shape)}"
    if hidden_states.numel() == 0:
        return "hidden_states is empty"
    reason = _row_reason("hidden_states", hidden_states) or _row_reason("anchor_features", anchor_features)
    reason = reason or _rank_reason(feature_weight.shape[0])
    return reason or _dtype_reason(hidden_states, feature_weight, gate_weight, write_weight)


def check_select_candidates(logits, num_candidates) -> str | None:
    reason = _device_reason(logits) or _gradient_reason(logits)
    if reason is not None:
        return reason
    if logits.dtype not in DTYPES:
        return f"logits must be bfloat16, float16 or float32, got {logits.dtype}"
    if logits.dim() != 3 or logits.numel() == 0:
        return f"logits must be [N, T, V] and not empty, got {list(logits.shape)}"
    if not 1 <= num_candidates <= min(MAX_CANDIDATES, logits.shape[-1]):
        return f"between 1 and {MAX_CANDIDATES} candidates of at least as many tokens are supported, got {num_candidates} of {logits.shape[-1]}"
    if logits.shape[-1] >= 2**20:
        return f"vocabularies of 2^20 tokens or more are not supported, got {logits.shape[-1]}"
    return _row_reason("logits", logits)


def check_transition_cache(
    hidden_states,
    features,
    anchor_features,
    candidates,
    transfer_table,
    head_weight,
    norm_weight,
    gate_weight,
    gate_bias,
    write_weight,
    eps,
    gate="channel",
) -> str | None:
    tensors = (
        hidden_states,
        features,
        anchor_features,
        transfer_table,
        head_weight,
        norm_weight,
        gate_weight,
        gate_bias,
        write_weight,
    )
    reason = _gate_reason(gate, gate_weight, gate_bias)
    reason = reason or _device_reason(candidates, *tensors) or _gradient_reason(*tensors)
    if reason is not None:
        return reason
    if hidden_states.numel() == 0:
        return "hidden_states is empty"
    if candidates.shape[-1] > MAX_CANDIDATES:
        return f"at most {MAX_CANDIDATES} candidates are supported, got {candidates.shape[-1]}"
    if not (candidates.is_contiguous() and head_weight.is_contiguous() and transfer_table.is_contiguous()):
        return "candidates, head_weight and transfer_table must be contiguous"
    if transfer_table.dtype not in DTYPES or head_weight.dtype not in DTYPES:
        return f"the tables must be bfloat16, float16 or float32, got {transfer_table.dtype} and {head_weight.dtype}"
    for name, tensor in (
        ("hidden_states", hidden_states),
        ("features", features),
        ("anchor_features", anchor_features),
    ):
        reason = _row_reason(name, tensor)
        if reason is not None:
            return reason
    return _rank_reason(features.shape[-1]) or _dtype_reason(hidden_states, gate_weight, write_weight)


def check_walk_transition_cache(
    scores, candidates, temperature=None, uniforms=None, base_scores=None, guidance=0.0
) -> str | None:
    reason = _device_reason(scores, candidates) or _gradient_reason(scores)
    if reason is not None:
        return reason
    if scores.dtype not in DTYPES:
        return f"scores must be bfloat16, float16 or float32, got {scores.dtype}"
    if scores.dim() != 4 or scores.numel() == 0:
        return f"scores must be [N, T, K, K] and not empty, got {list(scores.shape)}"
    if scores.shape[-1] > MAX_CANDIDATES:
        return f"at most {MAX_CANDIDATES} candidates are supported, got {scores.shape[-1]}"
    if not (scores.is_contiguous() and candidates.is_contiguous()):
        return "scores and candidates must be contiguous"
    if temperature is not None and (
        uniforms is None or temperature.device != scores.device or uniforms.device != scores.device
    ):
        return "temperature needs uniforms, both on the device of the scores"
    if base_scores is not None and (base_scores.shape != candidates.shape or base_scores.device != scores.device):
        return (
            f"base_scores must be {list(candidates.shape)} on the device of the scores, got {list(base_scores.shape)}"
        )
    return None


def _gate_reason(gate, gate_weight, gate_bias) -> str | None:
    if gate != "channel":
        return f"only the gate form 'channel' has a kernel, got {gate!r}"
    if gate_weight is None or gate_bias is None:
        return "the gate needs a weight and a bias"
    return None


def _device_reason(first, *others) -> str | None:
    if not first.is_cuda:
        if not INTERPRETED:
            return f"the kernels need a CUDA device (or TRITON_INTERPRET=1), the tensors are on {first.device}"
        if first.dtype == torch.bfloat16 or any(other.dtype == torch.bfloat16 for other in others):
            return "Triton's interpreter computes bfloat16 wrongly"
    for other in others:
        if other.device != first.device:
            return f"all tensors must be on one device, got {first.device} and {other.device}"
    return None


def _gradient_reason(*tensors) -> str | None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "gradients are needed and this kernel has no backward"
    return None


def _rank_reason(rank) -> str | None:
    return None if rank <= MAX_RANK else f"the rank must be at most {MAX_RANK}, got {rank}"


def _row_reason(name, tensor) -> str | None:
    return (
        None if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else f"the last dimension of {name} must be contiguous"
    )


def _dtype_reason(hidden_states, *weights) -> str | None:
    if hidden_states.dtype not in DTYPES:
        return f"hidden_states must be bfloat16, float16 or float32, got {hidden_states.dtype}"
    if torch.is_autocast_enabled(hidden_states.device.type):
        return None
    for weight in weights:
        if weight.dtype != hidden_states.dtype:
            return f"outside autocast the weights must have the dtype of hidden_states, got {weight.dtype} and {hidden_states.dtype}"
    return None
