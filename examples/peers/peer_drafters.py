"""What the peers share: the backbone in the words of Qwen 3, drafters that choose tokens by a peer's head, and their folders.

A peer's folder holds `config.json` (of the backbone), `model.safetensors` (what decoding uses) and `peer.json` (which peer it is);
[`load_peer`] makes a drafter of it that `spec_generate`, `examples/benchmark.py` and the walk of training's evaluation take.
"""

import importlib
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from dspine.integrations.evaluation.results import write_json
from dspine.modeling_dspine import DSpineConfig, DSpineModel, DSpineProposal


BACKBONE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "max_position_embeddings",
    "rope_parameters",
)
# which script in this folder knows a peer's head; plain DFlash has none
SCRIPTS = {"dflash2": "speculators_peers", "dspark": "speculators_peers", "domino": "specforge_peers"}


def backbone_fields(config: DSpineConfig) -> dict:
    """The backbone as arguments of `Qwen3Config`, which all peers build their layers from."""
    return {name: getattr(config, name) for name in BACKBONE_FIELDS}


def load_target(path: str, dtype: torch.dtype, device: str) -> nn.Module:
    """A causal language model in evaluation mode."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()


class PeerDrafter(DSpineModel):
    """A drafter for `spec_generate` that chooses tokens left to right, each given the one chosen before.

    Subclasses add a peer's head and say in `score` what it makes of one slot. When sampling, q is over the best `num_candidates`
    tokens of the head's scores, as for every other drafter.
    """

    def score(self, slot: int, hidden_states, logits, left, state):
        """Scores of slot `slot` (0 is the first predicted one).

        Args:
            hidden_states: `[batch, 1, d]` of the slot; logits: `[batch, 1, V]`, the target's head on them.
            left: `[batch]`, the token to its left.
            state: what the call for the slot before returned; None at first.

        Returns:
            token ids or None for the whole vocabulary, their scores `[batch, 1, n]`, and a state for the next slot.
        """
        raise NotImplementedError

    @torch.no_grad()
    def propose(self, outputs, anchor_ids, temperature=None, uniforms=None) -> DSpineProposal:
        hidden = outputs.last_hidden_state[:, 1:]
        logits = self.compute_logits(hidden)
        chosen, candidates, probs, left, state = [], [], [], anchor_ids, None
        for slot in range(hidden.shape[1]):
            here = slice(slot, slot + 1)
            ids, scores, state = self.score(slot, hidden[:, here], logits[:, here], left, state)
            if ids is None:
                scores, ids = scores.topk(self.config.num_candidates, dim=-1)
            ids, scores = ids[:, 0], scores[:, 0].float()
            q = nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).float()
            if temperature is not None:
                sampled = torch.softmax(scores / temperature[:, None].clamp_min(1e-6), -1)
                q = torch.where(temperature[:, None] > 0, sampled, q)
            if uniforms is None:
                pick = q.argmax(-1)
            else:
                pick = (q.double().cumsum(-1) <= uniforms[:, slot, None]).sum(-1).clamp_max(q.shape[-1] - 1)
            left = ids.gather(-1, pick[:, None])[:, 0]
            for parts, value in ((chosen, left), (candidates, ids), (probs, q)):
                parts.append(value)
        return DSpineProposal(torch.stack(chosen, 1), torch.stack(candidates, 1), torch.stack(probs, 1))


def make_drafter(config: DSpineConfig, peer: dict) -> DSpineModel:
    """The decoding model of a peer, without its weights.

    Args:
        config: of the backbone, with injection and refinement off.
        peer: contents of `peer.json`: `kind` and what its head needs.

    Raises:
        ValueError: the kind is unknown.
    """
    kind = peer["kind"]
    if kind == "dflash":
        return DSpineModel(config)
    if kind not in SCRIPTS:
        raise ValueError(f"kind of a peer must be one of {['dflash', *SCRIPTS]}, got {kind!r}")
    return importlib.import_module(SCRIPTS[kind]).make_drafter(config, peer)


def load_weights(drafter: DSpineModel, state: dict[str, torch.Tensor]) -> DSpineModel:
    """Puts a trained peer's weights into the decoding model.

    Raises:
        ValueError: a weight has no place, or a place no weight; the message names some.
    """
    own = drafter.state_dict()
    missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or unknown:
        raise ValueError(f"the peer's weights do not fit: missing {missing[:5]}, unknown {unknown[:5]}")
    drafter.load_state_dict(state)
    return drafter


def save_peer(
    folder: str | Path, config: DSpineConfig, peer: dict, state: dict[str, torch.Tensor], dtype: torch.dtype
) -> None:
    """Writes a peer's folder; the weights last and in one move, so that a reader never sees half of them."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    write_json(folder / "peer.json", peer)
    temporary = folder / "model.tmp"
    state = {name: value.detach().to(dtype).contiguous().cpu() for name, value in state.items()}
    save_file(state, temporary, metadata={"format": "pt"})
    temporary.replace(folder / "model.safetensors")


def load_peer(folder: str | Path, dtype: torch.dtype) -> DSpineModel:
    """A folder written by [`save_peer`] as a drafter."""
    folder = Path(folder)
    peer = json.loads((folder / "peer.json").read_text(encoding="utf-8"))
    drafter = make_drafter(DSpineConfig.from_pretrained(folder), peer)
    return load_weights(drafter, load_file(folder / "model.safetensors")).to(dtype).eval()


__all__ = [
    "BACKBONE_FIELDS",
    "PeerDrafter",
    "backbone_fields",
    "load_peer",
    "load_target",
    "load_weights",
    "make_drafter",
    "save_peer",
]
