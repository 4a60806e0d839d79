"""A plugin for SGLang with which `check_sglang.py` looks into a served drafter: it stores draft passes, or replaces drafts.

It is found by an entry point `record_sglang:register` in the group `sglang.srt.plugins`, for which a folder on PYTHONPATH with this
file and `record-0.dist-info/{METADATA,entry_points.txt}` is enough. It does what the environment asks for:

`DSPINE_RECORD=FOLDER`, for `layers`: every draft pass of one block becomes `FOLDER/pass-NNN.pt`, the anchor and its position, the
residual stream after every injection, `norm(h)`, the candidates, q and the tokens chosen. The server must run without CUDA graphs
(`--disable-cuda-graph`), since nothing of a graph's replay passes through Python.

`DSPINE_FIXED_DRAFTS=V`, for `rounds` and `profile` with random weights: what DFLASH or DSPINE proposes is replaced, in the draft's CUDA
graph, by the same arbitrary tokens below V. Untrained drafters propose one token for all slots of a block, and products of equal rows
need less power than others: servers whose speed is compared should verify equal data, as diverse as real drafts.

Each is confirmed by one line in the server's log, since SGLang only logs plugins that fail.
"""

import functools
import logging
import os
from pathlib import Path


logger = logging.getLogger(__name__)

MOST = 64  # passes stored


def register() -> None:
    """Called by SGLang in each of its processes; does nothing unless the environment asks for it."""
    if not (os.environ.get("DSPINE_RECORD") or os.environ.get("DSPINE_FIXED_DRAFTS")):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker", attach, HookType.AROUND
    )


def attach(original, *args, **kwargs):
    """Goes around the choice of the worker class, which happens in the scheduler's process: SGLang's models may be imported there."""
    worker_class = original(*args, **kwargs)
    if os.environ.get("DSPINE_FIXED_DRAFTS"):
        from sglang.srt.speculative import dflash_worker_v2

        if not hasattr(dflash_worker_v2.make_draft_sampler_capture_hook, "__wrapped__"):
            fix_drafts(dflash_worker_v2, int(os.environ["DSPINE_FIXED_DRAFTS"]))
    if not os.environ.get("DSPINE_RECORD"):
        return worker_class
    from dspine.integrations.sglang.model import DSpineDraftModel
    from dspine.integrations.sglang.worker import DSpineWorker

    if not hasattr(DSpineWorker, "recorded"):
        DSpineWorker.recorded = 0
        logger.warning("draft passes are recorded in %s", os.environ["DSPINE_RECORD"])
        record(DSpineWorker, DSpineDraftModel, Path(os.environ["DSPINE_RECORD"]))
    return worker_class


def fix_drafts(worker_module, vocabulary: int) -> None:
    """Wraps the function that records a draft sampler into the draft's CUDA graph: the tokens it leaves behind are written over."""
    import torch

    make = worker_module.make_draft_sampler_capture_hook

    @functools.wraps(make)
    def make_fixed(draft_sampler):
        hook = make(draft_sampler)
        # a server's log must tell whether its drafts were equal to another's
        logger.warning("drafts are replaced by fixed tokens below %d", vocabulary)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(100, vocabulary, draft_sampler.out.shape, generator=generator).to(draft_sampler.out)

        def capture_hook(*args, **kwargs):
            hook(*args, **kwargs)
            draft_sampler.out.copy_(tokens)

        return capture_hook

    worker_module.make_draft_sampler_capture_hook = make_fixed


def record(worker_class, model_class, folder: Path) -> None:
    """Wraps the draft model's forward pass and the worker's tail."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    forward, choose = model_class.forward, worker_class._greedy_sample_from_vocab_parallel_head
    seen = {}

    def recording_forward(self, input_ids, positions, *args, **kwargs):
        layers = {}
        hooks = [
            module.register_forward_hook(lambda _, __, out, name=name: layers.__setitem__(name, out[0].clone()))
            for name, module in self.injections.items()
        ]
        try:
            output = forward(self, input_ids, positions, *args, **kwargs)
        finally:
            [hook.remove() for hook in hooks]
        seen.update(ids=input_ids.clone(), positions=positions.clone(), layers=layers, hidden=output.hidden_states)
        return output

    def recording_choice(self, **kwargs):
        tokens = choose(self, **kwargs)
        if worker_class.recorded < MOST and len(seen["ids"]) == self.draft_model.block_size:
            candidates, probs = self._proposal
            passed = seen | {"tokens": tokens, "candidates": candidates[0], "probs": probs[0]}
            passed["layers"] = {name: value[0].cpu() for name, value in seen["layers"].items()}
            passed = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in passed.items()}
            torch.save(passed, folder / f"pass-{worker_class.recorded:03d}.pt")
            worker_class.recorded += 1
        return tokens

    model_class.forward = recording_forward
    worker_class._greedy_sample_from_vocab_parallel_head = recording_choice
