"""What is timed: a drafter's step, the target's pass, whole steps of the trainer."""

import gc
import tempfile
import time

import torch
from transformers import AutoModelForCausalLM, TrainerCallback, TrainingArguments

from dspine.integrations.training import DSpineTrainer, TargetRunner, estimate
from dspine.modeling_dspine import DSpineModel
from training_profile.clocks import back_to_back, kernels, milliseconds, profiler, wait
from training_profile.shapes import Shape
from training_profile.steps import loss_arguments, our_step, speculators_step


def time_step(result: dict, save, kind: str, shape: Shape, args) -> None:
    """Times, memory and kernels of one drafter's step."""
    device = shape.device
    if device.type == "cuda":
        torch.cuda.empty_cache()
    started = time.perf_counter()
    theirs, compile = kind == "speculators", args.compile
    while True:
        try:
            forward, step, model = speculators_step(shape, compile) if theirs else our_step(kind, shape, args)
            step()
            break
        except Exception as error:
            if not (theirs and compile) or isinstance(error, ImportError):
                raise
            # their compiled forward pass depends on the release of PyTorch
            result["compiled_error"] = f"{type(error).__name__}: {str(error)[:300]}"
        # only here is what the error held released
        compile = False
        save()
        torch.compiler.reset()
        gc.collect()
    wait(device)
    result["trained_parameters"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    result["seconds_to_first_step"] = time.perf_counter() - started
    save()
    result["step"] = milliseconds(step, args.steps, args.warmup, device)
    save()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    result["step_back_to_back_ms"] = back_to_back(step, args.steps, device)
    if device.type == "cuda":
        result["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 2**30
    save()
    if isinstance(model, DSpineModel):
        if "-" not in kind:  # what a distance costs is not counted
            sizes = estimate(model, None, shape.dataset.length, shape.anchors)
            result["tflop_per_step"] = sizes["drafter_tflop"]
            result["tflops"] = sizes["drafter_tflop"] / result["step_back_to_back_ms"] * 1000
        result["forward_only"] = milliseconds(forward, max(3, args.steps // 2), 2, device)
        save()
    if args.table:
        with profiler(device) as profile:
            for _ in range(3):
                step()
            wait(device)
        result |= kernels(profile, 3, args.table, device)


def make_target(shape: Shape, layers: int):
    config = shape.target
    config = config.__class__(**(config.to_dict() | {"num_hidden_layers": layers, "layer_types": None}))
    with torch.device(shape.device):
        return AutoModelForCausalLM.from_config(config, dtype=shape.dtype)


def time_target(result: dict, save, shape: Shape, args) -> None:
    """The target's pass up to the last tap."""
    layers = min(args.target_layers, shape.target.num_hidden_layers)
    target = make_target(shape, layers)
    taps_at = [i for i in shape.config("dflash").target_layer_ids if i < layers]
    runner = TargetRunner(target, taps_at, compile=args.compile)
    result["layers"] = max(taps_at) + 1
    result |= milliseconds(lambda: runner(shape.row), args.steps, args.warmup, shape.device)
    save()
    result["back_to_back_ms"] = back_to_back(lambda: runner(shape.row), args.steps, shape.device)


class StepClock(TrainerCallback):
    """Times the steps of a training run after the first `warmup`, and profiles the last `profiled`."""

    def __init__(self, warmup: int, steps: int, profiled: int, device: torch.device):
        self.begin, self.end, self.profiled, self.device = warmup, warmup + steps, profiled, device
        self.profile = profiler(device)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.begin:
            wait(self.device)
            self.started = time.perf_counter()
        elif state.global_step == self.end:
            wait(self.device)
            self.milliseconds = 1000 * (time.perf_counter() - self.started) / (self.end - self.begin)
            self.profile.__enter__()
        elif state.global_step == self.end + self.profiled:
            wait(self.device)
            self.profile.__exit__(None, None, None)


def time_trainer(result: dict, save, kind: str, shape: Shape, args) -> None:
    """Whole steps of `DSpineTrainer`: data, target, drafter, loss, optimizer, logging."""
    device, cuda, profiled = shape.device, shape.device.type == "cuda", 5
    target = make_target(shape, shape.target.num_hidden_layers)
    drafter = shape.drafter(kind)
    drafter.bind_target(target, init_transfer=True)
    clock = StepClock(20 if cuda else 2, args.trainer_steps, profiled, device)
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=1,
            max_steps=clock.end + profiled,
            bf16=cuda,
            use_cpu=not cuda,
            optim="adamw_torch_fused" if cuda else "adamw_torch",
            dataloader_num_workers=4 if cuda else 0,
            dataloader_persistent_workers=cuda,
            logging_steps=50,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = DSpineTrainer(
            drafter,
            options,
            target=target,
            train_dataset=shape.rows(16),
            loss_arguments=loss_arguments(kind, args),
            compile_drafter=args.compile,
            compile_target=args.compile,
            callbacks=[clock],
        )
        trainer.train()
    result["whole_step_ms"] = clock.milliseconds
    result |= kernels(clock.profile, profiled, args.table, device)
