"""`DSpineTrainer`: `transformers.Trainer` with a frozen target that runs in the same process.

Everything that Trainer does is Trainer's: optimizer, schedule, accumulation, checkpoints, resuming, logging, callbacks, DDP. This
file adds the target's pass (`TargetRunner`), hands its taps to the objective, and evaluates by walking blocks.
"""

import copy
import time

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from dspine.modeling_dspine.modeling_dspine import DSpineModel
from dspine.modeling_dspine.target_dspine import TapRecorder

from .data import EpochSampler, PackedDataset, single_row
from .masks import PACKED_ATTENTION, slot_masks, target_mask
from .metrics import WalkStatistics, walk_dataset
from .objective import DSpineObjective, LossArguments


class TargetRunner:
    """Runs the frozen target over one packed row and returns its taps. Not a module: the target is neither trained nor saved.

    Args:
        target: a causal language model; put into evaluation mode, frozen, and switched to the packed attention function.
        target_layer_ids: zero-based layers whose outputs are taken.
        compile: run the decoder through `torch.compile`.
    """

    def __init__(self, target: nn.Module, target_layer_ids: list[int], compile: bool = False):
        self.target = target.eval().requires_grad_(False)
        target.set_attn_implementation(PACKED_ATTENTION)
        text = target.config.get_text_config()
        kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
        window = getattr(text, "sliding_window", None) if "sliding_attention" in kinds else None
        self.windows = {kind: window if kind == "sliding_attention" else None for kind in kinds}
        decoder = target.get_decoder()
        self.taps = TapRecorder(decoder.layers, target_layer_ids).__enter__()
        self.decoder = torch.compile(decoder, dynamic=False) if compile else decoder

    @property
    def device(self) -> torch.device:
        return self.target.device

    @torch.no_grad()
    def __call__(self, row: dict[str, torch.Tensor]) -> torch.Tensor:
        """Taps `[1, L, len(target_layer_ids) * d]` of a row (tensors without batch dimension, see [`PackedDataset`])."""
        flex = self.device.type == "cuda"
        masks = {kind: target_mask(row["document_starts"], window, flex) for kind, window in self.windows.items()}
        # the mask is final, so Transformers passes it on as it is; models with one kind of layer take it bare
        mask = next(iter(masks.values())) if len(masks) == 1 else masks
        # as in serving: no casts but the model's own
        with torch.autocast(self.device.type, enabled=False):
            self.decoder(
                input_ids=row["input_ids"][None],
                attention_mask=mask,
                position_ids=row["position_ids"][None],
                use_cache=False,
            )
        return self.taps.take(self.device)


class DSpineTrainer(Trainer):
    """Trains a drafter for a frozen target.

    Args:
        model: the drafter, bound to `target` (`drafter.bind_target(target, init_transfer=True)` for a new one), in fp32: the
            master weights of a run with `bf16=True`.
        target: the target, in the dtype it is served in.
        args: `TrainingArguments`; `per_device_train_batch_size` must be 1, a row being a whole batch.
        train_dataset, eval_dataset: a [`PackedDataset`] each; a dict of them for several evaluation sets.
        loss_arguments: weights of the loss.
        compile_drafter, compile_target: compile the drafter's pass (the part before the output head) or the target's.
        eval_chunk: anchors per pass in evaluation; bounds its memory.
        Everything else as in `Trainer`.

    Raises:
        ValueError: a batch size other than 1, or a drafter that is not bound to the target.
    """

    def __init__(
        self,
        model: DSpineModel | None = None,
        args: TrainingArguments | None = None,
        *,
        target: nn.Module,
        train_dataset: PackedDataset | None = None,
        eval_dataset: PackedDataset | dict[str, PackedDataset] | None = None,
        loss_arguments: LossArguments | None = None,
        compile_drafter: bool = False,
        compile_target: bool = False,
        eval_chunk: int = 256,
        **kwargs,
    ):
        if args.per_device_train_batch_size != 1:
            raise ValueError(
                "per_device_train_batch_size must be 1, since a row already packs tokens_per_row tokens, got "
                f"{args.per_device_train_batch_size}; raise tokens_per_row or gradient_accumulation_steps instead"
            )
        if args.n_gpu > 1:
            raise ValueError(
                f"one process must see one GPU, got {args.n_gpu}; start it with torchrun, or set CUDA_VISIBLE_DEVICES"
            )
        if model.binding.lm_head is not target.get_output_embeddings():
            raise ValueError("the drafter must be bound to the given target, got one bound to another model")
        # rows are not columns of the model's signature
        args.remove_unused_columns = False
        model.set_attn_implementation(PACKED_ATTENTION)
        objective = DSpineObjective(model, loss_arguments, compile=compile_drafter)
        self.eval_chunk = eval_chunk
        self.run_target = TargetRunner(target, model.config.target_layer_ids, compile=compile_target)
        self._sums: dict[str, torch.Tensor] = {}
        self._summed = 0
        super().__init__(
            model=objective,
            args=args,
            data_collator=single_row,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            **kwargs,
        )
        self.model_accepts_loss_kwargs = False
        if self.target.device.type != args.device.type or self.target.device != next(model.parameters()).device:
            self.target.to(args.device)

    @property
    def drafter(self) -> DSpineModel:
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False).drafter

    @property
    def target(self) -> nn.Module:
        return self.run_target.target

    def _get_train_sampler(self, train_dataset=None):
        dataset = self.train_dataset if train_dataset is None else train_dataset
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return EpochSampler(len(dataset), seed)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        taps = self.run_target(inputs)
        flex = taps.device.type == "cuda"
        masks = slot_masks(self.drafter.config, inputs["anchors"], inputs["document_starts"], flex)
        outputs = model(context_hidden_states=taps, masks=masks, **inputs)
        if model.training:
            for name, value in outputs.items():
                if name != "loss":
                    # summed on the device and read when logging, so that no step waits for another
                    self._sums[name] = self._sums.get(name, 0) + value.detach()
            self._summed += 1
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def floating_point_ops(self, inputs) -> int:
        """Not counted: Trainer's formula is for language models. See `estimate.py`."""
        return 0

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        if "loss" in logs and self._summed:
            names = sorted(self._sums)
            sums = torch.stack([self._sums[name].float() for name in names]) / self._summed
            sums = self.accelerator.reduce(sums, reduction="mean").tolist()
            logs = logs | {name: round(value, 5) for name, value in zip(names, sums)}
            self._sums, self._summed = {}, 0
        super().log(logs, *args, **kwargs)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Walks the evaluation texts (see `metrics.py`); keys `{prefix}_accepted_length` and so on."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        if isinstance(dataset, dict):
            metrics = {}
            for name, part in dataset.items():
                metrics |= self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}")
            return metrics
        started = time.perf_counter()
        drafter, was_training = self.drafter, self.model.training
        device = self.args.device
        self.model.eval()
        drafter.eval()
        try:
            with self.accelerator.autocast():  # as the training step has it
                statistics = walk_dataset(
                    drafter,
                    self.run_target,
                    dataset,
                    device,
                    self.eval_chunk,
                    device.type == "cuda",
                    self.accelerator.process_index,
                    self.accelerator.num_processes,
                )
        finally:
            self.model.train(was_training)
        sums = self.accelerator.reduce(statistics.to_tensor().to(device), reduction="sum")
        metrics = WalkStatistics.from_tensor(sums, drafter.config.block_size).metrics()
        metrics["runtime"] = round(time.perf_counter() - started, 2)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def export_drafter(drafter: DSpineModel, directory: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Saves a copy of a (bound) drafter in the dtype it is served in, with the transfer table if the configuration stores it."""
    final = copy.deepcopy(drafter).to(dtype)
    if final.config.store_transfer_table and final.config.uses_transfer_space:
        final.train().eval()  # the table must be that of the rounded A
        final.ensure_transfer_table()
    final.config.dtype = dtype
    final.save_pretrained(directory)


class TimeLimitCallback(TrainerCallback):
    """Stops training cleanly `seconds` after `started` (a `time.monotonic()`), leaving evaluation and saving to the caller.

    Processes agree on the moment: the slowest clock of all decides, looked at every `every` steps.
    """

    def __init__(self, seconds: float, started: float | None = None, every: int = 10):
        self.deadline = (time.monotonic() if started is None else started) + seconds
        self.every = every

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every:
            return control
        over = time.monotonic() > self.deadline
        if torch.distributed.is_initialized():
            flag = torch.tensor(float(over), device=args.device)
            torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
            over = bool(flag.item())
        if over:
            control.should_training_stop = True
        return control


__all__ = ["DSpineTrainer", "TargetRunner", "TimeLimitCallback", "export_drafter"]
