"""Where a drafter starts from: fresh weights, another drafter's, or layers of the target."""

import logging

import torch
from torch import nn

from dspine.modeling_dspine.modeling_dspine import DSpineModel


logger = logging.getLogger(__name__)


@torch.no_grad()
def start_from_target_layers(drafter: DSpineModel, target: nn.Module, layer_ids: list[int] | None = None) -> list[str]:
    """Copies target layers into the drafter's layers wherever names and shapes agree (projections, MLP, layer norms).

    Args:
        layer_ids: one zero-based target layer per draft layer; default: the last ones, in order.

    Returns:
        The names of the drafter's parameters that were set.

    Raises:
        ValueError: not one id per draft layer.
    """
    layers = target.get_decoder().layers
    count = len(drafter.layers)
    layer_ids = list(range(len(layers) - count, len(layers))) if layer_ids is None else layer_ids
    if len(layer_ids) != count or not all(0 <= i < len(layers) for i in layer_ids):
        raise ValueError(f"layer_ids must be {count} target layers 0 to {len(layers) - 1}, got {layer_ids}")
    copied = []
    for index, (layer, source_id) in enumerate(zip(drafter.layers, layer_ids)):
        source = dict(layers[source_id].named_parameters())
        for name, parameter in layer.named_parameters():
            if name in source and source[name].shape == parameter.shape:
                parameter.copy_(source[name])
                copied.append(f"layers.{index}.{name}")
    return copied


@torch.no_grad()
def start_from_drafter(drafter: DSpineModel, source: nn.Module) -> tuple[list[str], list[str]]:
    """Copies every parameter of another drafter (DSpine or DFlash, same names) whose shape agrees.

    Returns:
        Names of the drafter's parameters that were set and of those left as they were, in the order of the module.

    Raises:
        ValueError: nothing agrees.
    """
    theirs = dict(source.named_parameters())
    copied, kept = [], []
    for name, parameter in drafter.named_parameters():
        if name in theirs and theirs[name].shape == parameter.shape:
            parameter.copy_(theirs[name])
            copied.append(name)
        else:
            kept.append(name)
    if not copied:
        raise ValueError(
            f"the checkpoint must share parameters with the drafter, got none of equal name and shape ({type(source).__name__})"
        )
    logger.info(f"warm start: {len(copied)} parameters copied, {len(kept)} left as initialised")
    return copied, kept


__all__ = ["start_from_drafter", "start_from_target_layers"]
