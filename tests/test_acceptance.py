"""The target's scores of a block: copied only where that changes something."""

import pytest
import torch
from tiny_models import tiny_drafter, tiny_target
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import SuppressTokensLogitsProcessor

from dspine.modeling_dspine.acceptance_dspine import TargetPolicy, TextRows


def policy(do_sample=False, *processors):
    config = GenerationConfig(do_sample=do_sample, max_length=20)
    return TargetPolicy(config, LogitsProcessorList(processors), None, None, "cpu")


def rows_of_text(batch=2, length=3):
    return TextRows(
        torch.ones(batch, 20, dtype=torch.long),
        torch.full((batch,), length),
        torch.zeros(batch, dtype=torch.long),
        torch.zeros(batch, dtype=torch.bool),
        0,
        [length] * batch,
        [False] * batch,
    )


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_scores_are_float32_and_copied_only_to_be_written_to(do_sample):
    logits = torch.randn(2, 4, 50)
    assert policy(do_sample).scores(None, logits, None, None) is logits
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert policy(do_sample).scores(None, logits.to(dtype), None, None).dtype == torch.float32


class InPlace:
    """A processor of somebody's own, which is called slot by slot and writes into what it is given."""

    def __call__(self, input_ids, scores):
        scores[:, 3] = 1e3
        return scores


@pytest.mark.parametrize("processor", [SuppressTokensLogitsProcessor([3]), InPlace()], ids=["row by row", "in place"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_processors_leave_the_logits_alone(processor, dtype):
    logits = torch.randn(2, 4, 50).to(dtype)
    before = logits.clone()
    drafts = torch.full((2, 3), 3)
    scores = policy(False, processor).scores(rows_of_text(), logits, drafts, lambda *_: True)
    assert torch.equal(logits, before) and scores.dtype == torch.float32
    assert not torch.equal(scores[..., 3], before[..., 3].float())
    assert torch.equal(scores[..., 4:], before[..., 4:].float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_returned_scores_are_float32_and_nobody_elses(dtype):
    target = tiny_target().to(dtype)
    output = tiny_drafter(target).to(dtype).spec_generate(
        target,
        torch.tensor([[5, 9, 33, 2]]),
        do_sample=False,
        max_new_tokens=8,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )  # fmt: skip
    assert len(output.scores) == len(output.logits) == 8
    for scores, logits in zip(output.scores, output.logits):
        assert scores.dtype == torch.float32 and torch.equal(scores, logits)
        assert scores.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr()
