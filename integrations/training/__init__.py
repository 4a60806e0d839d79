"""Training of DSpine drafters with `transformers.Trainer`. Needs `pip install dspine[train]`."""

from .arguments import DataArguments, DrafterArguments, RunArguments, build_drafter, parse_arguments
from .conversations import ConversationEncoder, load_sequences, report_table
from .data import EpochSampler, PackedDataset, TokenSequences, from_records
from .estimate import estimate
from .initialization import start_from_drafter, start_from_target_layers
from .metrics import WalkStatistics, walk_dataset
from .objective import DSpineObjective, LossArguments
from .trainer import DSpineTrainer, TargetRunner, TimeLimitCallback, export_drafter


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
    "estimate",
    "export_drafter",
    "from_records",
    "load_sequences",
    "parse_arguments",
    "report_table",
    "start_from_drafter",
    "start_from_target_layers",
    "walk_dataset",
]
