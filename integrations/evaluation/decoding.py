"""Decoding the same prompts in different ways, timed alike: with a drafter, by the target alone, and by Transformers' own assisted
generation (prompt lookup, or its DFlash loop with the same drafter).

Every way returns one [`Decoded`] per prompt. Time runs from handing over the ids to the last token, prefill included, with the
device waited for on both sides; prompts of a batch share its time equally.
"""

import copy
import hashlib
import time
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from dspine.modeling_dspine import DSpineModel
from dspine.modeling_dspine.generation_dspine import without_attention_plans


@dataclass
class Decoded:
    """One answer.

    Args:
        output_ids: without the prompt, up to and including the end token.
        accepted_lengths: tokens committed in every verification round; None where there are none (the target alone).
        seconds: this request's share of its batch's time.
        times: seconds of the batch's parts, if the decoder keeps them.
    """

    output_ids: list[int]
    accepted_lengths: list[int] | None
    seconds: float
    times: dict[str, float] | None = None


def end_token_ids(target) -> list[int]:
    """The tokens at which the target's answers end; none if its generation configuration names none."""
    eos = target.generation_config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def pad_token_id(target) -> int:
    """What fills the left of shorter prompts: never seen, so any token will do."""
    pad = target.generation_config.pad_token_id
    pad = target.config.get_text_config().pad_token_id if pad is None else pad
    return next((token for token in (pad, *end_token_ids(target)) if token is not None), 0)


def prompt_seed(seed: int, prompt) -> int:
    """A seed of the prompt's own, so that its sample does not depend on batch, order or number of processes."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{prompt.dataset}/{prompt.index}".encode()).digest()[:6], "big")


def sampling_options(temperature: float) -> dict:
    """`generate`'s options of a temperature; nothing of the target's own sampling defaults (top-p, top-k) is kept."""
    if temperature < 0:
        raise ValueError(f"temperature must not be negative, got {temperature}")
    if temperature == 0:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "min_p": None}
    return {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0, "min_p": None}


def left_padded(prompts, pad: int, device) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` `[batch, longest prompt]`."""
    width = max(len(prompt.input_ids) for prompt in prompts)
    ids = torch.full((len(prompts), width), pad)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt.input_ids) :] = torch.tensor(prompt.input_ids)
        mask[row, width - len(prompt.input_ids) :] = 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def up_to_end(ids: list[int], ends: list[int]) -> list[int]:
    """Cuts what a batch appends behind a row's end token."""
    at = next((i for i, token in enumerate(ids) if token in ends), None)
    return ids if at is None else ids[: at + 1]


def _wait(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def block_size_of(drafter, block_size: int | None):
    """The drafter with blocks of another size inside the `with` block."""
    trained = drafter.config.block_size
    drafter.config.block_size = block_size or trained
    try:
        yield
    finally:
        drafter.config.block_size = trained


def decode_with_drafter(
    target,
    drafter,
    prompts,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    block_size: int | None = None,
) -> list[Decoded]:
    """`drafter.spec_generate` on one batch of prompts."""
    inputs = left_padded(prompts, pad_token_id(target), target.device)
    options = sampling_options(temperature)
    if temperature > 0:
        # one generator a row: a prompt's sample is then the same in any batch
        options["generator"] = [torch.Generator().manual_seed(prompt_seed(seed, prompt)) for prompt in prompts]
    with block_size_of(drafter, block_size):
        began = _wait(target.device)
        output = drafter.spec_generate(
            target,
            **inputs,
            max_new_tokens=max_new_tokens,
            pad_token_id=pad_token_id(target),
            return_dict_in_generate=True,
            **options,
        )
        seconds = _wait(target.device) - began
    statistics = output.statistics
    times = {name: getattr(statistics, name) for name in ("prefill_time", "draft_time", "verify_time")}
    texts = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    # the token of the prefill belongs to no round; what follows the last round is padding
    return [
        Decoded(text[: sum(lengths) + 1], lengths, seconds / len(prompts), times)
        for text, lengths in zip(texts, statistics.accepted_lengths)
    ]


# Without cuDNN's attention as in the drafters' own loop: speeds are compared, and of methods that take turns the first to meet a
# length would pay for the plan that the next ones find made
@without_attention_plans()
def decode_alone(target, prompts, max_new_tokens: int, temperature: float = 0.0, seed: int = 0) -> list[Decoded]:
    """`target.generate` on one batch of prompts: what every speed-up is measured against."""
    inputs = left_padded(prompts, pad_token_id(target), target.device)
    if temperature > 0:
        torch.manual_seed(prompt_seed(seed, prompts[0]))
    began = _wait(target.device)
    sequences = target.generate(
        **inputs,
        max_new_tokens=max_new_tokens,
        pad_token_id=pad_token_id(target),
        **sampling_options(temperature),
    )
    seconds = _wait(target.device) - began
    texts = sequences[:, inputs["input_ids"].shape[1] :].tolist()
    return [Decoded(up_to_end(text, end_token_ids(target)), None, seconds / len(prompts)) for text in texts]


class _RoundLengths:
    """A streamer that keeps how many tokens each pass of assisted generation committed."""

    def __init__(self):
        self.lengths: list[int] = []
        self.prompt_seen = False

    def put(self, value):
        if self.prompt_seen:
            self.lengths.append(value.numel())
        self.prompt_seen = True

    def end(self):
        pass


def decode_prompt_lookup(
    target, prompts, max_new_tokens: int, temperature: float = 0.0, seed: int = 0, num_tokens: int = 10
) -> list[Decoded]:
    """Transformers' assisted generation with drafts looked up in the text so far (`prompt_lookup_num_tokens`), one prompt at a time.

    Its first round contains the prefill, so its accepted length counts that pass too.
    """
    return _decode_assisted(target, prompts, max_new_tokens, temperature, seed, prompt_lookup_num_tokens=num_tokens)


def check_transformers_loop() -> None:
    """Refuses releases of Transformers without the loop of [`decode_in_transformers_loop`].

    Raises:
        RuntimeError: this is one; the message names the release needed.
    """
    import transformers
    from transformers.generation import candidate_generator

    if not hasattr(candidate_generator, "DFlashTokenCandidateGenerator"):
        raise RuntimeError(
            f"Transformers' DFlash loop must be there for the baseline 'assisted' (5.19 or later), got {transformers.__version__}"
        )


def drafts_in_transformers_loop(drafter) -> bool:
    """Whether Transformers' loop drafts as the drafter's own: it takes each slot's best token and never asks `propose`, where peers have
    their heads."""
    return type(drafter).propose is DSpineModel.propose


def decode_in_transformers_loop(
    target, drafter, prompts, max_new_tokens: int, temperature: float = 0.0, seed: int = 0
) -> list[Decoded]:
    """Transformers' assisted generation with the drafter in its DFlash loop (`speculation_type="dflash"`, from 5.19), one prompt at a
    time; rounds as for prompt lookup.

    Raises:
        RuntimeError: this release of Transformers has no such loop.
        ValueError: the drafter chooses tokens in a way of its own, which that loop would leave out.
    """
    check_transformers_loop()
    if not drafts_in_transformers_loop(drafter):
        raise ValueError(
            f"drafter must choose its tokens as DSpineModel does, since Transformers' loop never asks `propose`, got {type(drafter).__name__}"
        )
    drafter.bind_target(target)
    assistance = {"assistant_model": drafter, "speculation_type": "dflash"}
    return _decode_assisted(target, prompts, max_new_tokens, temperature, seed, **assistance)


@without_attention_plans()
def _decode_assisted(
    target, prompts, max_new_tokens: int, temperature: float, seed: int, **assistance
) -> list[Decoded]:
    """`target.generate` with options of assisted generation."""
    answers = []
    for prompt in prompts:
        inputs = left_padded([prompt], pad_token_id(target), target.device)
        rounds = _RoundLengths()
        if temperature > 0:
            torch.manual_seed(prompt_seed(seed, prompt))
        began = _wait(target.device)
        sequences = target.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            pad_token_id=pad_token_id(target),
            streamer=rounds,
            **assistance,
            **sampling_options(temperature),
        )
        seconds = _wait(target.device) - began
        text = up_to_end(sequences[0, inputs["input_ids"].shape[1] :].tolist(), end_token_ids(target))
        # the streamer also sees tokens behind an end token that the text is cut at
        surplus = sum(rounds.lengths) - len(text)
        while surplus > 0 and rounds.lengths:
            cut = min(surplus, rounds.lengths[-1])
            rounds.lengths[-1] -= cut
            surplus -= cut
            if not rounds.lengths[-1]:
                rounds.lengths.pop()
        answers.append(Decoded(text, rounds.lengths, seconds))
    return answers


class NearTieCheck:
    """Whether greedy texts that differ parted at a near-tie: the first difference is scored again by the target in fp32.

    A block and a single token run through different kernels, so low precision may choose the other of two nearly equal tokens there;
    afterwards the texts are different texts, so only the first difference says something.

    Args:
        target: the model both texts came from.
        tie_gap: fp32 logits between the two tokens up to which the difference is a tie; default 0.5 for a low-precision target and
            0.001 for one in fp32, where only the order of additions differs.
    """

    def __init__(self, target, tie_gap: float | None = None):
        self.target = target
        self.tie_gap = tie_gap if tie_gap is not None else (1e-3 if target.dtype == torch.float32 else 0.5)
        self._precise = None

    @torch.no_grad()
    def __call__(self, prompt_ids: list[int], reference: list[int], text: list[int]) -> dict:
        """`{"equal": True}`, or where they differ: `at`, the `gap` in logits (None if one text merely ends), and `fault`."""
        at = next((i for i, (a, b) in enumerate(zip(reference, text)) if a != b), None)
        if at is None:
            # one text is a prefix of the other: both were stopped by the same rules, so this is no rounding
            equal = len(reference) == len(text)
            return (
                {"equal": True}
                if equal
                else {"equal": False, "at": min(len(reference), len(text)), "gap": None, "fault": True}
            )
        if self._precise is None:
            is_precise = self.target.dtype == torch.float32
            self._precise = self.target if is_precise else copy.deepcopy(self.target).float()
        ids = torch.tensor([prompt_ids + reference[:at]], device=self._precise.device)
        logits = self._precise(ids).logits[0, -1]
        gap = float((logits[reference[at]] - logits[text[at]]).abs())
        return {"equal": False, "at": at, "gap": gap, "fault": gap > self.tie_gap}


__all__ = [
    "Decoded",
    "NearTieCheck",
    "block_size_of",
    "check_transformers_loop",
    "decode_alone",
    "decode_in_transformers_loop",
    "decode_prompt_lookup",
    "decode_with_drafter",
    "end_token_ids",
    "left_padded",
    "pad_token_id",
    "prompt_seed",
    "sampling_options",
    "up_to_end",
]
