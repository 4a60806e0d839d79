"""The `evaluate` metric: numbers by hand, intervals, bad input, and agreement with what the benchmark computes."""

import math
import re
import runpy

import numpy as np
import pytest
from conftest import ROOT

from dspine.integrations.evaluation.acceptance import gain, mean_over_sets, slot_counts, summarise


FOLDER = ROOT / "examples" / "acceptance_length"
evaluate = pytest.importorskip("evaluate")


@pytest.fixture(scope="module")
def metric(tmp_path_factory):
    return evaluate.load(str(FOLDER), cache_dir=str(tmp_path_factory.mktemp("evaluate")))


def sample(requests=40, block_size=8, seed=0, chance=0.6):
    """Rounds of a drafter whose every slot is accepted with the same chance."""
    generator = np.random.default_rng(seed)
    lengths = generator.geometric(1 - chance, size=(requests, 12)).clip(1, block_size)
    return [row[: generator.integers(1, 12)].tolist() for row in lengths]


@pytest.mark.parametrize("case", runpy.run_path(str(FOLDER / "tests.py"))["test_cases"])
def test_published_cases(metric, case):
    arguments = {name: value for name, value in case.items() if name != "result"}
    results = metric.compute(**arguments, num_resamples=0)
    for name, value in case["result"].items():
        assert results[name] == pytest.approx(value)


def test_slots_by_hand(metric):
    results = metric.compute(predictions=[[4, 1, 3], [2, 2]], block_size=4, num_resamples=0)
    # rounds 4 | 1 | 3 (last) and 2 | 2 (last): after the last draft of a last round nothing is known
    assert results["slot_reached"] == [5, 3, 1]
    assert results["slot_accepted"] == [4, 2, 1]
    assert results["slot_acceptance"] == [0.8, pytest.approx(2 / 3), 1.0]
    assert (results["rounds"], results["tokens"], results["requests"]) == (5, 12, 2)


def test_slots_never_reached_have_no_share(metric):
    results = metric.compute(predictions=[[1, 1]], block_size=4)
    assert results["slot_acceptance"] == [0.0, None, None]
    assert results["slot_acceptance_interval"][1:] == [None, None]


def test_decoder_counts_replace_derived_ones(metric):
    results = metric.compute(predictions=[[2, 1]], block_size=3, slot_reached=[2, 1], slot_accepted=[1, 0])
    assert results["slot_acceptance"] == [0.5, 0.0] and "slot_acceptance_interval" not in results


def test_requests_without_rounds_are_counted_but_have_no_mean(metric):
    results = metric.compute(predictions=[[], [3, 1]], num_resamples=10)
    assert (results["requests"], results["requests_without_rounds"]) == (2, 1)
    assert results["accepted_length_per_request"] == 2.0


def test_same_numbers_as_the_benchmark(metric):
    rounds = sample()
    assert metric.compute(predictions=rounds, block_size=8, seed=3) == summarise(rounds, 8, seed=3)


def test_intervals_are_seeded_and_cover(metric):
    rounds = sample()
    first = metric.compute(predictions=rounds, seed=1)
    assert first == metric.compute(predictions=rounds, seed=1) != metric.compute(predictions=rounds, seed=2)
    low, high = first["accepted_length_interval"]
    assert low < first["accepted_length"] < high
    wider = metric.compute(predictions=rounds, seed=1, confidence=0.99)["accepted_length_interval"]
    assert wider[0] <= low and high <= wider[1]


def test_interval_is_that_of_the_normal_approximation():
    # requests of equal length: the pooled length is a mean, whose standard error is known
    rounds = np.random.default_rng(0).integers(1, 9, size=(200, 10)).tolist()
    result = summarise(rounds, 8, num_resamples=4000)
    means = np.mean(rounds, axis=1)
    half = 1.96 * means.std() / math.sqrt(len(means))
    low, high = result["accepted_length_interval"]
    assert (high - low) / 2 == pytest.approx(half, rel=0.06)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"predictions": [[]]}, "at least one round"),
        ({"predictions": [[2, 0]]}, "commits at least one token"),
        ({"predictions": [[9]], "block_size": 8}, "at most block_size=8 tokens, got a round of 9"),
        ({"predictions": [[1]], "confidence": 95}, "confidence must be between 0 and 1, got 95"),
        ({"predictions": [[1]], "slot_reached": [1]}, "given together"),
    ],
)
def test_bad_input_is_one_sentence(metric, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        metric.compute(**arguments)


def test_counts_equal_the_decoders_but_for_the_last_round():
    import torch
    from tiny_models import scripted_drafter, tiny_target

    target = tiny_target()
    prompt = torch.arange(3, 9)[None]
    answer = target.generate(prompt, max_new_tokens=40, do_sample=False, attention_mask=torch.ones_like(prompt))[0]
    drafter = scripted_drafter(target, answer, wrong_every=7)
    output = drafter.spec_generate(target, prompt, max_new_tokens=40, return_dict_in_generate=True, do_sample=False)
    statistics = output.statistics
    reached, accepted = slot_counts(statistics.accepted_lengths[0], drafter.config.block_size - 1)
    apart = np.array(statistics.slot_reached) - reached
    assert len(statistics.accepted_lengths[0]) > 4
    assert (np.abs(apart) <= 1).all() and (np.abs(np.array(statistics.slot_accepted) - accepted) <= 1).all()


def test_gain_of_a_drafter_over_itself_is_nothing():
    rounds = {"a": dict(enumerate(sample())), "b": dict(enumerate(sample(seed=1)))}
    result = gain(rounds, rounds)
    assert result["accepted_length"] == 0 and result["accepted_length_interval"] == [0, 0]
    assert (result["sets"], result["requests"]) == (2, 80)


def test_gain_is_paired():
    easy_and_hard = [[1] * 9, [8] * 9] * 20  # prompts differ far more than drafters
    better = [[length + 1 for length in row] for row in easy_and_hard]
    result = gain({"a": dict(enumerate(better))}, {"a": dict(enumerate(easy_and_hard))})
    assert result["accepted_length"] == pytest.approx(5.5 / 4.5 - 1)
    low, high = result["accepted_length_interval"]
    assert 0.15 < low < result["accepted_length"] < high < 0.35


def test_gain_needs_common_requests():
    with pytest.raises(ValueError, match="in common"):
        gain({"a": {0: [1]}}, {"a": {1: [1]}})


def test_mean_over_sets_weighs_sets_equally():
    result = mean_over_sets({"short": [[3]], "long": [[1]] * 50}, num_resamples=50)
    assert result["accepted_length"] == 2.0 and result["accepted_length_interval"] == [2.0, 2.0]


def test_card_is_a_space():
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    front = card.split("---")[1]
    for line in ("sdk: gradio", "app_file: app.py", "- evaluate", "- metric"):
        assert line in front
    assert (FOLDER / "app.py").is_file() and "evaluate" in (FOLDER / "requirements.txt").read_text()


def test_one_import_per_line():
    # the loader of `evaluate` takes what follows `import` for the name of one package
    for line in (FOLDER / "acceptance_length.py").read_text().splitlines():
        assert not re.match(r"import .*,", line), line
