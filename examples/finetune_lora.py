"""Fine-tunes a trained drafter with LoRA, for new prompts or a fine-tuned target, and merges the adapter.

    python examples/finetune_lora.py --drafter DRAFTER --target TARGET --data answers.parquet --output_dir out \\
        --learning_rate 2e-4 --num_train_epochs 2 --bf16

`out/` then holds the adapter, `out/merged/` an ordinary drafter in bf16. The adapter alone is reloaded with

    drafter = DSpineModel.from_pretrained(DRAFTER); drafter.bind_target(target)
    drafter = merge_adapter(PeftModel.from_pretrained(drafter, "out"), target)

Data options are those of `examples/train.py`. All weights are trained by `examples/train.py --init_from DRAFTER` instead.
"""

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import get_peft_model
from train import load_target, load_tokenizer, pack, record_thinking
from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint, set_seed

from dspine.integrations.training import (
    DataArguments,
    DSpineTrainer,
    LossArguments,
    RunArguments,
    export_drafter,
    lora_config,
    parse_arguments,
)
from dspine.modeling_dspine import DSpineModel


@dataclass
class LoraArguments:
    """The drafter to fine-tune, and how."""

    drafter: str | None = field(default=None, metadata={"help": "The drafter to start from: a Hub id or a folder."})
    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    train_injections: bool = field(
        default=True, metadata={"help": "Also train the injections and the transfer map (whole, they are small)."}
    )


def main(argv: list[str] | None = None) -> dict:
    classes = (LoraArguments, DataArguments, LossArguments, RunArguments, TrainingArguments)
    lora, data, loss, run, training = parse_arguments(argv, classes)
    logging.basicConfig(level=logging.INFO if training.should_log else logging.WARNING)
    set_seed(training.seed)
    if lora.drafter is None or not data.data:
        raise ValueError("--drafter and --data must be given: the drafter to fine-tune and what to train it on")
    tokenizer, target = load_tokenizer(data), load_target(data, training.device)
    base = DSpineModel.from_pretrained(lora.drafter, dtype=torch.float32).to(training.device)
    base.bind_target(target, tokenizer)
    config = lora_config(base.config, lora.rank, lora.alpha, lora.train_injections, lora_dropout=lora.dropout)
    model = get_peft_model(base, config)
    model.print_trainable_parameters()
    train_dataset = pack(data.data, data, base.config, training.seed, tokenizer, training)
    record_thinking(base.config, train_dataset.sequences.thinking)
    evaluations = {}
    for entry in data.eval_data:
        name, _, path = entry.rpartition("=")
        evaluations[name or Path(path).stem] = pack(
            path, data, base.config, training.seed, tokenizer, training, data.eval_documents, shuffle=False
        )
    trainer = DSpineTrainer(
        model,
        training,
        target=target,
        train_dataset=train_dataset,
        eval_dataset=evaluations or None,
        loss_arguments=loss,
        compile_drafter=run.compile_drafter,
        compile_target=run.compile_target,
        eval_chunk=run.eval_chunk,
    )
    before = trainer.evaluate(metric_key_prefix="before") if evaluations else {}
    checkpoint = None
    if run.resume and Path(training.output_dir).is_dir():
        checkpoint = get_last_checkpoint(training.output_dir)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(_internal_call=True)
    if trainer.is_world_process_zero():
        export_drafter(model, str(Path(training.output_dir) / "merged"), getattr(torch, run.export_dtype))
    report = before | (trainer.evaluate(metric_key_prefix="after") if evaluations else {})
    if trainer.is_world_process_zero():
        (Path(training.output_dir) / "metrics.json").write_text(json.dumps(report, indent=1))
        print(json.dumps({name: value for name, value in report.items() if "accepted_length" in name}, indent=1))
    return report


if __name__ == "__main__":
    main()
