"""The arguments of a training run, as dataclasses for `HfArgumentParser`, and recipes in YAML that set their defaults."""

import sys
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from torch import nn
from transformers import HfArgumentParser, PreTrainedConfig, TrainingArguments

from dspine.configuration_dspine import DSpineConfig
from dspine.modeling_dspine.modeling_dspine import DSpineModel

from .initialization import start_from_drafter, start_from_target_layers
from .objective import LossArguments


@dataclass
class DrafterArguments:
    """The drafter to train. Fields left out are chosen by `DSpineConfig.from_target`."""

    num_hidden_layers: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    block_size: int | None = None
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    transfer_rank: int | None = None
    transfer_learned: bool | None = None
    transfer_init: str | None = None
    store_transfer_table: bool | None = None
    injection: bool | None = None
    injection_layers: list[int] | None = None
    injection_gate: str | None = None
    soft_token_features: bool | None = None
    refinement: bool | None = None
    num_candidates: int | None = None
    refinement_guidance: float | None = None
    supervision: str | None = None
    supervision_weight: float | None = None
    target_thinking: bool | None = None
    init_from: str | None = field(
        default=None,
        metadata={
            "help": "A DSpine or DFlash checkpoint (folder or Hub id) to start from; other fields override its own."
        },
    )
    init_from_target_layers: list[int] | None = field(
        default=None,
        metadata={"help": "Target layers to start from, one per draft layer; -1: the last ones, in order."},
    )

    def overrides(self) -> dict:
        names = {f.name for f in fields(self)} - {"init_from", "init_from_target_layers", "mask_token_id"}
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass
class DataArguments:
    """Target, data and packing."""

    target: str | None = field(default=None, metadata={"help": "The target: a Hub id or a folder."})
    target_dtype: str = "bfloat16"
    trust_remote_code: bool = False
    data: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Files (.json, .jsonl, .parquet), patterns ('dir/*.parquet'), folders or Hub data sets, with the columns input_ids and prompt_length (or "
            "loss_mask), messages, conversations (ShareGPT), or instruction and output (Alpaca)."
        },
    )
    data_split: str = field(default="train", metadata={"help": "Split of Hub data sets."})
    data_workers: int | None = field(default=None, metadata={"help": "Processes that render and tokenise."})
    last_turn_only: bool = field(default=False, metadata={"help": "Of a conversation train only the last answer."})
    eval_data: list[str] = field(
        default_factory=list, metadata={"help": "Held-out answers as name=file.parquet, walked in evaluation."}
    )
    eval_documents: int | None = field(
        default=None, metadata={"help": "At most so many texts of each, evenly spaced."}
    )
    tokens_per_batch: int = field(default=20480, metadata={"help": "Tokens of a packed row: the batch of one device."})
    max_anchors: int = field(default=1536, metadata={"help": "Blocks trained per row."})
    max_length: int | None = field(default=None, metadata={"help": "Cut sequences here."})


@dataclass
class RunArguments:
    """How to run."""

    dry_run: bool = field(
        default=False, metadata={"help": "Print shapes, sizes, estimates and the first batch, then stop."}
    )
    resume: bool = field(default=False, metadata={"help": "Continue from the last checkpoint in output_dir, if any."})
    time_limit: float | None = field(
        default=None, metadata={"help": "Seconds after the start at which training stops, to be evaluated and saved."}
    )
    shard_target: bool = field(
        default=False, metadata={"help": "Spread the target's layers over all processes instead of a copy on each."}
    )
    compile_drafter: bool = False
    compile_target: bool = False
    eval_chunk: int = field(default=256, metadata={"help": "Anchors per pass in evaluation."})
    export_dtype: str = "bfloat16"
    device_tflops: float = field(
        default=300.0, metadata={"help": "Achieved TFLOP/s assumed in the dry run's estimate."}
    )
    name: str | None = field(default=None, metadata={"help": "What to call this run in metrics.json."})


ARGUMENT_CLASSES = (DrafterArguments, DataArguments, LossArguments, RunArguments, TrainingArguments)


def parse_arguments(argv: list[str] | None = None, classes: tuple[type, ...] = ARGUMENT_CLASSES):
    """Parses `[recipe.yaml ...] [--option value ...]` into dataclasses; later words win.

    Raises:
        ValueError: a recipe has a key that is no option.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = HfArgumentParser(classes)
    known = {action.dest for action in parser._actions}
    while argv and argv[0].endswith((".yaml", ".yml")):
        import yaml

        recipe = yaml.safe_load(Path(argv[0]).read_text())
        unknown = sorted(set(recipe) - known)
        if unknown:
            raise ValueError(f"{argv[0]} must only hold options of the training script, got {unknown}")
        # numbers such as 1e-3 are strings in YAML; argparse converts string defaults by the option's type
        parser.set_defaults(**recipe)
        argv = argv[1:]
    return parser.parse_args_into_dataclasses(argv)


def _is_dspine(source: str) -> bool:
    return PreTrainedConfig.get_config_dict(source)[0].get("model_type") == DSpineConfig.model_type


def drafter_config(arguments: DrafterArguments, target_config: PreTrainedConfig, tokenizer=None) -> DSpineConfig:
    """The configuration of the drafter to train; reads no weights.

    With `init_from` the checkpoint's own configuration, a DFlash one with DSpine's parts switched on, and every field given.
    """
    overrides = arguments.overrides()
    if arguments.init_from is None:
        return DSpineConfig.from_target(
            target_config, mask_token_id=arguments.mask_token_id, tokenizer=tokenizer, **overrides
        )
    if arguments.mask_token_id is not None:
        overrides["mask_token_id"] = arguments.mask_token_id
    raw = PreTrainedConfig.get_config_dict(arguments.init_from)[0]
    if not _is_dspine(arguments.init_from):
        start = DSpineConfig.from_dflash(raw).to_dict()
    else:
        start = DSpineConfig.from_dict(raw).to_dict()
    # one entry per layer or a choice of layers: follow from the other fields when these change
    derived = {"num_hidden_layers": ("layer_types", "injection_layers"), "injection": ("injection_layers",)}
    for name, dependent in derived.items():
        if name in overrides and overrides[name] != start[name]:
            start |= dict.fromkeys(dependent)
    start["target_name_or_path"] = getattr(target_config, "name_or_path", None) or start["target_name_or_path"]
    template = DSpineConfig.chat_template_hash(getattr(tokenizer, "chat_template", None))
    start["target_chat_template_hash"] = template or start["target_chat_template_hash"]
    return DSpineConfig.from_dict(start | overrides)


def build_drafter(arguments: DrafterArguments, target: nn.Module, tokenizer=None, device="cpu") -> DSpineModel:
    """A bound fp32 drafter for `target`, started as the arguments say.

    Writes that a warm start's checkpoint lacks (all of them, if it is a DFlash drafter) begin at zero, so that training begins with
    the checkpoint's own drafts.
    """
    drafter = DSpineModel(drafter_config(arguments, target.config, tokenizer)).float()
    if arguments.init_from_target_layers is not None:
        layers = arguments.init_from_target_layers
        start_from_target_layers(drafter, target, None if layers == [-1] else layers)
    kept = []
    if arguments.init_from is not None:
        if _is_dspine(arguments.init_from):
            source = DSpineModel.from_pretrained(arguments.init_from, dtype=torch.float32)
        else:
            plain = {"injection": False, "refinement": False}
            source = DSpineModel.from_dflash(arguments.init_from, dtype=torch.float32, config_overrides=plain)
        _, kept = start_from_drafter(drafter, source)
        with torch.no_grad():
            for index, module in drafter.injections.items():
                if f"injections.{index}.write.weight" in kept:
                    module.write.weight.zero_()
    drafter.to(device)
    fresh_space = arguments.init_from is None or any(name.startswith("transfer.") for name in kept)
    drafter.bind_target(target, tokenizer=tokenizer, init_transfer=fresh_space)
    return drafter


__all__ = ["DataArguments", "DrafterArguments", "RunArguments", "build_drafter", "drafter_config", "parse_arguments"]
