"""Sampled texts follow the target's distribution: chi-square tests of 200,000 continuations against exact enumeration."""

import pytest
import torch
from scipy.stats import chisquare
from tiny_models import tiny_drafter, tiny_target
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper


VOCAB, TOKENS, SAMPLES, BATCH = 9, 4, 200_000, 4000


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    model = tiny_target(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        pad_token_id=0,
    )
    with torch.no_grad():
        model.lm_head.weight.normal_(
            0, 0.25
        )  # neither flat nor peaked, so that drafts are accepted and rejected often
    return model


@torch.no_grad()
def exact_probabilities(target, prompt, processors):
    """Probability of each of the `VOCAB ** TOKENS` continuations of `prompt` `[length]`, in lexicographic order."""
    probabilities = torch.ones(1, dtype=torch.float64)
    texts = prompt[None]
    for _ in range(TOKENS):
        logits = target(texts).logits[:, -1].float()
        step = torch.softmax(processors(texts, logits).double(), -1)
        probabilities = (probabilities[:, None] * step).flatten()
        texts = torch.cat([texts.repeat_interleave(VOCAB, 0), torch.arange(VOCAB).repeat(len(texts))[:, None]], dim=1)
    return probabilities


def p_value(continuations, probabilities):
    index = (continuations * VOCAB ** torch.arange(TOKENS - 1, -1, -1)).sum(-1)
    observed = torch.bincount(index, minlength=VOCAB**TOKENS).double()
    expected = probabilities * len(continuations)
    assert observed[expected == 0].sum() == 0  # nothing outside the nucleus
    common = expected >= 8
    observed = torch.cat([observed[common], observed[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    expected *= observed.sum() / expected.sum()  # chisquare wants equal totals to the last bit
    keep = expected > 0
    return chisquare(observed[keep].numpy(), expected[keep].numpy()).pvalue


OPTIONS = {
    "T=1": ({"temperature": 1.0}, []),
    "T=0.7, top-p 0.9": ({"temperature": 0.7, "top_p": 0.9}, [TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9)]),
}
PROMPTS = [[3, 4, 5, 1, 8, 2, 7], [6, 2, 2], [5], [7, 1, 4, 4, 3]]


@pytest.mark.slow
@pytest.mark.timeout(900)  # half a minute each, but the cores may be shared
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("refinement", [True, False], ids=["dspine", "dflash"])
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one prompt", "four ragged"])
def test_samples_follow_the_target(target, option, refinement, prompts):
    if not refinement and (option != "T=1" or len(prompts) > 1):
        pytest.skip("the acceptance is the same code; one case covers the plain drafter's q")
    arguments, warpers = OPTIONS[option]
    drafter = tiny_drafter(
        target,
        mask_token_id=8,
        block_size=4,
        num_candidates=5,
        num_hidden_layers=1,
        spread=0.15,
        refinement=refinement,
        injection=refinement,
    )
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    each = BATCH // len(prompts)
    ids, mask = ids.repeat_interleave(each, 0), mask.repeat_interleave(each, 0)
    torch.manual_seed(1)
    drawn, accepted = [], []
    samples = SAMPLES if refinement else SAMPLES // 4
    for _ in range(samples // BATCH):
        output = drafter.spec_generate(
            target,
            ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=TOKENS,
            return_dict_in_generate=True,
            **arguments,
        )
        drawn.append(output.sequences[:, -TOKENS:].view(len(prompts), each, TOKENS))
        accepted += output.statistics.slot_accepted
    assert sum(accepted) > samples / 10  # the test means nothing if no draft is ever accepted
    drawn = torch.cat(drawn, dim=1)
    for prompt, texts in zip(prompts, drawn):
        probabilities = exact_probabilities(target, torch.tensor(prompt), LogitsProcessorList(warpers))
        assert p_value(texts, probabilities) > 0.01


def test_the_test_can_fail(target):
    """A shift of one percent in one token's probability is found at this sample size."""
    probabilities = exact_probabilities(target, torch.tensor(PROMPTS[0]), LogitsProcessorList())
    shifted = probabilities.view(VOCAB, -1).clone()
    moved = shifted[0] * 0.05
    shifted[0] -= moved
    shifted[1] += moved
    generator = torch.Generator().manual_seed(0)
    index = torch.multinomial(shifted.flatten(), SAMPLES, replacement=True, generator=generator)
    texts = torch.stack([index // VOCAB**i % VOCAB for i in range(TOKENS - 1, -1, -1)], dim=-1)
    assert p_value(texts, probabilities) < 1e-6
