"""What the target does with a drafted block: its own choice at every slot, which drafts it agrees with, and where a text ends.

Greedy decoding agrees with a draft that equals the target's argmax. Sampling accepts a drafted token x with probability
min(1, p(x) / q(x)) and replaces the first rejected one by a draw from the normalised max(p - q, 0), which leaves the target's
distribution p exactly (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1; q is over the K candidates of the slot).
"""

from dataclasses import dataclass, field

import torch
from transformers.generation import logits_process as processors
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList


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
class TextRows:
    """The texts of a batch: left-padded prompt, committed tokens, and who is done."""

    tokens: torch.Tensor  # [batch, max_length + block_size], so that a whole block can be written at any row's end
    lengths: torch.Tensor  # [batch], columns of `tokens` in use
    padding: torch.Tensor  # [batch], of the prompt's left
    finished: torch.Tensor  # [batch] bool
    pad_token_id: int
    # the same as `lengths` and `finished`, known to the host without waiting for the device
    host_lengths: list[int]
    host_finished: list[bool]
    scores: list[list[torch.Tensor]] = field(default_factory=list)
    logits: list[list[torch.Tensor]] = field(default_factory=list)

    @property
    def anchors(self) -> torch.Tensor:
        return self.tokens.gather(1, self.lengths[:, None] - 1)[:, 0]

    @property
    def anchor_positions(self) -> torch.Tensor:
        return self.lengths - 1 - self.padding


class TargetPolicy:
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

    def uniforms(self, rows: TextRows, count: int) -> torch.Tensor:
        """`[batch, count]` in [0, 1). With one generator per row, finished rows draw nothing, as if they were alone."""
        batch, device = rows.tokens.shape[0], rows.tokens.device
        if not isinstance(self.generator, (list, tuple)):
            at = device if self.generator is None else self.generator.device
            return torch.rand(batch, count, generator=self.generator, device=at).to(device)
        drawn = [
            torch.zeros(count) if done else torch.rand(count, generator=g, device=g.device).cpu()
            for g, done in zip(self.generator, rows.host_finished)
        ]
        return torch.stack(drawn).to(device)

    def scores(self, rows: TextRows, logits: torch.Tensor, draft_tokens: torch.Tensor, accepts) -> torch.Tensor:
        """Processed scores `[batch, slots, V]` in fp32. Slots behind a rejected one may be left unprocessed: nobody reads them.

        Processors that look at the text before a slot are called slot by slot with the row's own tokens. Without processors the scores
        may be `logits` themselves, not to be written to.
        """
        batch, slots, vocab = logits.shape
        if not self.logits_processor:
            return logits.to(torch.float32)
        scores = logits.to(dtype=torch.float32, copy=True)
        if self.rowwise:
            flat = scores.view(batch * slots, vocab)
            return self.logits_processor(rows.tokens.new_zeros(batch * slots, 1), flat).view(batch, slots, vocab)
        for row in (i for i in range(batch) if not rows.host_finished[i]):
            for slot in range(slots):
                # the row stands in every place of the batch, since some processors keep something per place
                text = torch.cat([rows.tokens[row, : rows.host_lengths[row]], draft_tokens[row, :slot]]).expand(
                    batch, -1
                )
                scores[row, slot] = self.logits_processor(text, scores[row, slot].repeat(batch, 1))[row]
                if slot < slots - 1 and not accepts(row, slot, scores[row, slot]):
                    break
        return scores

    def cut(self, rows: TextRows, texts: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the new tokens `texts` `[batch, slots]`, of which `counts` `[batch]` are meant, into `rows.tokens` up to and
        including the first that ends its row; returns how many were written and which rows ended."""
        counts = torch.minimum(counts, self.max_length - rows.lengths)
        slots = torch.arange(texts.shape[1], device=texts.device)
        ended = (rows.lengths + counts >= self.max_length) & (counts > 0)
        if self.eos is not None:
            is_eos = torch.isin(texts, self.eos) & (slots < counts[:, None])
            counts = torch.where(is_eos.any(1), is_eos.int().argmax(1) + 1, counts)
            ended |= is_eos.any(1)
        columns = rows.lengths[:, None] + slots
        rows.tokens.scatter_(1, columns, torch.where(slots < counts[:, None], texts, rows.tokens.gather(1, columns)))
        if self.other_criteria:
            written = counts.tolist()
            for row, length in enumerate(rows.host_lengths):
                for i in range(written[row]):
                    if bool(self.other_criteria(rows.tokens[row, : length + i + 1][None], None).any()):
                        counts[row], ended[row] = i + 1, True
                        rows.tokens[row, length + i + 1 : length + written[row]] = rows.pad_token_id
                        break
        return counts, ended


def commit(rows, policy, logits, draft_tokens, proposal, uniforms, block_size, streamer, keep_scores):
    """Accepts drafted tokens, adds the target's own, and ends rows.

    Args:
        logits: the target's, at the anchor and at every drafted token, `[batch, offered + 1, V]`.
        draft_tokens: `[batch, offered]`; none after the prefill, where `proposal` and `uniforms` are None too.
        uniforms: `[batch, 2 * block_size - 1]`: for the walk, for accepting each draft, for the target's own token.

    Returns:
        The tokens committed per row `[batch]`, and for the host, per row: tokens committed, drafts accepted, was it running.
    """
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
        own = draw(leftover, uniforms[:, -1])
    else:
        choice = scores.argmax(-1)
        accepted = (choice[:, :-1] == draft_tokens).long().cumprod(-1).sum(-1)
        own = choice[at, accepted]

    texts = torch.cat([draft_tokens, own[:, None]], dim=1).scatter(1, accepted[:, None], own[:, None])
    counts, ended = policy.cut(rows, texts, torch.where(rows.finished, 0, accepted + 1))
    # the only place of a round where the host waits for the device
    committed, accepted, ended_now = torch.stack([counts, accepted, ended.long()]).tolist()
    running = [not done for done in rows.host_finished]
    if keep_scores:
        for row, count in enumerate(committed):
            rows.scores[row].extend(scores[row, :count].to(torch.float32, copy=True))
            rows.logits[row].extend(logits[row, :count].float())
    if streamer is not None:
        streamer.put(texts[:, : committed[0]].cpu())
    rows.lengths += counts
    rows.finished |= ended
    rows.host_lengths = [length + count for length, count in zip(rows.host_lengths, committed)]
    rows.host_finished = [done or bool(now) for done, now in zip(rows.host_finished, ended_now)]
    return counts, committed, accepted, running


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Inverts the distribution function of unnormalised `weights` `[batch, V]` at `uniforms` `[batch]`: token ids `[batch]`."""
    wide = torch.float32 if weights.device.type == "mps" else torch.float64
    cumulative = weights.to(wide).cumsum(-1)
    point = uniforms.to(wide)[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, point, right=True)[:, 0]
    # a point rounded up to the total must not fall behind the last token of positive weight
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).int().argmax(-1)
    return torch.minimum(drawn, last)
