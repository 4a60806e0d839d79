"""The decoding tail: candidates, transition cache and walk of a drafted block, eagerly or inside the draft's CUDA graph."""

import torch

from dspine.modeling_dspine.registry_dspine import call

from .head import HeadShard


class DecodingTail:
    """Chooses the tokens of drafted blocks from what the draft model left behind.

    All shapes follow from the batch size, nothing waits for the device and nothing is kept between calls, so a call may be
    recorded into a CUDA graph.

    Args:
        config: the drafter's `DSpineConfig`.
        norm_weight: of the drafter's final norm, `[d]`.
        write_weights: the last layer's injection weights (`DSpineInjection.write_weights`), None without refinement.
        transfer_table: Z `[V, r]`, None without refinement.
        head: the target's output embeddings.
    """

    def __init__(self, config, norm_weight, write_weights: dict | None, transfer_table, head: HeadShard):
        self.config, self.norm_weight, self.write_weights = config, norm_weight, write_weights
        self.transfer_table, self.head = transfer_table, head

    @torch.no_grad()
    def __call__(
        self,
        hidden_states: torch.Tensor,  # [N, B, d], norm(h)
        left_behind: tuple[torch.Tensor, ...] | None,  # see `DSpineDraftModel.left_behind`
        temperature: torch.Tensor | None = None,  # [N], 0 for greedy rows
        uniforms: torch.Tensor | None = None,  # [N, B - 1]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns tokens `[N, B - 1]`, candidates `[N, B - 1, K]` (int64) and q over them `[N, B - 1, K]` (fp32)."""
        # a copy without the anchors' states: the head then reads one dense matrix
        logits = self._scale(self.head.logits(hidden_states[:, 1:].contiguous()))
        values, candidates = self.head.select(logits, self.config.num_candidates)
        if self.config.refinement:
            scores = self._scale(self._pair_scores(left_behind, candidates))
        else:
            # DFlash: slots do not see each other's choice, so every predecessor gives the same scores
            scores = values[:, :, None].expand(-1, -1, values.shape[-1], -1)
        guidance = float(self.config.refinement_guidance)
        tokens, probs = call(
            "walk_transition_cache",
            scores.contiguous(),
            candidates,
            temperature,
            uniforms,
            base_scores=values if guidance else None,
            guidance=guidance,
        )
        return tokens, candidates, probs

    def _pair_scores(self, left_behind, candidates: torch.Tensor) -> torch.Tensor:
        pre_write, features, anchor_features = left_behind
        states, features = pre_write[:, 1:], features[:, 1:]
        candidates = candidates.contiguous()
        if self.head.group is None:
            tables = (candidates, self.transfer_table, self.head.weight)
            return call(
                "transition_cache", states, features, anchor_features, *tables, self.norm_weight, **self.write_weights
            )
        # The operation reads z(a) and W_b by one id, but here W_b may live on another rank. So it is given tables of this block's
        # candidates alone, with zeros for rows held elsewhere: every score is then computed on one rank and the sum collects them,
        # which moves K * K scores per slot instead of K rows of width d.
        own = torch.arange(candidates.numel(), device=candidates.device).view_as(candidates)
        features_of = self.transfer_table[candidates.flatten()]
        rows = self.head.rows(candidates.flatten())
        scores = call(
            "transition_cache",
            states,
            features,
            anchor_features,
            own,
            features_of,
            rows,
            self.norm_weight,
            **self.write_weights,
        )
        return self.head.total(scores)

    def _scale(self, logits: torch.Tensor) -> torch.Tensor:
        """Scaled and capped as the target does."""
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap


class GraphTail:
    """A `DecodingTail` recorded into the draft's CUDA graph: results and parameters live in buffers of fixed address.

    SGLang's DFLASH worker calls it as its draft sampler (`sampler(hidden_states, input_ids)` at capture) and reads `out` after a
    replay. Uniforms are drawn before a replay and only for batches with sampled rows: a graph that draws its own makes PyTorch set
    the generator's state on the device with two launches before every replay.

    Args:
        tail: what to record.
        draft_model: the `DSpineDraftModel` whose forward pass precedes the call.
        block_size: slots per block as served, the anchor included.
        max_rows: the largest batch that will be captured.
    """

    def __init__(self, tail: DecodingTail, draft_model, block_size: int, max_rows: int, device):
        slots, K = block_size - 1, tail.config.num_candidates
        self.tail, self.draft_model, self.block_size = tail, draft_model, block_size
        self.out = torch.zeros(max_rows * slots, dtype=torch.int64, device=device)
        self.candidates = torch.zeros(max_rows, slots, K, dtype=torch.int64, device=device)
        self.probs = torch.zeros(max_rows, slots, K, dtype=torch.float32, device=device)
        self.temperature = torch.zeros(max_rows, dtype=torch.float32, device=device)
        self.uniforms = torch.zeros(max_rows, slots, dtype=torch.float32, device=device)
        self._all_greedy = True

    def stage(self, temperature: torch.Tensor | None) -> None:
        """Sets temperatures `[N]` (None: all greedy) and uniforms of the next replay; call before it, on its stream."""
        if temperature is None:
            if not self._all_greedy:
                self.temperature.zero_()
            self._all_greedy = True
            return
        # a batch beyond the largest captured one runs eagerly and takes its temperatures from elsewhere
        rows = min(len(temperature), len(self.temperature))
        self.temperature[:rows].copy_(temperature[:rows])
        self.uniforms[:rows].uniform_()
        self._all_greedy = False

    def __call__(self, hidden_states: torch.Tensor, input_ids: torch.Tensor | None = None) -> None:
        """Records the tail of one draft pass: `hidden_states` `[N * B, d]`."""
        rows = hidden_states.shape[0] // self.block_size
        tokens, candidates, probs = self.tail(
            hidden_states.view(rows, self.block_size, -1),
            self.draft_model.take_left_behind(),
            self.temperature[:rows],
            self.uniforms[:rows],
        )
        self.out[: tokens.numel()].copy_(tokens.flatten())
        self.candidates[:rows].copy_(candidates)
        self.probs[:rows].copy_(probs)

    def proposal(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Candidates and q of the last replay's first `rows` blocks."""
        return self.candidates[:rows], self.probs[:rows]
