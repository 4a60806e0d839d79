"""Trains a DSpine (or, with the switches off, a DFlash) drafter for a Hugging Face target.

    python examples/train.py examples/recipes/smollm2-135m-dspine.yaml --target PATH --data train.parquet --output_dir out
    torchrun --nproc_per_node 2 examples/train.py ...            # data parallel, nothing else changes
    accelerate launch --config_file examples/recipes/accelerate_fsdp2.yaml examples/train.py ...     # sharded drafter
    python examples/train.py RECIPE ... --dry_run                # sizes, memory, time and the first batch with its mask

`--data` takes token sequences and conversations (see `dspine.integrations.training.conversations`). A dry run reads the target's
configuration and tokenizer, not its weights, and does without data.

Options are those of `dspine.integrations.training.arguments` and of `transformers.TrainingArguments`; a recipe sets defaults.
The trained drafter is saved in `output_dir` in bf16, with `metrics.json` beside it; checkpoints are fp32.
"""

import json
import logging
import platform
import time
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint, set_seed

from dspine.integrations.training import (
    DSpineTrainer,
    PackedDataset,
    TimeLimitCallback,
    build_drafter,
    drafter_config,
    estimate,
    load_sequences,
    parse_arguments,
    report_table,
    shard_target,
)
from dspine.integrations.training.objective import block_labels
from dspine.modeling_dspine import DSpineModel


logger = logging.getLogger("train")


def load_tokenizer(arguments):
    """The target's tokenizer, None if its folder has none."""
    if arguments.target is None:
        raise ValueError("--target must be given: the Hub id or folder of the model to draft for")
    try:
        return AutoTokenizer.from_pretrained(arguments.target, trust_remote_code=arguments.trust_remote_code)
    except (OSError, ValueError) as error:
        logger.warning(f"no tokenizer is used: {error}")
        return None


def load_target(arguments, device):
    """The target in the dtype it is served in."""
    target = AutoModelForCausalLM.from_pretrained(
        arguments.target,
        dtype=getattr(torch, arguments.target_dtype),
        trust_remote_code=arguments.trust_remote_code,
    )
    return target.to(device)


def without_weights(drafter_args, data_args, tokenizer):
    """Drafter and target as shapes only, from the target's `config.json`."""
    options = {"trust_remote_code": data_args.trust_remote_code}
    target_config = AutoConfig.from_pretrained(data_args.target, **options)
    config = drafter_config(drafter_args, target_config, tokenizer)
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(
            target_config, dtype=getattr(torch, data_args.target_dtype), **options
        )
        return DSpineModel(config).float(), target


def pack(sources, arguments, config, seed, tokenizer, train_args, limit=None, shuffle=True) -> PackedDataset:
    # one process renders and tokenises, the others read what it has cached
    with train_args.main_process_first(desc="reading the data"):
        sequences = load_sequences(
            sources,
            tokenizer,
            arguments.data_split,
            config.target_thinking,
            arguments.last_turn_only,
            arguments.data_workers,
        )
    dataset = PackedDataset(
        sequences.every(limit),
        arguments.tokens_per_batch,
        arguments.max_anchors,
        arguments.max_length,
        seed=seed,
        shuffle=shuffle,
        mask_token_id=config.mask_token_id,
    )
    logger.info(f"data:\n{report_table(dataset.report)}")
    return dataset


def record_thinking(config, thinking: set[bool]) -> None:
    """Writes the thinking mode that the data was generated with into the drafter's configuration, unless it was given."""
    if config.target_thinking is None and len(thinking) == 1:
        config.target_thinking = next(iter(thinking))
    elif thinking - {config.target_thinking}:
        logger.warning(
            f"the data was generated with thinking {sorted(thinking)}, but the drafter is trained for target_thinking="
            f"{config.target_thinking}"
        )


def print_dry_run(drafter, target, tokenizer, dataset, data_args, run_args, train_args) -> None:
    """Shapes, sizes, estimates, and the first batch if there is data."""
    config = drafter.config
    length = data_args.tokens_per_batch if dataset is None else dataset.length
    print(f"drafter: {config.num_hidden_layers} layers, width {config.hidden_size}, {config.block_size} slots")
    print(f"taps: layers {config.target_layer_ids} of {config.num_target_layers}")
    sizes = estimate(drafter, target, length, data_args.max_anchors, run_args.device_tflops, target.dtype.itemsize)
    for name, value in sizes.items():
        print(f"{name}: {value:,.3f}" if isinstance(value, float) else f"{name}: {value:,}")
    if dataset is None:
        print("no --data: the number of steps and the first batch are not shown")
        return
    micro = len(dataset) * train_args.num_train_epochs / train_args.world_size
    steps = train_args.max_steps if train_args.max_steps > 0 else int(micro / train_args.gradient_accumulation_steps)
    seconds = steps * train_args.gradient_accumulation_steps * sizes["step_seconds"]
    print(f"steps: {steps:,}, about {seconds / 3600:.2f} hours at {run_args.device_tflops} TFLOP/s a device")
    print_first_batch(dataset, config, tokenizer)


def print_first_batch(dataset, config, tokenizer) -> None:
    """What was left out, the shapes of a row, and its first document: response tokens in brackets, anchors after a caret."""
    row = dataset[(0, 0)]
    tokens, counts = block_labels(
        *(row[k] for k in ("input_ids", "document_starts", "loss_mask", "anchors", "anchor_mask")), config.block_size
    )
    print(f"data:\n{report_table(dataset.report)}")
    print("row:", {name: (list(value.shape), str(value.dtype).removeprefix("torch.")) for name, value in row.items()})
    print(f"slots: {list(tokens.shape)}, of which {int(counts.sum())} of {counts.numel()} predicted ones count")
    begin, end = dataset.documents(0)[0][1:]
    anchors = set(row["anchors"].tolist())
    shown = []
    for i in range(begin, end):
        token = int(row["input_ids"][i])
        text = str(token) if tokenizer is None else tokenizer.decode([token])
        shown.append(("^" if i in anchors else "") + (f"[{text}]" if row["loss_mask"][i] else text))
    print("first document:", "".join(shown) if tokenizer is not None else " ".join(shown))
    first = int(row["anchors"][0])
    print(f"first block: anchor at {first}, tokens {tokens[0].tolist()}, counting {counts[0].int().tolist()}")


def main(argv: list[str] | None = None) -> dict:
    started = time.monotonic()
    drafter_args, data_args, loss_args, run_args, train_args = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO if train_args.should_log else logging.WARNING)
    set_seed(train_args.seed)
    tokenizer = load_tokenizer(data_args)
    seed = train_args.seed if train_args.data_seed is None else train_args.data_seed
    if run_args.dry_run:
        drafter, target = without_weights(drafter_args, data_args, tokenizer)
        dataset = None
        if data_args.data:
            dataset = pack(data_args.data, data_args, drafter.config, seed, tokenizer, train_args)
        print_dry_run(drafter, target, tokenizer, dataset, data_args, run_args, train_args)
        return {}
    if not data_args.data:
        raise ValueError("--data must be given: token sequences or conversations to train on")
    target = load_target(data_args, "cpu" if run_args.shard_target else train_args.device)
    if run_args.shard_target:
        shard_target(target, train_args.device)
    drafter = build_drafter(drafter_args, target, tokenizer, train_args.device)
    dataset = pack(data_args.data, data_args, drafter.config, seed, tokenizer, train_args)
    record_thinking(drafter.config, dataset.sequences.thinking)
    evaluations = {}
    for entry in data_args.eval_data:
        name, _, path = entry.rpartition("=")
        evaluations[name or Path(path).stem] = pack(
            path, data_args, drafter.config, seed, tokenizer, train_args, data_args.eval_documents, shuffle=False
        )
    callbacks = []
    if run_args.time_limit is not None:
        callbacks.append(TimeLimitCallback(run_args.time_limit, started))
    trainer = DSpineTrainer(
        drafter,
        train_args,
        target=target,
        train_dataset=dataset,
        eval_dataset=evaluations or None,
        loss_arguments=loss_args,
        compile_drafter=run_args.compile_drafter,
        compile_target=run_args.compile_target,
        eval_chunk=run_args.eval_chunk,
        export_dtype=getattr(torch, run_args.export_dtype),
        callbacks=callbacks,
    )
    checkpoint = None
    if run_args.resume and Path(train_args.output_dir).is_dir():
        checkpoint = get_last_checkpoint(train_args.output_dir)
    result = trainer.train(resume_from_checkpoint=checkpoint)
    train_seconds = time.monotonic() - started
    # before the evaluation: nothing that happens there may cost the training
    trainer.save_model(_internal_call=True)
    metrics = trainer.evaluate() if evaluations else {}
    if train_args.device.type == "cuda":
        metrics["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 2**30
    report = {
        "name": run_args.name or Path(train_args.output_dir).name,
        "train": result.metrics,
        "evaluation": metrics,
        "steps": trainer.state.global_step,
        "max_steps": trainer.state.max_steps,
        "train_seconds": train_seconds,
        "seconds": time.monotonic() - started,
        "packing": dict(dataset.report),
        "drafter_parameters": sum(p.numel() for p in drafter.parameters()),
        "drafter": drafter.config.to_diff_dict(),
        "arguments": {
            "data": asdict(data_args),
            "loss": asdict(loss_args),
            "start": {k: getattr(drafter_args, k) for k in ("init_from", "init_from_target_layers")},
            "training": {
                k: getattr(train_args, k)
                for k in ("learning_rate", "max_steps", "seed", "bf16", "gradient_accumulation_steps", "world_size")
            },
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "device": torch.cuda.get_device_name() if train_args.device.type == "cuda" else "cpu",
        },
        "log": trainer.state.log_history,
    }
    if trainer.is_world_process_zero():
        path = Path(train_args.output_dir) / "metrics.json"
        path.write_text(json.dumps(report, indent=1, default=str))
        print(json.dumps({k: report[k] for k in ("name", "steps", "seconds", "evaluation")}, indent=1, default=str))
    if train_args.push_to_hub:
        trainer.push_to_hub()
    return report


if __name__ == "__main__":
    main()
