"""Training of DSpine drafters with `transformers.Trainer`. Needs `pip install dspine[train]`."""

from .arguments import DataArguments, DrafterArguments, RunArguments, build_drafter, drafter_config, parse_arguments
from .conversations import ConversationEncoder, load_sequences, report_table
from .data import EpochSampler, PackedDataset, TokenSequences, from_records
from .estimate import estimate
from .initialization import start_from_drafter, start_from_target_layers
from .lora import lora_config, lora_modules_to_save, lora_target_modules, merge_adapter
from .metrics import WalkStatistics, walk_dataset
from .objective import DSpineObjective, LossArguments
from .trainer import DSpineTrainer, TargetRunner, TimeLimitCallback, export_drafter, shard_target


__all__ = [
    "ConversationEncoder",
    "DSpineObjective",
    "DSpineTrainer",
    "DataArguments",
    "DrafterArguments",
    "EpochSampler",
    "LossArguments",
    "PackedDataset",
    "RunArguments",
    "TargetRunner",
    "TimeLimitCallback",
    "TokenSequences",
    "WalkStatistics",
    "build_drafter",
    "drafter_config",
    "estimate",
    "export_drafter",
    "from_records",
    "load_sequences",
    "lora_config",
    "lora_modules_to_save",
    "lora_target_modules",
    "merge_adapter",
    "parse_arguments",
    "report_table",
    "shard_target",
    "start_from_drafter",
    "start_from_target_layers",
    "walk_dataset",
]
