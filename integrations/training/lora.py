"""LoRA on a drafter through `peft`.

Adapters go on the backbone's projections. The injections and the transfer map are small and their operations read weight matrices
directly, where an adapter would be bypassed: they are trained whole, as `modules_to_save`.
"""

from dspine.configuration_dspine import DSpineConfig
from dspine.modeling_dspine.modeling_dspine import DSpineModel


BACKBONE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc")


def lora_target_modules(config: DSpineConfig) -> list[str]:
    """Names for `LoraConfig(target_modules=...)`: every linear layer of the DFlash backbone."""
    return list(BACKBONE)


def lora_modules_to_save(config: DSpineConfig) -> list[str]:
    """Names for `LoraConfig(modules_to_save=...)`: the injections, and the transfer map if it is learned. Empty for DFlash."""
    if not config.uses_transfer_space:
        return []
    last = [config.num_hidden_layers - 1] if config.refinement else []
    names = [f"injections.{i}" for i in sorted({*config.injection_layers, *last})]
    return names + (["transfer"] if config.transfer_learned else [])


def lora_config(config: DSpineConfig, rank: int = 16, alpha: float = 32, injections: bool = True, **options):
    """A `peft.LoraConfig` for drafters of `config`: `get_peft_model(drafter, lora_config(drafter.config))`.

    Args:
        injections: also train injections and transfer map; False leaves them as they are.
        options: further arguments of `LoraConfig` (`lora_dropout`, `use_rslora`, ...).
    """
    from peft import LoraConfig

    saved = lora_modules_to_save(config) if injections else []
    names = {"target_modules": lora_target_modules(config), "modules_to_save": saved or None}
    return LoraConfig(r=rank, lora_alpha=alpha, **(names | options))


def merge_adapter(model, target=None) -> DSpineModel:
    """The ordinary drafter that a `PeftModel` of a drafter amounts to; the model given is used up.

    Args:
        target: bound to the result if given. Needed (unless the drafter is bound already) to recompute a stored transfer table.

    Raises:
        ValueError: the configuration stores the transfer table and nothing is bound to compute it from.
    """
    drafter = model.merge_and_unload()
    if target is not None:
        drafter.bind_target(target)
    stored = drafter.config.uses_transfer_space and drafter.config.store_transfer_table
    if stored and not (drafter.is_bound and drafter.binding.head_weight is not None):
        raise ValueError(
            "the stored transfer table must be recomputed after merging; pass the unquantised target (merge_adapter(model, target))"
        )
    # the table in memory is that of the transfer map before training
    drafter.train().eval()
    return drafter


__all__ = ["lora_config", "lora_modules_to_save", "lora_target_modules", "merge_adapter"]
