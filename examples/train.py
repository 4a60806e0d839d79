"""Trains a DSpine (or, with the switches off, a DFlash) drafter for a Hugging Face target.

    python examples/train.py examples/recipes/smollm2-135m-dspine.yaml --target PATH --data train.parquet --output_dir out
    torchrun --nproc_per_node 2 examples/train.py ...            # data parallel, nothing else changes
    python examples/train.py RECIPE ... --dry_run                # sizes, memory, time and the first batch with its mask

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
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint, set_seed

from dspine.integrations.training import (
    DSpineTrainer,
    PackedDataset,
    TimeLimitCallback,
    build_drafter,
    estimate,
    export_drafter,
    load_token_sequences,
    parse_arguments,
)
from dspine.integrations.training.objective import block_labels


logger = logging.getLogger("train")


def load_target(arguments, device):
    """The frozen target and its tokenizer (None if the folder has none)."""
    if arguments.target is None:
        raise ValueError("--target must be given: the Hub id or folder of the model to draft for")
    target = AutoModelForCausalLM.from_pretrained(
        arguments.target,
        dtype=getattr(torch, arguments.target_dtype),
        trust_remote_code=arguments.trust_remote_code,
    )
    try:
        tokenizer = AutoTokenizer.from_pretrained(arguments.target, trust_remote_code=arguments.trust_remote_code)
    except (OSError, ValueError) as error:
        logger.warning(f"no tokenizer is used: {error}")
        tokenizer = None
    return target.to(device), tokenizer


def pack(paths, arguments, config, seed, limit=None, shuffle=True) -> PackedDataset:
    return PackedDataset(
        load_token_sequences(paths).every(limit),
        arguments.tokens_per_batch,
        arguments.max_anchors,
        arguments.max_length,
        seed=seed,
        shuffle=shuffle,
        mask_token_id=config.mask_token_id,
    )


def print_dry_run(drafter, target, tokenizer, dataset, data_args, run_args, train_args) -> None:
    """Shapes, sizes, estimates and one batch: response tokens in brackets, anchors marked with a caret."""
    config = drafter.config
    row = dataset[(0, 0)]
    tokens, counts = block_labels(
        *(row[k] for k in ("input_ids", "document_starts", "loss_mask", "anchors", "anchor_mask")), config.block_size
    )
    print("packing:", dict(dataset.report))
    print("row:", {name: (list(value.shape), str(value.dtype).removeprefix("torch.")) for name, value in row.items()})
    print(f"slots: {list(tokens.shape)}, of which {int(counts.sum())} of {counts.numel()} predicted ones count")
    print(f"taps: layers {config.target_layer_ids} of {config.num_target_layers}")
    sizes = estimate(
        drafter, target, dataset.length, data_args.max_anchors, run_args.device_tflops, target.dtype.itemsize
    )
    for name, value in sizes.items():
        print(f"{name}: {value:,.3f}" if isinstance(value, float) else f"{name}: {value:,}")
    steps = train_args.max_steps if train_args.max_steps > 0 else int(len(dataset) * train_args.num_train_epochs)
    print(
        f"steps: {steps}, about {steps * sizes['step_seconds'] / 60:.1f} minutes at {run_args.device_tflops} TFLOP/s"
    )
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
    if not data_args.data:
        raise ValueError("--data must be given: parquet files with input_ids and prompt_length")
    target, tokenizer = load_target(data_args, train_args.device)
    drafter = build_drafter(drafter_args, target, tokenizer, train_args.device)
    seed = train_args.seed if train_args.data_seed is None else train_args.data_seed
    dataset = pack(data_args.data, data_args, drafter.config, seed)
    if run_args.dry_run:
        print_dry_run(drafter, target, tokenizer, dataset, data_args, run_args, train_args)
        return {}
    evaluations = {}
    for entry in data_args.eval_data:
        name, _, path = entry.rpartition("=")
        evaluations[name or Path(path).stem] = pack(
            path, data_args, drafter.config, seed, data_args.eval_documents, shuffle=False
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
        callbacks=callbacks,
    )
    checkpoint = None
    if run_args.resume and Path(train_args.output_dir).is_dir():
        checkpoint = get_last_checkpoint(train_args.output_dir)
    result = trainer.train(resume_from_checkpoint=checkpoint)
    train_seconds = time.monotonic() - started
    if trainer.is_world_process_zero():
        # before the evaluation: nothing that happens there may cost the training
        export_drafter(trainer.drafter, train_args.output_dir, getattr(torch, run_args.export_dtype))
        if tokenizer is not None:
            logger.info(f"chat template hash: {drafter.config.target_chat_template_hash}")
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
    return report


if __name__ == "__main__":
    main()
