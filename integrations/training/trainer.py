"""`DSpineTrainer`: `transformers.Trainer` with a frozen target that runs in the same process.

Everything that Trainer does is Trainer's: optimizer, schedule, accumulation, checkpoints, resuming, logging, callbacks, DDP. This
file adds the target's pass (`TargetRunner`), hands its taps to the objective, and evaluates by walking blocks.
"""

import copy
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from dspine.modeling_dspine.hub_dspine import card_text
from dspine.modeling_dspine.modeling_dspine import DSpineModel
from dspine.modeling_dspine.target_dspine import TapRecorder

from .data import EpochSampler, PackedDataset, single_row
from .lora import merge_adapter
from .masks import PACKED_ATTENTION, slot_masks, target_mask
from .metrics import WalkStatistics, walk_dataset
from .objective import DSpineObjective, LossArguments


def decoder_view(decoder: nn.Module, layers: list[nn.Module], norm: bool = True) -> nn.Module:
    """The decoder with other `layers`, or the first of its own, and without its final norm unless `norm`; the rest is shared."""
    view = copy.copy(decoder)
    view._modules = dict(decoder._modules)  # a module's copy shares its table of submodules
    view.layers = nn.ModuleList(layers)
    view.config = copy.copy(decoder.config)
    view.config.num_hidden_layers = len(layers)
    if not norm and isinstance(getattr(view, "norm", None), nn.Module):
        view.norm = nn.Identity()
    return view


class CompiledLayer(nn.Module):
    """A decoder layer that runs through a compiled forward function, which all layers of its class share.

    The whole decoder would be unrolled into one graph, whose compilation takes as many times longer as there are layers.
    """

    def __init__(self, layer: nn.Module, forward):
        super().__init__()
        self.layer, self.compiled_forward = layer, forward

    def forward(self, *args, **kwargs):
        return self.compiled_forward(self.layer, *args, **kwargs)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)  # decoders ask layers for their kind of attention


class TargetRunner:
    """Runs the frozen target over one packed row and returns its taps. Not a module: the target is neither trained nor saved.

    Layers after the last tap, which only the head would see, run when the head's input is asked for.

    Args:
        target: a causal language model; put into evaluation mode, frozen, and switched to the packed attention function.
        target_layer_ids: zero-based layers whose outputs are taken.
        compile: run the decoder's layers through `torch.compile`.

    Raises:
        ValueError: a target spread over processes is to be compiled.
    """

    def __init__(self, target: nn.Module, target_layer_ids: list[int], compile: bool = False):
        self.target = target.eval().requires_grad_(False)
        target.set_attn_implementation(PACKED_ATTENTION)
        text = target.config.get_text_config()
        kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
        window = getattr(text, "sliding_window", None) if "sliding_attention" in kinds else None
        self.windows = {kind: window if kind == "sliding_attention" else None for kind in kinds}
        decoder = target.get_decoder()
        layers = list(decoder.layers)
        if compile:
            if self.sharded:
                raise ValueError("compile_target must be False for a target that is spread over processes, got True")
            functions = {kind: torch.compile(kind.forward, dynamic=False) for kind in set(map(type, layers))}
            layers = [CompiledLayer(layer, functions[type(layer)]) for layer in layers]
        self.taps = TapRecorder(layers, target_layer_ids).__enter__()
        self.decoder = decoder_view(decoder, layers)
        self.up_to_taps = decoder_view(decoder, layers[: max(target_layer_ids) + 1], norm=False)

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def sharded(self) -> bool:
        """Whether a pass is an operation that all processes take part in."""
        return any(isinstance(p, DTensor) for p in self.target.parameters())

    @torch.no_grad()
    def __call__(self, row: dict[str, torch.Tensor], final: bool = False):
        """Taps `[1, L, len(target_layer_ids) * d]` of a row (tensors without batch dimension, see [`PackedDataset`]); with `final`
        also what the target's head sees, `[1, L, d]`."""
        flex = self.device.type == "cuda"
        masks = {kind: target_mask(row["document_starts"], window, flex) for kind, window in self.windows.items()}
        # the mask is final, so Transformers passes it on as it is; models with one kind of layer take it bare
        mask = next(iter(masks.values())) if len(masks) == 1 else masks
        # as in serving: no casts but the model's own
        with torch.autocast(self.device.type, enabled=False):
            outputs = (self.decoder if final else self.up_to_taps)(
                input_ids=row["input_ids"][None],
                attention_mask=mask,
                position_ids=row["position_ids"][None],
                use_cache=False,
            )
        taps = self.taps.take(self.device)
        return (taps, outputs.last_hidden_state) if final else taps


def shard_target(target: nn.Module, device: torch.device) -> nn.Module:
    """Spreads the target's decoder layers over all processes (FSDP2), for targets that one device cannot hold beside the drafter.

    Every layer is gathered for the moment it computes. Embeddings, final norm and head stay whole on `device`: the loss and the
    transfer space read their rows.
    """
    for layer in target.get_decoder().layers:
        # said explicitly: PyTorch keeps a layer that has no sharded parent gathered
        fully_shard(layer.requires_grad_(False), reshard_after_forward=True)
    return target.to(device)


class DSpineTrainer(Trainer):
    """Trains a drafter for a frozen target.

    Args:
        model: the drafter, bound to `target` (`drafter.bind_target(target, init_transfer=True)` for a new one), in fp32: the
            master weights of a run with `bf16=True`. Or a `PeftModel` around it (see `lora.py`), of which checkpoints and the final
            folder hold the adapter.
        target: the target, in the dtype it is served in.
        args: `TrainingArguments`; `per_device_train_batch_size` must be 1, a row being a whole batch.
        train_dataset, eval_dataset: a [`PackedDataset`] each; a dict of them for several evaluation sets.
        loss_arguments: weights of the loss.
        compile_drafter, compile_target: compile the drafter's pass (the part before the output head) or the target's.
        eval_chunk: anchors per pass in evaluation; bounds its memory.
        export_dtype: of the drafter that `save_model()` and `push_to_hub()` write into `output_dir`; None leaves it in fp32, as
            checkpoints are.
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
        export_dtype: torch.dtype | None = torch.bfloat16,
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
        adapter, drafter = None, model
        if not isinstance(model, DSpineModel):
            adapter, drafter = model, model.get_base_model()
        if drafter.binding.lm_head is not target.get_output_embeddings():
            raise ValueError("the drafter must be bound to the given target, got one bound to another model")
        # rows are not columns of the model's signature
        args.remove_unused_columns = False
        # otherwise the host waits, while it copies the next row, until the device has finished the last step
        args.accelerator_config.non_blocking = args.dataloader_pin_memory
        drafter.set_attn_implementation(PACKED_ATTENTION)
        objective = DSpineObjective(drafter, loss_arguments, compile=compile_drafter, adapter=adapter)
        self.distance = objective.arguments.distance != "none"
        self.eval_chunk = eval_chunk
        self.adapter, self.export_dtype = adapter, export_dtype
        self.run_target = TargetRunner(target, drafter.config.target_layer_ids, compile=compile_target)
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
        if adapter is not None and self.is_fsdp_enabled:
            raise ValueError("an adapter is trained data parallel, got FSDP; a drafter under LoRA needs no sharding")
        if not self.run_target.sharded and self.target.device != args.device:
            self.target.to(args.device)

    @property
    def drafter(self) -> DSpineModel:
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False).drafter

    @property
    def target(self) -> nn.Module:
        return self.run_target.target

    def whole_drafter(self, state_dict: dict[str, torch.Tensor] | None = None) -> DSpineModel:
        """The drafter with all its weights on this device: itself, or under FSDP a bound copy with gathered weights.

        Args:
            state_dict: the objective's tensors, already gathered; otherwise all processes must call this together.
        """
        if state_dict is None and not any(isinstance(p, DTensor) for p in self.drafter.parameters()):
            return self.drafter
        if state_dict is None:
            state_dict = self.accelerator.unwrap_model(self.model).state_dict()
        parameters = {
            name.removeprefix("drafter."): value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in state_dict.items()
        }
        whole = DSpineModel(self.drafter.config).float().to(self.args.device)
        whole.load_state_dict(parameters)
        whole.bind_target(self.target)
        if whole.config.uses_transfer_space:
            whole.ensure_transfer_table()
        return whole.train(self.drafter.training)

    def _get_train_sampler(self, train_dataset=None):
        dataset = self.train_dataset if train_dataset is None else train_dataset
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return EpochSampler(len(dataset), seed)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.distance:
            taps, inputs["target_hidden_states"] = self.run_target(inputs, final=True)
        else:
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
        was_training, device = self.model.training, self.args.device
        self.model.eval()
        drafter = self.whole_drafter().eval()
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

    # ---- saving -----------------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        final = output_dir is None or Path(output_dir) == Path(self.args.output_dir)
        if final and self.args.should_save and self.adapter is None and self.export_dtype is not None:
            # over the master weights just written; the card is kept
            export_drafter(self.whole_drafter(state_dict), self.args.output_dir, self.export_dtype)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.adapter is None:
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        from peft import load_peft_weights, set_peft_model_state_dict

        set_peft_model_state_dict(self.adapter, load_peft_weights(resume_from_checkpoint, device="cpu"))

    def _load_best_model(self) -> None:
        if self.adapter is None:
            return super()._load_best_model()
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def create_model_card(self, **kwargs) -> None:
        """The drafter's own card (see `hub_dspine.py`) with the name of the repository; one that was edited is kept, and an
        adapter's is left to `peft`. The arguments of Trainer's method are accepted and not used."""
        if not self.is_world_process_zero() or self.adapter is not None:
            return
        config, card = self.drafter.config, Path(self.args.output_dir) / "README.md"
        if not card.exists() or card.read_text(encoding="utf-8") == card_text(config, str(self.args.output_dir)):
            card.write_text(card_text(config, self.hub_model_id or str(self.args.output_dir)), encoding="utf-8")


def export_drafter(drafter: DSpineModel, directory: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Saves a copy of a (bound) drafter in the dtype it is served in, with the transfer table if the configuration stores it.

    A `PeftModel` around a drafter is merged first.
    """
    final = copy.deepcopy(drafter)
    if not isinstance(final, DSpineModel):
        final = merge_adapter(final)
    final = final.to(dtype)
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
            control.should_save = args.save_strategy != SaveStrategy.NO  # to be resumed from here
        return control


__all__ = ["DSpineTrainer", "TargetRunner", "TimeLimitCallback", "export_drafter", "shard_target"]
