"""The block decoding loop: draft a block, verify it in one target pass, commit what the target would have said.

One round, for all rows of a batch at once:

1. draft: `[anchor, mask, ...]` and the tapped target states of the tokens committed last give B - 1 proposals (`propose`);
2. verify: the target reads anchor and proposals in one pass;
3. accept: the longest prefix the target agrees with, plus one token of its own. Greedy: agreement is equality with its argmax.
   Sampling: rejection sampling with the q that proposed (Leviathan et al. 2023, algorithm 1), so outputs follow the target's
   processed distribution exactly;
4. crop both caches to what was committed.

Rows commit different numbers of tokens. Columns of the caches are cropped to the largest number; in the other rows the surplus
columns stay as holes that the attention mask hides, so nothing is ever moved or recomputed. Draft and target caches have the same
columns, hence share one mask. Token sequences have no holes.
"""

import sys
import time
from dataclasses import dataclass, field

import torch
from transformers.cache_utils import DynamicCache, StaticCache
from transformers.generation import logits_process as processors
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .target_dspine import TapRecorder


# processors that map each row of scores by itself, whatever came before it: all slots of a block can be processed in one call
ROWWISE_PROCESSORS = (
    processors.EpsilonLogitsWarper,
    processors.EtaLogitsWarper,
    processors.InfNanRemoveLogitsProcessor,
    processors.LogitNormalization,
    processors.MinPLogitsWarper,
    processors.SuppressTokensLogitsProcessor,
    processors.TemperatureLogitsWarper,
    processors.TopKLogitsWarper,
    processors.TopPLogitsWarper,
    processors.TypicalLogitsWarper,
)
# processors that run the model or keep a state from step to step
UNSUPPORTED_PROCESSORS = tuple(
    getattr(processors, name)
    for name in (
        "SynthIDTextWatermarkLogitsProcessor",
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "ClassifierFreeGuidanceLogitsProcessor",
    )
    if hasattr(processors, name)
)


@dataclass
class DSpineStatistics:
    """What a generation cost and how well its drafts were accepted.

    Args:
        accepted_lengths: per row, the tokens committed in every round, the target's own token included and clipped at the end
            of the text. The token of the prefill belongs to no round.
        slot_reached, slot_accepted: per predicted slot 1..B-1, in how many rounds all earlier slots were accepted, and in how
            many of these the slot was too.
        draft_time, verify_time, prefill_time: seconds.
    """

    accepted_lengths: list[list[int]]
    slot_reached: list[int]
    slot_accepted: list[int]
    draft_time: float = 0.0
    verify_time: float = 0.0
    prefill_time: float = 0.0

    @property
    def rounds(self) -> int:
        return sum(len(row) for row in self.accepted_lengths)

    @property
    def accepted_length(self) -> float:
        """Pooled: tokens / rounds."""
        return sum(map(sum, self.accepted_lengths)) / max(self.rounds, 1)

    @property
    def accepted_length_per_request(self) -> float:
        """Mean over rows of each row's mean."""
        means = [sum(row) / len(row) for row in self.accepted_lengths if row]
        return sum(means) / max(len(means), 1)

    @property
    def slot_acceptance(self) -> list[float]:
        """Conditional acceptance of every slot, given that the ones before it were accepted."""
        return [a / r if r else 0.0 for a, r in zip(self.slot_accepted, self.slot_reached)]


@dataclass
class DSpineGenerateOutput(GenerateDecoderOnlyOutput):
    """Output of [`dspine_generate`] with `return_dict_in_generate=True`: as `generate`'s, plus `statistics`."""

    statistics: DSpineStatistics | None = None


class _Clock:
    """Adds up the seconds of marked stretches: events on CUDA, so that timing never waits for the device, else the host clock."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.marks: dict[str, list] = {}

    def now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, name: str, since):
        now = self.now()
        self.marks.setdefault(name, []).append((since, now))
        return now

    def total(self, name: str) -> float:
        if self.cuda:
            torch.cuda.synchronize()
            return sum(a.elapsed_time(b) for a, b in self.marks.get(name, [])) / 1000
        return sum(b - a for a, b in self.marks.get(name, []))


@dataclass
class _Rows:
    """The texts of a batch: left-padded prompt, committed tokens, and who is done."""

    tokens: torch.Tensor  # [batch, max_length]
    lengths: torch.Tensor  # [batch], columns of `tokens` in use
    padding: torch.Tensor  # [batch], of the prompt's left
    finished: torch.Tensor  # [batch] bool
    pad_token_id: int
    scores: list[list[torch.Tensor]] = field(default_factory=list)
    logits: list[list[torch.Tensor]] = field(default_factory=list)

    @property
    def anchors(self) -> torch.Tensor:
        return self.tokens.gather(1, self.lengths[:, None] - 1)[:, 0]

    @property
    def anchor_positions(self) -> torch.Tensor:
        return self.lengths - 1 - self.padding


@torch.no_grad()
def dspine_generate(
    model,
    input_ids: torch.LongTensor,
    logits_processor=None,
    stopping_criteria=None,
    generation_config=None,
    drafter=None,
    generator: torch.Generator | list[torch.Generator] | None = None,
    streamer=None,
    synced_gpus: bool = False,
    **model_kwargs,
):
    """Speculative generation with a DSpine drafter, for `target.generate(..., custom_generate=dspine_generate, drafter=drafter)`.

    The text is the target's own: greedy decoding gives token for token what `generate` gives (in low precision up to near-ties,
    as a block and a single token run through different kernels), sampling follows the same distribution.

    Args:
        drafter: a [`DSpineModel`] made for `model`; bound to it on first use.
        generator: source of randomness, one for all rows or a list with one per row (rows are then independent of each other).
        Everything else is what `generate` prepares.

    Returns:
        `[batch, length]` token ids, or a [`DSpineGenerateOutput`] with `return_dict_in_generate=True`.

    Raises:
        ValueError: an option that block decoding cannot honour, or a drafter that does not fit the target.
    """
    streamer = streamer if streamer is not None else _streamer_of_generate()
    cache_name = "cache" if "cache" in model_kwargs else "past_key_values"
    cache = model_kwargs.pop(cache_name, None)
    _check(
        model,
        drafter,
        input_ids,
        generation_config,
        logits_processor,
        cache,
        generator,
        streamer,
        synced_gpus,
        model_kwargs,
    )
    if drafter._binding is None or drafter.binding.lm_head is not model.get_output_embeddings():
        drafter.bind_target(model)
    drafter.eval()

    config, device, batch = drafter.config, input_ids.device, input_ids.shape[0]
    block_size = config.block_size
    attention_mask = model_kwargs.pop("attention_mask", None)
    position_ids = model_kwargs.pop("position_ids", None)
    model_kwargs.pop("use_cache", None)
    prefill_kwargs = {k: v for k, v in model_kwargs.items() if v is not None}
    max_length = generation_config.max_length
    pad = 0 if generation_config._pad_token_tensor is None else int(generation_config._pad_token_tensor)
    rows = _Rows(
        tokens=torch.full((batch, max_length), pad, dtype=torch.long, device=device),
        lengths=torch.full((batch,), input_ids.shape[1], device=device),
        padding=torch.zeros(batch, dtype=torch.long, device=device)
        if attention_mask is None
        else (attention_mask == 0).sum(1).to(device),
        finished=torch.zeros(batch, dtype=torch.bool, device=device),
        pad_token_id=pad,
        scores=[[] for _ in range(batch)],
        logits=[[] for _ in range(batch)],
    )
    rows.tokens[:, : input_ids.shape[1]] = input_ids
    columns = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    has_holes = attention_mask is not None and not bool(columns.all())
    if position_ids is None:
        position_ids = (columns.long().cumsum(-1) - 1).clamp_min(0)
    policy = _Policy(generation_config, logits_processor, stopping_criteria, generator, device)
    statistics = DSpineStatistics([[] for _ in range(batch)], [0] * (block_size - 1), [0] * (block_size - 1))
    draft_cache = DynamicCache(config=config)
    draft_cache.activate_past_recording()
    clock = _Clock(device)
    keep_scores = generation_config.return_dict_in_generate and (
        generation_config.output_scores or generation_config.output_logits
    )

    with TapRecorder(drafter.binding.layers, config.target_layer_ids) as taps:
        mark = clock.now()
        outputs = model(
            input_ids=input_ids,
            attention_mask=columns.long() if has_holes else None,
            position_ids=position_ids,
            use_cache=True,
            **{cache_name: cache},
            **prefill_kwargs,
        )
        if not cache.is_croppable:
            raise ValueError(
                f"the target's cache ({type(cache).__name__}) cannot be cropped after a rejected draft; use the default dynamic cache"
            )
        cache.activate_past_recording()
        context, context_positions = taps.take(drafter.device), position_ids
        no_draft = input_ids.new_zeros(batch, 0)
        _commit(rows, policy, outputs.logits[:, -1:], no_draft, None, None, block_size, streamer, keep_scores)
        clock.add("prefill", mark)

        while not bool(rows.finished.all()):
            mark = clock.now()
            anchors = rows.anchors
            slot_positions = rows.anchor_positions[:, None] + torch.arange(block_size, device=device)
            uniforms = policy.uniforms(rows, 2 * block_size - 1) if policy.do_sample else None
            slots = torch.full((batch, block_size), config.mask_token_id, device=device)
            slots[:, 0] = anchors
            draft_mask = None
            if has_holes:
                draft_mask = torch.cat([columns, columns.new_ones(batch, block_size)], dim=1)
            drafted = drafter(
                noise_embeds=drafter.binding.embed(slots, config.input_embedding_scale).to(drafter.device),
                context_hidden_states=context,
                anchor_ids=anchors[:, None].to(drafter.device),
                attention_mask=None if draft_mask is None else draft_mask.to(drafter.device),
                position_ids=torch.cat([context_positions, slot_positions], dim=1).to(drafter.device),
                cache=draft_cache,
            )
            proposal = drafter.propose(
                drafted,
                anchors.to(drafter.device),
                None if uniforms is None else torch.full((batch,), policy.temperature, device=drafter.device),
                None if uniforms is None else uniforms[:, : block_size - 1].to(drafter.device),
            )
            draft_cache.crop(-block_size)
            # never verify past the end of the longest text still running
            left = int((max_length - rows.lengths)[~rows.finished].max())
            offered = min(block_size, left) - 1
            draft_tokens = proposal.tokens[:, :offered].to(device)
            mark = clock.add("draft", mark)

            outputs = model(
                input_ids=torch.cat([anchors[:, None], draft_tokens], dim=1),
                attention_mask=torch.cat([columns, columns.new_ones(batch, offered + 1)], dim=1).long()
                if has_holes
                else None,
                position_ids=slot_positions[:, : offered + 1],
                use_cache=True,
                **{cache_name: cache},
            )
            committed, accepted, running = _commit(
                rows, policy, outputs.logits, draft_tokens, proposal, uniforms, block_size, streamer, keep_scores
            )
            _count(statistics, committed, accepted, running, offered)
            keep = max(committed)
            cache.crop(-(offered + 1 - keep))
            new_columns = torch.arange(keep, device=device) < torch.tensor(committed, device=device)[:, None]
            columns = torch.cat([columns, new_columns], dim=1)
            has_holes = has_holes or min(committed) < keep
            context, context_positions = taps.take(drafter.device)[:, :keep], slot_positions[:, :keep]
            clock.add("verify", mark)

    if streamer is not None:
        streamer.end()
    sequences = rows.tokens[:, : int(rows.lengths.max())]
    if not generation_config.return_dict_in_generate:
        return sequences
    statistics.prefill_time, statistics.draft_time = clock.total("prefill"), clock.total("draft")
    statistics.verify_time = clock.total("verify")
    result = DSpineGenerateOutput(sequences=sequences, statistics=statistics)
    if generation_config.output_scores:
        result.scores = _by_step(rows.scores)
    if generation_config.output_logits:
        result.logits = _by_step(rows.logits)
    if not has_holes:
        result[cache_name] = cache
    return result


def _check(
    model,
    drafter,
    input_ids,
    generation_config,
    logits_processor,
    cache,
    generator,
    streamer,
    synced_gpus,
    model_kwargs,
):
    """Refuses, before any work, what block decoding cannot honour."""
    batch = input_ids.shape[0]
    if drafter is None:
        raise ValueError(
            "drafter must be given: target.generate(..., custom_generate=dspine_generate, drafter=drafter)"
        )
    if model.config.is_encoder_decoder:
        raise ValueError("the target must be a decoder-only model, got an encoder-decoder")
    if generation_config.num_beams > 1:
        raise ValueError(f"num_beams must be 1 for speculative decoding, got {generation_config.num_beams}")
    if cache is None:
        raise ValueError("use_cache must be True for speculative decoding, got a generation without a cache")
    if cache.get_seq_length() > 0:
        raise ValueError(
            f"the cache must be empty: the drafter needs the target's states of every earlier token, and {cache.get_seq_length()} tokens are cached already; pass the whole text as input_ids instead"
        )
    if batch > 1 and isinstance(cache, StaticCache):
        raise ValueError(
            "a static cache holds no room for rows of different progress; use the default dynamic cache for batches"
        )
    if batch > 1 and any(getattr(layer, "is_sliding", False) for layer in cache.layers):
        raise ValueError(
            "batches are not supported for targets with sliding-window layers: rows of different progress would see windows of different width; generate row by row"
        )
    if generation_config.return_dict_in_generate and (
        generation_config.output_attentions or generation_config.output_hidden_states
    ):
        raise ValueError(
            "output_attentions and output_hidden_states have no one-token steps to report in speculative decoding"
        )
    if isinstance(generator, (list, tuple)) and len(generator) != batch:
        raise ValueError(f"generator must be one generator or one per row ({batch}), got {len(generator)}")
    if streamer is not None and batch > 1:
        raise ValueError(f"a streamer takes one text at a time, got a batch of {batch}")
    if synced_gpus:
        raise ValueError("synced_gpus (ZeRO-3 or FSDP generation) is not supported by speculative decoding")
    for processor in logits_processor or []:
        if isinstance(processor, UNSUPPORTED_PROCESSORS):
            raise ValueError(
                f"{type(processor).__name__} is not supported by speculative decoding: it runs or follows the model step by step"
            )
    positions = model_kwargs.get("position_ids")
    if positions is not None and positions.dim() != 2:
        raise ValueError(f"position_ids must have shape [batch, length], got {list(positions.shape)}")
    head = getattr(model.get_output_embeddings(), "weight", None)
    if isinstance(head, torch.Tensor) and head.is_floating_point() and head.dtype != drafter.dtype:
        raise ValueError(
            f"drafter and target must have the same dtype, got {drafter.dtype} and {head.dtype}; load the drafter with dtype={head.dtype}"
        )


class _Policy:
    """How the target chooses tokens and when a text ends, as `generate` was told."""

    def __init__(self, generation_config, logits_processor, stopping_criteria, generator, device):
        self.do_sample = bool(generation_config.do_sample)
        self.temperature = float(generation_config.temperature or 1.0)
        self.max_length = generation_config.max_length
        self.logits_processor = logits_processor if logits_processor is not None else processors.LogitsProcessorList()
        self.rowwise = all(isinstance(p, ROWWISE_PROCESSORS) for p in self.logits_processor)
        self.generator = generator
        criteria = list(stopping_criteria or [])
        eos = [c.eos_token_id.reshape(-1) for c in criteria if isinstance(c, EosTokenCriteria)]
        self.eos = torch.cat(eos).to(device) if eos else None
        known = (EosTokenCriteria, MaxLengthCriteria)
        self.other_criteria = StoppingCriteriaList(c for c in criteria if not isinstance(c, known))

    def uniforms(self, rows: _Rows, count: int) -> torch.Tensor:
        """`[batch, count]` in [0, 1). With one generator per row, finished rows draw nothing, as if they were alone."""
        batch, device = rows.tokens.shape[0], rows.tokens.device
        if not isinstance(self.generator, (list, tuple)):
            at = device if self.generator is None else self.generator.device
            return torch.rand(batch, count, generator=self.generator, device=at).to(device)
        done = rows.finished.tolist()
        drawn = [
            torch.zeros(count) if stop else torch.rand(count, generator=g, device=g.device).cpu()
            for g, stop in zip(self.generator, done)
        ]
        return torch.stack(drawn).to(device)

    def scores(self, rows: _Rows, logits: torch.Tensor, draft_tokens: torch.Tensor, accepts) -> torch.Tensor:
        """Processed scores `[batch, slots, V]` in fp32. Slots behind a rejected one may be left unprocessed: nobody reads them.

        Processors that look at the text before a slot are called slot by slot with the row's own tokens.
        """
        batch, slots, vocab = logits.shape
        scores = logits.to(dtype=torch.float32, copy=True)
        if not self.logits_processor:
            return scores
        if self.rowwise:
            flat = scores.view(batch * slots, vocab)
            return self.logits_processor(rows.tokens.new_zeros(batch * slots, 1), flat).view(batch, slots, vocab)
        lengths, done = rows.lengths.tolist(), rows.finished.tolist()
        for row in (i for i in range(batch) if not done[i]):
            for slot in range(slots):
                # the row stands in every place of the batch, since some processors keep something per place
                text = torch.cat([rows.tokens[row, : lengths[row]], draft_tokens[row, :slot]]).expand(batch, -1)
                scores[row, slot] = self.logits_processor(text, scores[row, slot].repeat(batch, 1))[row]
                if slot < slots - 1 and not accepts(row, slot, scores[row, slot]):
                    break
        return scores

    def cut(self, rows: _Rows, texts: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the new tokens `texts` `[batch, slots]`, of which `counts` `[batch]` are meant, into `rows.tokens` up to and
        including the first that ends its row; returns how many were written and which rows ended."""
        counts = torch.minimum(counts, self.max_length - rows.lengths)
        slots = torch.arange(texts.shape[1], device=texts.device)
        ended = (rows.lengths + counts >= self.max_length) & (counts > 0)
        if self.eos is not None:
            is_eos = torch.isin(texts, self.eos) & (slots < counts[:, None])
            counts = torch.where(is_eos.any(1), is_eos.int().argmax(1) + 1, counts)
            ended |= is_eos.any(1)
        self._write(rows, texts, counts, slots)
        if self.other_criteria:
            lengths, written = rows.lengths.tolist(), counts.tolist()
            for row, length in enumerate(lengths):
                for i in range(written[row]):
                    if bool(self.other_criteria(rows.tokens[row, : length + i + 1][None], None).any()):
                        counts[row], ended[row] = i + 1, True
                        rows.tokens[row, length + i + 1 : length + written[row]] = rows.pad_token_id
                        break
        return counts, ended

    @staticmethod
    def _write(rows: _Rows, texts: torch.Tensor, counts: torch.Tensor, slots: torch.Tensor) -> None:
        columns = (rows.lengths[:, None] + slots).clamp_max(rows.tokens.shape[1] - 1)
        kept = torch.where(slots < counts[:, None], texts, rows.tokens.gather(1, columns))
        # columns clamped to the last one would race with its rightful token: write from the right end to the left
        for slot in reversed(range(texts.shape[1])):
            rows.tokens.scatter_(1, columns[:, slot : slot + 1], kept[:, slot : slot + 1])


def _commit(rows, policy, logits, draft_tokens, proposal, uniforms, block_size, streamer, keep_scores):
    """Accepts drafted tokens, adds the target's own, ends rows; returns per row the tokens committed and drafts accepted, and
    which rows were running."""
    logits = logits.to(rows.tokens.device)
    if uniforms is None and policy.do_sample:
        uniforms = policy.uniforms(rows, 2 * block_size - 1)
    accept_uniforms = None if uniforms is None else uniforms[:, block_size - 1 :]
    draft_probs = None
    if policy.do_sample and proposal is not None:
        offered = draft_tokens.shape[1]
        candidates = proposal.candidates[:, :offered].to(draft_tokens.device)
        q = proposal.probs[:, :offered].to(draft_tokens.device)
        draft_probs = (q * (candidates == draft_tokens[..., None])).sum(-1)

    def accepts(row: int, slot: int, scores: torch.Tensor) -> bool:
        token = draft_tokens[row, slot]
        if not policy.do_sample:
            return bool(scores.argmax() == token)
        return bool(accept_uniforms[row, slot] * draft_probs[row, slot] < torch.softmax(scores, -1)[token])

    scores = policy.scores(rows, logits, draft_tokens, accepts)
    at = torch.arange(scores.shape[0], device=scores.device)
    if policy.do_sample:
        target_probs = torch.softmax(scores, dim=-1)
        agrees = torch.zeros_like(draft_tokens, dtype=torch.bool)
        # a row near its end is not offered the slots behind it, as if the others were not there
        room = (policy.max_length - 1 - rows.lengths).clamp(0, draft_tokens.shape[1])
        if draft_tokens.shape[1]:
            p = target_probs[:, :-1].gather(-1, draft_tokens[..., None])[..., 0]
            agrees = accept_uniforms[:, : p.shape[1]] * draft_probs < p
            agrees &= torch.arange(p.shape[1], device=p.device) < room[:, None]
        accepted = agrees.long().cumprod(-1).sum(-1)
        leftover = target_probs[at, accepted]
        if draft_tokens.shape[1]:
            rejected = accepted < room
            slot = accepted.clamp_max(draft_tokens.shape[1] - 1)
            minus = torch.where(rejected[:, None], q[at, slot], 0.0)
            reduced = leftover.scatter_add(-1, candidates[at, slot], -minus).clamp_min(0)
            # rounding can empty a residual that is zero up to the last bit: then p itself is within that bit of q
            leftover = torch.where(reduced.sum(-1, keepdim=True) > 0, reduced, leftover)
        own = _draw(leftover, uniforms[:, -1])
    else:
        choice = scores.argmax(-1)
        accepted = (choice[:, :-1] == draft_tokens).long().cumprod(-1).sum(-1)
        own = choice[at, accepted]

    texts = torch.cat([draft_tokens, own[:, None]], dim=1).scatter(1, accepted[:, None], own[:, None])
    counts, ended = policy.cut(rows, texts, torch.where(rows.finished, 0, accepted + 1))
    # the only place of a round where the host waits for the device
    committed, accepted, running = torch.stack([counts, accepted, (~rows.finished).long()]).tolist()
    if keep_scores:
        for row, count in enumerate(committed):
            rows.scores[row].extend(scores[row, :count])
            rows.logits[row].extend(logits[row, :count].float())
    if streamer is not None:
        streamer.put(texts[:, : committed[0]].cpu())
    rows.lengths += counts
    rows.finished |= ended
    return committed, accepted, running


def _draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Inverts the distribution function of unnormalised `weights` `[batch, V]` at `uniforms` `[batch]`: token ids `[batch]`."""
    wide = torch.float32 if weights.device.type == "mps" else torch.float64
    cumulative = weights.to(wide).cumsum(-1)
    point = uniforms.to(wide)[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, point, right=True)[:, 0]
    # a point rounded up to the total must not fall behind the last token of positive weight
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).int().argmax(-1)
    return torch.minimum(drawn, last)


def _count(
    statistics: DSpineStatistics, committed: list[int], accepted: list[int], running: list[bool], offered: int
) -> None:
    for row, (tokens, drafts, run) in enumerate(zip(committed, accepted, running)):
        if not run:
            continue
        statistics.accepted_lengths[row].append(tokens)
        for slot in range(min(drafts + 1, offered)):
            statistics.slot_reached[slot] += 1
            statistics.slot_accepted[slot] += slot < drafts


def _by_step(rows: list[list[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Per-row lists of `[V]` to `generate`'s per-step tuples of `[batch, V]`; zeros where a row had already ended."""
    steps = max(map(len, rows))
    blank = torch.zeros_like(next(row[0] for row in rows if row))
    return tuple(torch.stack([row[i] if i < len(row) else blank for row in rows]) for i in range(steps))


def _streamer_of_generate():
    """The `streamer` given to `generate`, which hands it to its own decoding methods but not to a `custom_generate` callable."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "generate" and "custom_generate" in frame.f_locals:
            return frame.f_locals.get("streamer")
        frame = frame.f_back
    return None


__all__ = ["DSpineGenerateOutput", "DSpineStatistics", "dspine_generate"]
