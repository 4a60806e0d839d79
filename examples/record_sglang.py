"""A plugin for SGLang that stores what a served DSpine drafter computes, for `check_sglang.py layers`.

It is found by an entry point `record_sglang:register` in the group `sglang.srt.plugins`, for which a folder on PYTHONPATH with this
file and `record-0.dist-info/{METADATA,entry_points.txt}` is enough. The server must run without CUDA graphs, since nothing of a graph's replay
passes through Python:

    DSPINE_RECORD=records/ python -m sglang.launch_server ... --speculative-algorithm DSPINE --disable-cuda-graph

Every draft pass of one block becomes `records/pass-NNN.pt`: the anchor and its position, the residual stream after every injection,
`norm(h)`, the candidates, q and the tokens chosen.
"""

import os
from pathlib import Path


MOST = 64  # passes stored


def register() -> None:
    """Called by SGLang in each of its processes; does nothing unless DSPINE_RECORD names a folder."""
    if not os.environ.get("DSPINE_RECORD"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker", attach, HookType.AROUND
    )


def attach(original, *args, **kwargs):
    """Goes around the choice of the worker class, which happens in the scheduler's process: SGLang's models may be imported there."""
    worker_class = original(*args, **kwargs)
    from dspine.integrations.sglang.model import DSpineDraftModel
    from dspine.integrations.sglang.worker import DSpineWorker

    if not hasattr(DSpineWorker, "recorded"):
        DSpineWorker.recorded = 0
        record(DSpineWorker, DSpineDraftModel, Path(os.environ["DSPINE_RECORD"]))
    return worker_class


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
