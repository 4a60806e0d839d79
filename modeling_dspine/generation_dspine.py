"""The block decoding loop: draft a block, verify it in one target pass, commit what the target would have said.

One round, for all rows of a batch at once:

1. draft: `[anchor, mask, ...]` and the tapped target states of the tokens committed last give B - 1 proposals (`propose`);
2. verify: the target reads anchor and proposals in one pass;
3. accept: the longest prefix the target agrees with, plus one token of its own. Greedy: agreement is equality with its argmax.
   Sampling: rejection sampling with the q that proposed (Leviathan et al. 2023, algorithm 1), so outputs follow the target's
   processed distribution exactly;
4. crop both caches to what was committed.

Rows commit different numbers of tokens. Columns of the caches are cropped to the largest number; in the other rows the surplus
columns stay as holes that the attention mask hides. Draft and target caches have the same columns, hence share one mask. Token
sequences have no holes. In large batches most columns of most rows would soon be holes, and rows that are done would be computed to
the end, so whenever it saves a quarter of the caches, holes are closed and finished rows leave; nothing is ever recomputed.
"""

import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticCache
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .acceptance_dspine import UNSUPPORTED_PROCESSORS, TargetPolicy, TextRows, commit
from .target_dspine import TapRecorder


# rows times columns of the caches below which holes and finished rows are not worth moving anything
COMPACTED_FROM = 4096


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


@contextmanager
def without_attention_plans():
    """Keeps `scaled_dot_product_attention` from cuDNN, unless nothing else is allowed; what was allowed before comes back at the end.

    PyTorch prefers cuDNN's attention on Hopper and Blackwell (`check_prefer_cudnn_attention` in its `sdp_utils.cpp`). It builds an
    execution plan for every shape it has not seen (https://github.com/pytorch/pytorch/pull/155958), and in decoding every round is
    longer than the one before. `torch.nn.attention.sdpa_kernel` would also allow what the caller has forbidden.
    """
    flags = torch.backends.cuda
    others = flags.flash_sdp_enabled() or flags.mem_efficient_sdp_enabled() or flags.math_sdp_enabled()
    before = flags.cudnn_sdp_enabled()
    flags.enable_cudnn_sdp(before and not others)
    try:
        yield
    finally:
        flags.enable_cudnn_sdp(before)


@torch.no_grad()
@without_attention_plans()
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
    rows = TextRows(
        tokens=torch.full((batch, max_length + block_size), pad, dtype=torch.long, device=device),
        lengths=torch.full((batch,), input_ids.shape[1], device=device),
        padding=torch.zeros(batch, dtype=torch.long, device=device)
        if attention_mask is None
        else (attention_mask == 0).sum(1).to(device),
        finished=torch.zeros(batch, dtype=torch.bool, device=device),
        pad_token_id=pad,
        host_lengths=[input_ids.shape[1]] * batch,
        host_finished=[False] * batch,
        scores=[[] for _ in range(batch)],
        logits=[[] for _ in range(batch)],
    )
    rows.tokens[:, : input_ids.shape[1]] = input_ids
    # the rows still in the batch, the texts they are of, and the left padding of these
    texts, places, padding = rows, list(range(batch)), rows.padding.tolist()
    columns = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    has_holes = attention_mask is not None and not bool(columns.all())
    if position_ids is None:
        position_ids = (columns.long().cumsum(-1) - 1).clamp_min(0)
    policy = TargetPolicy(generation_config, logits_processor, stopping_criteria, generator, device)
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
        commit(rows, policy, outputs.logits[:, -1:], no_draft, None, None, block_size, streamer, keep_scores)
        clock.add("prefill", mark)
        # other kinds of layers keep their columns in their own ways
        layers = (*cache.layers, *draft_cache.layers)
        compactable = batch > 1 and all(type(layer) is DynamicLayer for layer in layers)
        compactable = compactable and not getattr(cache, "offloading", False)

        while not all(rows.host_finished):
            mark = clock.now()
            kept = None
            if compactable:
                kept = _rows_to_keep(rows, padding, columns.shape[1], context.shape[1], policy.rowwise)
            if kept is not None:
                _write_back(texts, rows, places)
                at, fresh = torch.tensor(kept, device=device), context.shape[1]
                columns = _compact(columns, at, fresh, cache, draft_cache)
                context, context_positions = context[at.to(context.device)], context_positions[at]
                rows, places, padding = (
                    _rows_at(rows, kept),
                    [places[i] for i in kept],
                    [padding[i] for i in kept],
                )
                if isinstance(policy.generator, (list, tuple)):
                    policy.generator = [policy.generator[i] for i in kept]
                batch, has_holes = len(kept), True
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
            left = max(max_length - n for n, done in zip(rows.host_lengths, rows.host_finished) if not done)
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
            counts, committed, accepted, running = commit(
                rows, policy, outputs.logits, draft_tokens, proposal, uniforms, block_size, streamer, keep_scores
            )
            _count(statistics, places, committed, accepted, running, offered)
            keep = max(committed)
            cache.crop(-(offered + 1 - keep))
            new_columns = torch.arange(keep, device=device) < counts[:, None]
            columns = torch.cat([columns, new_columns], dim=1)
            has_holes = has_holes or min(committed) < keep
            context, context_positions = taps.take(drafter.device)[:, :keep], slot_positions[:, :keep]
            clock.add("verify", mark)

    if streamer is not None:
        streamer.end()
    _write_back(texts, rows, places)
    sequences = texts.tokens[:, : max(texts.host_lengths)]
    if not generation_config.return_dict_in_generate:
        return sequences
    statistics.prefill_time, statistics.draft_time = clock.total("prefill"), clock.total("draft")
    statistics.verify_time = clock.total("verify")
    result = DSpineGenerateOutput(sequences=sequences, statistics=statistics)
    if generation_config.output_scores:
        result.scores = _by_step(texts.scores)
    if generation_config.output_logits:
        result.logits = _by_step(texts.logits)
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


def _rows_to_keep(rows: TextRows, padding: list[int], width: int, fresh: int, may_drop: bool) -> list[int] | None:
    """The rows to go on with if closing holes and leaving finished rows behind saves a quarter of the caches, else None.

    Args:
        padding: of every row's left.
        width: columns of the caches.
        fresh: how many of them are of the last round; their holes stay.
        may_drop: whether rows may leave. Not where logits processors know rows by their places.
    """
    area = len(padding) * width
    if area < COMPACTED_FROM:
        return None
    kept = [row for row, done in enumerate(rows.host_finished) if not (done and may_drop)]
    needed = max(rows.host_lengths[row] - padding[row] for row in kept) + fresh
    return kept if 4 * len(kept) * needed <= 3 * area else None


def _compact(columns: torch.Tensor, at: torch.Tensor, fresh: int, cache: Cache, draft_cache: Cache) -> torch.Tensor:
    """Keeps the rows `at` of both caches and moves their used columns to the right, in their order.

    Args:
        columns: `[batch, width]` bool, which columns of the caches are used.
        fresh: the last columns, which stay as they are and are not in the draft's cache yet.

    Returns:
        `columns` of what was kept, `[len(at), at most width]`.
    """
    past = columns.shape[1] - fresh
    old = columns[at, :past]
    width = int(old.sum(1).max())
    order = old.long().argsort(dim=1, stable=True)[:, past - width :]
    _take(draft_cache, at, order)
    rest = torch.arange(past, past + fresh, device=order.device).expand(len(at), -1)
    _take(cache, at, torch.cat([order, rest], dim=1))
    return torch.cat([old.gather(1, order), columns[at, past:]], dim=1)


def _take(cache: Cache, at: torch.Tensor, order: torch.Tensor) -> None:
    """Row i of the cache becomes the columns `order[i]` `[width]` of its row `at[i]`."""
    for layer in cache.layers:
        if not layer.is_initialized:  # a layer that shares another one's states
            continue
        rows, columns = at[:, None].to(layer.keys.device), order.to(layer.keys.device)
        layer.keys = layer.keys.transpose(1, 2)[rows, columns].transpose(1, 2)
        layer.values = layer.values.transpose(1, 2)[rows, columns].transpose(1, 2)


def _rows_at(rows: TextRows, kept: list[int]) -> TextRows:
    """Some of the rows. Their lists of scores stay the same objects."""
    at = torch.tensor(kept, device=rows.tokens.device)
    return replace(
        rows,
        **{name: getattr(rows, name)[at] for name in ("tokens", "lengths", "padding", "finished")},
        **{
            name: [getattr(rows, name)[row] for row in kept]
            for name in ("host_lengths", "host_finished", "scores", "logits")
        },
    )


def _write_back(texts: TextRows, rows: TextRows, places: list[int]) -> None:
    """What `rows` have become, into the texts at `places` that they are of; only what the end of a generation reads."""
    if rows is texts:
        return
    texts.tokens[torch.tensor(places, device=texts.tokens.device)] = rows.tokens
    for place, length in zip(places, rows.host_lengths):
        texts.host_lengths[place] = length


def _count(
    statistics: DSpineStatistics,
    places: list[int],
    committed: list[int],
    accepted: list[int],
    running: list[bool],
    offered: int,
) -> None:
    for place, tokens, drafts, run in zip(places, committed, accepted, running):
        if not run:
            continue
        statistics.accepted_lengths[place].append(tokens)
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
