"""The training loss of a drafter: `DSpineObjective` holds the drafter and computes loss and statistics from one packed row.

    loss = a * CE(base) + b * CE(refined, gold left neighbour) + lambda * supervision  [+ c * distance to the target's distribution]

Every term is a weighted mean over the predicted slots 1..B-1 of all blocks; slots past the end of their document weigh nothing.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from dspine.modeling_dspine.modeling_dspine import DSpineModel, DSpineModelOutput, DSpinePreTrainedModel
from dspine.modeling_dspine.reference_dspine import last_write_refinement
from dspine.modeling_dspine.registry_dspine import use_implementation
from dspine.modeling_dspine.target_dspine import transfer_table

from .fused_cross_entropy import fused_linear_cross_entropy
from .fused_divergence import fused_linear_divergence


@dataclass
class LossArguments:
    """Weights of the loss terms. The supervision's kind and weight are the drafter's own (`config.supervision*`).

    The base distribution of a drafter without refinement is the one that drafts are sampled from, so it is weighted by
    `refined_weight` there. `distance` is `"none"`, `"kl"` or `"tv"`: from the target's distribution to the one that drafts are
    sampled from, weighted by `distance_weight`; with `refined_weight = 0` it takes the place of that cross-entropy. It costs two
    more sets of logits per slot.
    """

    base_weight: float = 1.0
    refined_weight: float = 1.0
    distance: str = "none"
    distance_weight: float = 1.0
    slot_weighting: str = "decay"
    decay_gamma: float | None = None
    dpace_alpha: float = 0.5
    supervision_temperature: float | None = None
    cross_entropy_backend: str = "auto"

    def __post_init__(self):
        for name, allowed in {
            "slot_weighting": ("decay", "dpace", "uniform"),
            "distance": ("none", "kl", "tv"),
            "cross_entropy_backend": ("auto", "liger"),
        }.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {list(allowed)}, got {getattr(self, name)!r}")
        for name in ("base_weight", "refined_weight", "distance_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.refined_weight == 0 and (self.distance == "none" or self.distance_weight == 0):
            raise ValueError(
                "refined_weight must be positive without a distance that trains drafts in its place, got 0"
            )

    def gamma(self, block_size: int) -> float:
        """7 for 16 slots, 5 for 10, 4 for 8: DFlash's choices, a straight line between them."""
        return self.decay_gamma or max(1.0, 4 + (block_size - 8) * 3 / 8)


def block_labels(
    input_ids: torch.Tensor,  # [L]
    document_starts: torch.Tensor,  # [L]
    loss_mask: torch.Tensor,  # [L] bool
    anchors: torch.Tensor,  # [A]
    anchor_mask: torch.Tensor,  # [A] bool
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens at anchor..anchor + B - 1, `[A, B]`, and which predicted slots count, `[A, B - 1]` bool.

    A slot counts while every token from the anchor on is a response token of the anchor's document: decoding would stop there.
    """
    length = input_ids.shape[0]
    index = anchors[:, None] + torch.arange(block_size, device=anchors.device)
    inside = index < length
    index = index.clamp_max(length - 1)
    counts = inside & loss_mask[index] & (document_starts[index] == document_starts[anchors][:, None])
    counts = counts.long().cumprod(-1).bool() & anchor_mask[:, None]
    return input_ids[index], counts[:, 1:]


def slot_weights(
    counts: torch.Tensor,  # [A, T] bool
    arguments: LossArguments,
    gold_log_probs: torch.Tensor | None = None,  # [A, T] fp32
) -> torch.Tensor:  # [A, T] fp32, not differentiable
    """Weight of every predicted slot.

    `"decay"`: `exp(-(k - 1) / gamma)`. `"dpace"` (D-PACE, arXiv 2605.18810): `w_j = sum_{m >= j} prod_{i <= m} ((1 - a) q_i + a)`
    with q the probability of the gold token, so a slot counts as much as the accepted length depends on it.
    """
    slots = counts.shape[1]
    if arguments.slot_weighting == "dpace":
        q = torch.exp(gold_log_probs.detach().float())
        reach = ((1 - arguments.dpace_alpha) * q + arguments.dpace_alpha).cumprod(-1) * counts
        return reach.flip(-1).cumsum(-1).flip(-1) * counts
    steps = torch.arange(slots, device=counts.device, dtype=torch.float32)
    if arguments.slot_weighting == "uniform":
        steps = torch.zeros_like(steps)
    return torch.exp(-steps / arguments.gamma(slots + 1)) * counts


def draft_packed(
    drafter: DSpineModel,
    context_hidden_states: torch.Tensor,  # [1, L, taps * d]
    position_ids: torch.Tensor,  # [L]
    anchors: torch.Tensor,  # [A]
    anchor_ids: torch.Tensor,  # [A]
    masks,
    output_features: bool = False,
) -> DSpineModelOutput:
    """One forward pass over all blocks of a row; outputs reshaped to one block per row: `[A, B, ...]`."""
    config, count = drafter.config, anchors.shape[0]
    binding = drafter.binding
    offsets = torch.arange(config.block_size, device=anchors.device)
    noise_ids = torch.where(offsets == 0, anchor_ids[:, None], config.mask_token_id)
    outputs = drafter(
        noise_embeds=binding.embed(noise_ids.view(1, -1), config.input_embedding_scale).detach(),
        context_hidden_states=context_hidden_states,
        anchor_ids=anchor_ids[None],
        attention_mask=masks,
        position_ids=torch.cat([position_ids, (position_ids[anchors][:, None] + offsets).view(-1)])[None],
        use_cache=False,
        block_size=config.block_size,
        output_features=output_features,
    )

    def blocks(x):
        return None if x is None else x.view(count, config.block_size, -1)

    return DSpineModelOutput(
        last_hidden_state=blocks(outputs.last_hidden_state),
        pre_write_hidden_state=blocks(outputs.pre_write_hidden_state),
        features=blocks(outputs.features),
        layer_features=tuple(map(blocks, outputs.layer_features)) if output_features else None,
    )


class DSpineObjective(DSpinePreTrainedModel):
    """A drafter and its loss as one module, so that DDP, FSDP and autocast see a single forward pass.

    Saves and loads as the drafter itself: checkpoints of a training run are ordinary drafters. With an `adapter` (the `PeftModel`
    around the drafter) it saves that alone.
    """

    def __init__(
        self, drafter: nn.Module, arguments: LossArguments | None = None, compile: bool = False, adapter=None
    ):
        super().__init__(drafter.config)
        self.drafter = drafter
        # not registered as a module: its parameters are the drafter's
        object.__setattr__(self, "adapter", adapter)
        self.arguments = arguments or LossArguments()
        self._states = torch.compile(self._compute_states, dynamic=False) if compile else self._compute_states

    def get_input_embeddings(self):
        return None  # borrowed from the target; FSDP asks

    def get_output_embeddings(self):
        return None

    def save_pretrained(self, save_directory, state_dict=None, **kwargs):
        """Saves the drafter or its adapter; `state_dict` holds this module's tensors, gathered, where they are sharded."""
        if state_dict is not None:
            state_dict = {name.removeprefix("drafter."): value for name, value in state_dict.items()}
        if self.adapter is not None:
            if state_dict is not None:
                state_dict = {f"base_model.model.{name}": value for name, value in state_dict.items()}
            self.adapter.save_pretrained(
                save_directory, state_dict=state_dict, is_main_process=kwargs.get("is_main_process", True)
            )
            return
        if self.config.store_transfer_table and self.config.uses_transfer_space:
            if state_dict is None:
                self.drafter.ensure_transfer_table()  # A has changed since the table was computed
            else:
                weight, head = state_dict["transfer.weight"], self.drafter.binding.head_weight
                table = transfer_table(head, weight.to(head.device), self.config.rms_norm_eps, weight.dtype)
                # the drafter's own A may be sharded, so it must not be asked to compute the table
                self.drafter.set_transfer_table(table)
                state_dict["transfer_table"] = table
        self.drafter.save_pretrained(save_directory, state_dict=state_dict, **kwargs)

    def load_state_dict(self, state_dict, *args, **kwargs):
        if not any(name.startswith("drafter.") for name in state_dict):
            return self.drafter.load_state_dict(state_dict, *args, **kwargs)
        return super().load_state_dict(state_dict, *args, **kwargs)

    def _compute_states(self, context_hidden_states, position_ids, anchors, tokens, masks):
        """Everything before the output head: base and refined states `[A, T, d]` and the supervision's inputs."""
        config, drafter = self.config, self.drafter
        supervised = config.supervision != "none" and config.supervision_weight > 0 and config.uses_transfer_space
        outputs = draft_packed(
            drafter, context_hidden_states, position_ids, anchors, tokens[:, 0], masks, output_features=supervised
        )
        base, refined, similarity, features = outputs.last_hidden_state[:, 1:], None, None, None
        if config.refinement or supervised:
            gold = drafter.token_features(tokens)  # [A, B, r]
        if config.refinement:
            module = drafter.injections[str(config.num_hidden_layers - 1)]
            own = outputs.features[:, 1:]
            refined = last_write_refinement(
                outputs.pre_write_hidden_state[:, 1:],
                own,
                gold[:, :-1].to(own.dtype),
                drafter.norm.weight,
                **module.write_weights,
            )
        if supervised:
            features = torch.stack([u[:, 1:] for u in outputs.layer_features])  # [layers, A, T, r]
            if config.supervision == "cosine":
                # a learned z that could follow u would collapse: nothing flows into it from here
                similarity = F.cosine_similarity(features.float(), gold[:, 1:].detach().float(), dim=-1).mean(0)
        return base, refined, similarity, features

    def forward(
        self,
        context_hidden_states: torch.Tensor,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        document_starts: torch.Tensor,
        loss_mask: torch.Tensor,
        anchors: torch.Tensor,
        anchor_mask: torch.Tensor,
        masks=None,
        target_hidden_states: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        r"""
        context_hidden_states (`torch.Tensor` of shape `[1, L, len(target_layer_ids) * hidden_size]`):
            The target's taps of the row.
        input_ids, position_ids, document_starts, loss_mask, anchors, anchor_mask: see [`PackedDataset`].
        masks: of [`slot_masks`].
        target_hidden_states (`torch.Tensor` of shape `[1, L, hidden_size]`, *optional*):
            What the target's head sees; needed for a distance.

        Returns a dict of fp32 scalars: `loss`, its unweighted terms (`loss_base`, `loss_refined`, `loss_distance`, `loss_supervision`), and
        `accepted_length_base` / `accepted_length_refined`: over all anchors of the row, tokens a round would commit if its left
        neighbours were right.
        """
        config, arguments = self.config, self.arguments
        tokens, counts = block_labels(input_ids, document_starts, loss_mask, anchors, anchor_mask, config.block_size)
        # kernels for decoding have no gradient
        with use_implementation("reference"):
            base, refined, similarity, features = self._states(
                context_hidden_states, position_ids, anchors, tokens, masks
            )
        labels = tokens[:, 1:].reshape(-1)
        total_anchors = anchor_mask.sum().clamp_min(1)
        scales = {
            "base": arguments.refined_weight if refined is None else arguments.base_weight,
            "refined": arguments.refined_weight,
        }
        result, losses, distances = {}, {}, None
        proposing = "base" if refined is None else "refined"
        for name, states in (("base", base), ("refined", refined)):
            if states is None:
                continue
            flat = states.reshape(labels.shape[0], -1)
            if name == proposing and arguments.distance != "none":
                distances, losses[name], hits = self._distance(flat, target_hidden_states, anchors, labels)
            if scales[name] > 0 or name not in losses:
                # a term that weighs nothing is measured without a gradient, which is half of its cost, or with the distance
                losses[name], hits = self._cross_entropy(flat if scales[name] > 0 else flat.detach(), labels)
            losses[name] = losses[name].view_as(counts)
            if hits is not None:
                run = (hits.view_as(counts) & counts).long().cumprod(-1).sum()
                result[f"accepted_length_{name}"] = 1 + run.float() / total_anchors
        weights = slot_weights(counts, arguments, -losses.get("refined", losses["base"]))
        normaliser = weights.sum().clamp_min(1e-6)

        def mean(values):
            return (values * weights).sum() / normaliser

        terms = {name: mean(values) for name, values in losses.items()}
        loss = sum(scales[name] * value for name, value in terms.items())
        if distances is not None:
            terms["distance"] = mean(distances.view_as(counts))
            loss = loss + arguments.distance_weight * terms["distance"]
        if similarity is not None:
            terms["supervision"] = mean(1 - similarity)
        elif features is not None:
            terms["supervision"] = mean(self._transfer_cross_entropy(features, labels).view(-1, *counts.shape).mean(0))
        if "supervision" in terms:
            loss = loss + config.supervision_weight * terms["supervision"]
        result |= {f"loss_{name}": value.detach() for name, value in terms.items()}
        return {"loss": loss, **result}

    def _cross_entropy(self, states, labels):
        config = self.config
        return fused_linear_cross_entropy(
            states,
            self.drafter.binding.head_weight,
            labels,
            float(config.output_multiplier),
            config.final_logit_softcapping,
            self.arguments.cross_entropy_backend,
        )

    def _distance(self, states, target_hidden_states, anchors, labels):
        """Distances of the states `[A * T, d]` of all predicted slots to the target's, their losses and hits: `[A * T]` each."""
        if target_hidden_states is None:
            raise ValueError(f"target_hidden_states must be given for distance={self.arguments.distance!r}, got None")
        config, slots = self.config, self.config.block_size - 1
        # slot k predicts the token at anchor + k, which the target predicts one position earlier
        before = anchors[:, None] + torch.arange(slots, device=anchors.device)
        wanted = target_hidden_states[0, before.clamp_max(target_hidden_states.shape[1] - 1)]
        return fused_linear_divergence(
            states,
            wanted.flatten(0, 1),
            self.drafter.binding.head_weight,
            float(config.output_multiplier),
            config.final_logit_softcapping,
            self.arguments.distance,
            labels,
        )

    def _transfer_cross_entropy(self, features, labels):
        """Token cross-entropy of features `[layers, A, T, r]` over the whole (detached) table of z: `[layers * A * T]`."""
        drafter, rank = self.drafter, features.shape[-1]
        head = drafter.binding.head_weight
        with torch.no_grad():
            table = transfer_table(head, drafter.transfer.weight, self.config.rms_norm_eps, features.dtype)
        temperature = self.arguments.supervision_temperature or rank**0.5
        flat = features.reshape(-1, rank)
        return fused_linear_cross_entropy(flat, table, labels.repeat(features.shape[0]), 1.0 / temperature)[0]


__all__ = ["DSpineObjective", "LossArguments", "block_labels", "draft_packed", "slot_weights"]
