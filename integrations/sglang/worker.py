"""One round of speculative decoding with a DSpine drafter: SGLang's DFLASH worker with another tail and another acceptance.

Scheduling, KV pools, verification, greedy acceptance, grammar masks and logprobs stay DFLASH's. Replaced are:

- `_maybe_build_draft_sampler`: candidates, transition cache and walk, recorded behind the draft pass in its CUDA graph;
- `_greedy_sample_from_vocab_parallel_head`: the same tail where a batch runs without a graph;
- the acceptance of batches with sampled rows, which DFLASH treats as if its proposals had probability one: here the q that
  proposed is used. DFLASH calls a module function for it, `plugin.py` puts `accept_sampled` around that function;
- `_resolve_mask_token_id`: SGLang 0.5.17 looks for the mask id in `dflash_config` only and would otherwise invent a token.
"""

import logging

import torch

from sglang.srt.distributed import get_tp_group
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_exec
from sglang.srt.speculative import dflash_utils
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

from .acceptance import accept_block, filter_min_p
from .checks import check_target
from .head import head_shard
from .tail import GraphTail


logger = logging.getLogger(__name__)

# the worker whose round is running in this process; schedulers are single-threaded
_running: "DSpineWorker | None" = None


def draft_temperature(sampling_info) -> torch.Tensor | None:
    """Temperature of every row `[N]` (fp32), 0 in greedy ones; None when all are greedy. No wait for the device.

    SGLang marks a greedy row by top_k = 1 and leaves its temperature at 1.
    """
    if sampling_info is None or sampling_info.is_all_greedy:
        return None
    temperature = sampling_info.temperatures.view(-1).float().clamp_min(1e-5)
    return torch.where(sampling_info.top_ks.view(-1) <= 1, 0.0, temperature)


def target_probabilities(next_token_logits, sampling_info, rows: int, block_size: int, **top_k) -> torch.Tensor:
    """What the target says after each token of each block, processed as requested: `[N, B, V]`, fp32, normalised."""
    # renamed after 0.5.17
    build = getattr(dflash_utils, "build_dflash_verify_target_probs", None)
    build = build or dflash_utils.build_speculative_verify_target_probs
    probs = build(
        next_token_logits=next_token_logits, sampling_info=sampling_info, draft_token_num=block_size, bs=rows, **top_k
    ).float()
    if getattr(sampling_info, "need_min_p_sampling", False):
        probs = filter_min_p(probs, sampling_info.min_ps)
    return probs


def prepare_sampling(device: torch.device) -> None:
    """Runs SGLang's top-k and top-p filters once: they are compiled at their first use, which should be at start, not in a request.

    Raises:
        ValueError: one of them does not run, so sampled requests could not be verified.
    """
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.125]] * 2, device=device)
    limits = {
        "top_k_renorm_prob": torch.tensor([1, 1 << 30], dtype=torch.int32, device=device),
        "top_p_renorm_prob": torch.tensor([0.4, 1.0], device=device),
    }
    for name, limit in limits.items():
        try:
            kept = getattr(dflash_utils, name)(probs, limit)
            expected = torch.stack([torch.tensor([1.0, 0, 0, 0], device=device), probs[1]])
            wrong = not torch.allclose(kept.float(), expected, atol=1e-3)
        except Exception as error:
            raise ValueError(
                f"SGLang's {name}, by which sampled requests are verified, does not run on this machine ({type(error).__name__}: {error})"
            ) from error
        if wrong:
            raise ValueError(f"SGLang's {name} must keep {expected.tolist()} of {probs.tolist()}, got {kept.tolist()}")


def accept_sampled(original, *args, **kwargs):
    """Goes around `compute_dflash_sampling_correct_drafts_and_bonus`: our acceptance in our rounds, SGLang's in all others."""
    if _running is None:
        return original(*args, **kwargs)
    return _running.accept_sampled(*args, **kwargs)


class DSpineWorker(DFlashWorkerV2):
    """Takes the arguments of `DFlashWorkerV2`.

    Raises:
        ValueError: target and drafter do not belong together, or this build of SGLang cannot verify sampled requests.
    """

    def __init__(self, *args, **kwargs):
        self._proposal: tuple[torch.Tensor, torch.Tensor] | None = None
        self._temperature: torch.Tensor | None = None
        super().__init__(*args, **kwargs)
        if not dflash_utils.is_dflash_sampling_verify_available():
            raise ValueError(
                "this build lacks sgl_kernel's top_k_renorm_prob and top_p_renorm_prob, without which SGLang verifies sampled requests as if they were greedy"
            )
        prepare_sampling(torch.device(self.draft_model.norm.weight.device))
        config, runner = self.draft_model.config, self.model_runner
        check_target(config, runner.model_config)
        dtype = self.draft_model.norm.weight.dtype
        if dtype != runner.dtype:
            raise ValueError(
                f"target and drafter must run in one dtype, got {runner.dtype} and {dtype}: serve with an explicit --dtype, or save the drafter in the target's"
            )
        self.draft_model.set_block_size(int(self.block_size))
        head = head_shard(
            getattr(runner.model, "lm_head", None),
            config.vocab_size,
            config.hidden_size,
            dtype,
            get_tp_group(),
        )
        # before the KV pools are sized and before any graph is captured
        self.draft_model.bind_head(head)

    def _resolve_mask_token_id(self, *, mask_token: str, mask_token_id: int | None = None) -> int:
        return int(self.draft_model.config.mask_token_id)  # checked against the target by `check_target`

    def _maybe_build_draft_sampler(self):
        if envs.SGLANG_DFLASH_EAGER_DRAFT_SAMPLER.get():
            return None
        return GraphTail(
            self.draft_model.tail,
            self.draft_model,
            int(self.block_size),
            max(get_exec().graph.cuda_graph_config.decode.bs),
            self.draft_model.norm.weight.device,
        )

    def forward_batch_generation(self, batch, *args, **kwargs):
        global _running
        self._proposal = None
        if not (batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle()):
            self._temperature = draft_temperature(batch.sampling_info)
            if self._draft_sampler is not None:
                self._draft_sampler.stage(self._temperature)
        _running = self
        try:
            return super().forward_batch_generation(batch, *args, **kwargs)
        finally:
            _running = None

    def _greedy_sample_from_vocab_parallel_head(
        self, *, hidden_states, lm_head, chunk_size: int = 256
    ) -> torch.Tensor:
        """The tail without a graph: slots 1..B-1 `[N * (B - 1), d]` of the last draft pass to tokens `[N * (B - 1)]`."""
        slots = int(self.block_size) - 1
        blocks = hidden_states.view(-1, slots, hidden_states.shape[-1])
        uniforms = None
        if self._temperature is not None:
            uniforms = torch.rand(blocks.shape[:2], dtype=torch.float32, device=blocks.device)
        # the tail skips the anchor's state, which is not handed over here
        blocks = torch.nn.functional.pad(blocks, (0, 0, 1, 0))
        tokens, *self._proposal = self.draft_model.tail(
            blocks, self.draft_model.take_left_behind(), self._temperature, uniforms
        )
        return tokens.reshape(-1)

    def accept_sampled(
        self, *, candidates, next_token_logits, sampling_info, max_top_k=None, uniform_top_k_value=None, **others
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Exact rejection sampling: blocks `[N, B]` (anchor first) to drafts kept `[N]` (int32) and the target's own token `[N]`."""
        rows, block_size = candidates.shape
        probs = target_probabilities(
            next_token_logits,
            sampling_info,
            rows,
            block_size,
            max_top_k=max_top_k,
            uniform_top_k_value=uniform_top_k_value,
        )
        proposal = self._proposal or self._draft_sampler.proposal(rows)
        uniforms = torch.rand(rows, block_size, dtype=torch.float32, device=candidates.device)
        return accept_block(candidates, probs, *proposal, uniforms)
