"""What the benchmark decodes and how: the wording of the sets, prompts, and ways of decoding that must agree."""

import json
import re

import pytest
import torch
from tiny_checkpoints import THINKING_TEMPLATE, tiny_tokenizer
from tiny_models import scripted_drafter, tiny_drafter, tiny_target
from transformers.generation import candidate_generator

from dspine.integrations.evaluation import decoding, prompts
from dspine.integrations.evaluation.prompts import Prompt
from dspine.modeling_dspine import DSpineModel, generation_dspine


# ---- prompts --------------------------------------------------------------------------------------------------------------------


def test_wording_is_that_of_the_local_files(shared_data):
    """A row of the Hub, as its columns are called there, becomes the line that DeepSpec's converter made of it."""
    first = {path.stem: prompts.read_turns(path) for path in (shared_data / "bench").glob("*.jsonl")}
    assert set(first) == set(prompts.BENCHMARKS)
    suffix = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    for name, column in (("gsm8k", "question"), ("math500", "problem")):
        text = first[name][0][0]
        assert (
            prompts.BENCHMARKS[name].turns({column: text.removesuffix(suffix)})
            == [text]
            != [text.removesuffix(suffix)]
        )
    text = first["humaneval"][0][0]
    body = re.fullmatch(r"Write a solution .*?:\n```python\n(.*)\n```", text, re.DOTALL).group(1)
    assert prompts.BENCHMARKS["humaneval"].turns({"prompt": body}) == [text]
    seen = set()
    for (text,) in first["livecodebench"]:
        question, code = re.search(
            r"### Question:\n(.*)\n\n### Format: .*?\n```python\n(.*)\n```\n\n###", text, re.DOTALL
        ).groups()
        code = "" if code == "# YOUR CODE HERE" else code
        assert prompts.BENCHMARKS["livecodebench"].turns({"question_content": question, "starter_code": code}) == [
            text
        ]
        seen.add(bool(code))
    assert seen == {True, False}
    assert prompts.BENCHMARKS["mt-bench"].turns({"prompt": first["mt-bench"][0]}) == first["mt-bench"][0]


def test_turns_may_hold_any_character(tmp_path):
    path = tmp_path / "odd.jsonl"
    path.write_text(json.dumps({"turns": ["a\u2028b\x85c", "d"]}, ensure_ascii=False) + "\n\n", encoding="utf-8")
    assert prompts.read_turns(path) == [["a\u2028b\x85c", "d"]]


@pytest.mark.parametrize("line", ["{", '{"turns": []}', '{"turns": [1]}', "[]", '{"prompt": "x"}'])
def test_malformed_lines_are_named(tmp_path, line):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"turns": ["good"]}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl line 2 must be an object"):
        prompts.read_turns(path)


def test_thinking_is_a_switch_of_the_template():
    plain, thinking = tiny_tokenizer(), tiny_tokenizer(THINKING_TEMPLATE)
    without = prompts.render(plain, "w1 w2")
    assert plain.convert_ids_to_tokens(without) == ["<user>", "w1", "w2", "<answer>"]
    assert prompts.render(thinking, "w1 w2", thinking=False) == without
    assert prompts.render(thinking, "w1 w2", thinking=True) == [*without, thinking.convert_tokens_to_ids("<think>")]
    with pytest.raises(ValueError, match="no switch `enable_thinking`"):
        prompts.render(plain, "w1", thinking=True)


def test_selection_is_seeded_and_capped(tmp_path):
    assert prompts.select(5, None, 42) == prompts.select(5, 9, 42) == [0, 1, 2, 3, 4]
    assert prompts.select(100, 3, None) == [0, 1, 2]
    drawn = prompts.select(100, 10, 42)
    assert drawn == prompts.select(100, 10, 42) == sorted(drawn) != prompts.select(100, 10, 7)
    (tmp_path / "mt-bench.jsonl").write_text("\n".join(json.dumps({"turns": [f"w{i % 90}"]}) for i in range(90)))
    (tmp_path / "own.jsonl").write_text('{"turns": ["w1 w2 w3 w4"]}\n{"turns": ["w1"]}')
    tokenizer = tiny_tokenizer()
    assert len(prompts.load_prompts(["mt-bench"], tokenizer, tmp_path)) == 80  # the set's cap
    (short,) = prompts.load_prompts(["own"], tokenizer, tmp_path, max_prompt_tokens=4)
    assert (short.dataset, short.index) == ("own", 1)
    with pytest.raises(FileNotFoundError, match=r"no file other\.jsonl .* \['mt-bench', 'own'\]"):
        prompts.load_prompts(["other"], tokenizer, tmp_path)
    with pytest.raises(ValueError, match="unknown benchmark 'other'"):
        prompts.hub_turns("other")


def test_hub_rows_are_read_through_datasets(monkeypatch):
    datasets = pytest.importorskip("datasets")
    calls = []

    def load_dataset(path, name=None, **options):
        calls.append((path, name, options))
        column = {"json": {"question_content": "q", "starter_code": ""}}.get(path, {"question": "q"})
        return iter([column] * 600) if options.get("streaming") else [column] * 3

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(prompts.hub_turns("gsm8k")) == 3 and calls[0] == ("openai/gsm8k", "main", {"split": "test"})
    assert len(prompts.hub_turns("livecodebench")) == 500 and calls[1][2]["streaming"]


# ---- decoding -------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair():
    target = tiny_target(initializer_range=0.2)
    target.generation_config.eos_token_id = None
    asked = [Prompt("set", i, torch.arange(3 + i, 9 + 2 * i).tolist()) for i in range(3)]
    inputs = torch.tensor([asked[0].input_ids])
    answer = target.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=24, do_sample=False)[0]
    return target, scripted_drafter(target, answer, wrong_every=5), asked


def test_all_ways_give_the_same_greedy_text(pair):
    target, drafter, asked = pair
    alone = [decoding.decode_alone(target, [p], 24)[0] for p in asked]
    lookup = decoding.decode_prompt_lookup(target, asked, 24)
    drafted = [decoding.decode_with_drafter(target, drafter, [p], 24)[0] for p in asked]
    batch = decoding.decode_with_drafter(target, drafter, asked, 24)
    for a, b, c, d in zip(alone, lookup, drafted, batch):
        assert a.output_ids == b.output_ids == c.output_ids == d.output_ids and len(a.output_ids) == 24
        assert a.accepted_lengths is None and a.seconds > 0
        assert sum(b.accepted_lengths) == 24  # its first round holds the prefill
        assert sum(c.accepted_lengths) == 23 and c.accepted_lengths == d.accepted_lengths
    assert max(drafted[0].accepted_lengths) > 2


def test_all_ways_are_timed_with_the_same_attention(pair, monkeypatch):
    """cuDNN's would make the first way to meet a length pay for a plan that the next ones find made."""
    target, drafter, asked = pair
    flags, seen = torch.backends.cuda, []
    monkeypatch.setattr(flags, "cudnn_sdp_enabled", lambda: True)
    monkeypatch.setattr(flags, "enable_cudnn_sdp", lambda enabled: seen.append(enabled))
    with target.register_forward_hook(lambda *_: seen.append("pass")):
        for way in (
            lambda: decoding.decode_alone(target, asked[:1], 4),
            lambda: decoding.decode_prompt_lookup(target, asked[:1], 4),
            lambda: decoding.decode_with_drafter(target, drafter, asked[:1], 4),
        ):
            seen.clear()
            way()
            assert seen[0] is False and seen[-1] is True and set(seen[1:-1]) == {"pass"}


def test_drafter_with_a_head_of_its_own_is_not_for_transformers_loop(pair):
    class Peer(DSpineModel):
        def propose(self, *_, **__):
            raise AssertionError("never asked")

    target, drafter, asked = pair
    assert decoding.drafts_in_transformers_loop(tiny_drafter(target))
    peer = Peer(drafter.config)
    assert not decoding.drafts_in_transformers_loop(peer)
    expected = "5.19 or later" if not hasattr(candidate_generator, "DFlashTokenCandidateGenerator") else "got Peer"
    with pytest.raises((RuntimeError, ValueError), match=expected):
        decoding.decode_in_transformers_loop(target, peer, asked, 4)


def test_lookup_counts_passes(pair):
    target, _, asked = pair
    passes = []
    handle = target.register_forward_hook(lambda *args: passes.append(1))
    (answer,) = decoding.decode_prompt_lookup(target, asked[:1], 24)
    handle.remove()
    assert len(answer.accepted_lengths) == len(passes)


def test_block_size_is_put_back(pair):
    target, drafter, asked = pair
    (answer,) = decoding.decode_with_drafter(target, drafter, asked[:1], 24, block_size=3)
    assert max(answer.accepted_lengths) == 3 and drafter.config.block_size == 6
    with pytest.raises(RuntimeError), decoding.block_size_of(drafter, 3):
        raise RuntimeError
    assert drafter.config.block_size == 6


def test_samples_depend_on_prompt_and_seed_only(pair):
    target, drafter, asked = pair
    alone = decoding.decode_with_drafter(target, drafter, asked[1:2], 12, temperature=1.0, seed=3)[0]
    batch = decoding.decode_with_drafter(target, drafter, asked, 12, temperature=1.0, seed=3)[1]
    other = decoding.decode_with_drafter(target, drafter, asked[1:2], 12, temperature=1.0, seed=4)[0]
    assert alone.output_ids == batch.output_ids != other.output_ids


def test_texts_end_with_their_end_token(pair):
    target, drafter, asked = pair
    whole = decoding.decode_alone(target, asked[:1], 24)[0].output_ids
    target.generation_config.eos_token_id = whole[9]
    try:
        end = whole.index(whole[9]) + 1
        for answer in (
            *decoding.decode_alone(target, asked, 24)[:1],
            *decoding.decode_prompt_lookup(target, asked[:1], 24),
            *decoding.decode_with_drafter(target, drafter, asked, 24)[:1],
        ):
            assert answer.output_ids == whole[:end]
    finally:
        target.generation_config.eos_token_id = None


def test_near_tie_check(pair):
    target, _, asked = pair
    ids, text = asked[0].input_ids, decoding.decode_alone(target, asked[:1], 8)[0].output_ids
    check = decoding.NearTieCheck(target)
    assert check(ids, text, list(text)) == {"equal": True}
    with torch.no_grad():
        logits = target(torch.tensor([ids + text[:3]])).logits[0, -1]
    second = int(logits.topk(2).indices[1])
    other = [*text[:3], second, *text[4:]]
    found = check(ids, text, other)
    assert (found["equal"], found["at"], found["fault"]) == (False, 3, True)
    assert found["gap"] == pytest.approx(float(logits[text[3]] - logits[second]), abs=1e-5)
    assert not decoding.NearTieCheck(target, tie_gap=found["gap"] + 0.01)(ids, text, other)["fault"]
    assert check(ids, text, text[:-1])["fault"]  # a text that stops early is no rounding


# ---- large batches: holes are closed and finished rows leave ---------------------------------------------------------------------


@pytest.fixture
def compactions(monkeypatch):
    """How many rows every compaction went on with, where even the smallest batch is compacted."""
    seen, compact = [], generation_dspine._compact

    def spy(columns, at, *args):
        after = compact(columns, at, *args)
        seen.append(len(at))
        assert after.shape[0] == len(at) and after.shape[1] <= columns.shape[1]
        assert torch.equal(after.sum(1), columns[at].sum(1)), "no used column may be lost"
        return after

    monkeypatch.setattr(generation_dspine, "COMPACTED_FROM", 0)
    monkeypatch.setattr(generation_dspine, "_compact", spy)
    return seen


@pytest.fixture(scope="module")
def crowd():
    """Nine prompts of 5 to 29 tokens, and a drafter that is often right on the first one only: rows at very different paces."""
    target = tiny_target(initializer_range=0.2)
    asked = [Prompt("set", i, [(7 * i + 3 * j) % 90 + 2 for j in range(5 + 3 * i)]) for i in range(9)]
    (answer,) = decoding.decode_alone(target, asked[:1], 60)
    text = torch.tensor(asked[0].input_ids + answer.output_ids)
    return target, scripted_drafter(target, text, wrong_every=5), asked


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_of_a_compacted_batch_are_as_alone(crowd, compactions, temperature):
    target, drafter, asked = crowd
    alone = [decoding.decode_with_drafter(target, drafter, [p], 60, temperature, seed=1)[0] for p in asked]
    assert not compactions
    # tokens at which some of the rows end early
    ends = sorted({answer.output_ids[at] for answer, at in zip(alone, (50, 8, 30, 12))})
    config = target.generation_config
    try:
        for config.eos_token_id in (None, ends):
            alone = [decoding.decode_with_drafter(target, drafter, [p], 60, temperature, seed=1)[0] for p in asked]
            compactions.clear()
            batch = decoding.decode_with_drafter(target, drafter, asked, 60, temperature, seed=1)
            assert len(compactions) > 1 and compactions == sorted(compactions, reverse=True)
            for a, b in zip(alone, batch):
                assert (a.output_ids, a.accepted_lengths) == (b.output_ids, b.accepted_lengths)
        assert compactions[-1] < len(asked), "finished rows leave"
    finally:
        config.eos_token_id = None


def test_scores_and_places_survive_compaction(crowd, compactions):
    """Scores belong to the texts that they are of, and rows stay where logits processors know them by their places."""
    target, drafter, asked = crowd
    inputs = decoding.left_padded(asked, 0, "cpu")
    options = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    ends = decoding.decode_alone(target, asked, 40)
    options["eos_token_id"] = [ends[i].output_ids[4 * i + 3] for i in range(0, 9, 2)]
    expected = target.generate(**inputs, **options)
    got = drafter.spec_generate(target, **inputs, **options)
    assert torch.equal(got.sequences, expected.sequences) and min(compactions) < 9
    width = inputs["input_ids"].shape[1]
    for row, rounds in enumerate(got.statistics.accepted_lengths):
        for step in range(sum(rounds) + 1):
            torch.testing.assert_close(got.scores[step][row], expected.scores[step][row], rtol=1e-4, atol=1e-4)
            assert int(got.scores[step][row].argmax()) == int(got.sequences[row, width + step])
    compactions.clear()
    options["prefix_allowed_tokens_fn"] = lambda place, ids: [t for t in range(97) if t % 9 != place]
    got = drafter.spec_generate(target, **inputs, **options)
    assert torch.equal(got.sequences, target.generate(**inputs, **options).sequences)
    assert set(compactions) <= {9}


def test_small_batches_are_left_alone(crowd, compactions, monkeypatch):
    target, drafter, asked = crowd
    monkeypatch.undo()
    before = decoding.decode_with_drafter(target, drafter, asked, 30)
    assert not compactions
    monkeypatch.setattr(generation_dspine, "COMPACTED_FROM", 300)
    assert [a.output_ids for a in decoding.decode_with_drafter(target, drafter, asked, 30)] == [
        a.output_ids for a in before
    ]
