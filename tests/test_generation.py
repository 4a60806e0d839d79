"""The decoding loop on tiny models: greedy equality with `generate`, ragged batches, stopping, options, statistics."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import scripted_drafter, tiny_drafter, tiny_target
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    StoppingCriteria,
)
from transformers.cache_utils import StaticLayer

from dspine.modeling_dspine import dspine_generate
from dspine.modeling_dspine.generation_dspine import without_attention_plans


PROMPT = torch.tensor([[5, 9, 33, 2, 71, 8]])


def greedy(target, ids, **kwargs):
    return target.generate(ids, **({"max_new_tokens": 30, "do_sample": False} | kwargs))


def drafted(drafter, target, ids, **kwargs):
    return drafter.spec_generate(target, ids, **({"max_new_tokens": 30, "do_sample": False} | kwargs))


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def answer(target):
    return greedy(target, PROMPT, max_new_tokens=60)[0]


@pytest.mark.parametrize("config_class", [Qwen2Config, Qwen3Config, MistralConfig])
def test_families(config_class):
    target = tiny_target(config_class)
    assert torch.equal(drafted(tiny_drafter(target), target, PROMPT), greedy(target, PROMPT))


def gemma3(**overrides):
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, sliding_window=9, eos_token_id=None, bos_token_id=1, pad_token_id=0, **overrides,
    )  # fmt: skip
    return Gemma3ForCausalLM(config).eval()


def test_sliding_window_target_beyond_its_window():
    """Gemma 3: scaled embeddings, capped logits, and a cache that forgets; texts run far past the window of 9."""
    target = gemma3(final_logit_softcapping=5.0)
    assert "sliding_attention" in target.config.layer_types
    expected = greedy(target, PROMPT, max_new_tokens=40)
    for wrong_every in (None, 4):
        drafter = scripted_drafter(target, expected[0], wrong_every)
        output = drafted(drafter, target, PROMPT, max_new_tokens=40, return_dict_in_generate=True)
        assert torch.equal(output.sequences, expected)
        assert output.statistics.accepted_length > 2
    with pytest.raises(ValueError, match="sliding-window"):
        drafted(drafter, target, PROMPT.expand(2, -1))


def test_sliding_window_drafter(target, answer):
    drafter = scripted_drafter(target, answer, 5, layer_types=["sliding_attention"] * 2, sliding_window=7)
    assert torch.equal(drafted(drafter, target, PROMPT, max_new_tokens=40)[0], answer[:46])


@pytest.mark.parametrize("wrong_every", [None, 2, 3, 7])
def test_accepted_drafts_leave_the_text_unchanged(target, answer, wrong_every):
    drafter = scripted_drafter(target, answer, wrong_every)
    output = drafted(drafter, target, PROMPT, return_dict_in_generate=True)
    assert torch.equal(output.sequences[0], answer[:36])
    lengths = output.statistics.accepted_lengths[0]
    assert sum(lengths) == 29  # all but the prefill's token
    if wrong_every is None:
        assert lengths == [6, 6, 6, 6, 5]  # full blocks, the last clipped at max_new_tokens


def test_both_entries_and_the_stock_loop(target, answer):
    drafter = tiny_drafter(target)
    direct = target.generate(
        PROMPT, max_new_tokens=20, do_sample=False, custom_generate=dspine_generate, drafter=drafter
    )
    assert torch.equal(direct[0], answer[:26])
    stock = target.generate(
        PROMPT, max_new_tokens=20, do_sample=False, assistant_model=drafter, speculation_type="dflash"
    )
    assert torch.equal(stock[0], answer[:26])


@pytest.fixture
def attention_flags():
    """Setter of what `scaled_dot_product_attention` may use; put back afterwards."""
    flags, names = torch.backends.cuda, ("flash", "mem_efficient", "math", "cudnn")
    before = {name: getattr(flags, f"{name}_sdp_enabled")() for name in names}

    def allow(*allowed):
        for name in names:
            getattr(flags, f"enable_{name}_sdp")(name in allowed)

    yield allow
    allow(*(name for name in names if before[name]))


def test_attention_makes_no_plans_for_shapes_while_decoding(target, attention_flags):
    """cuDNN's attention is out of the way inside the loop, also if that fails, and as before after it."""
    drafter, seen, enabled = tiny_drafter(target), [], torch.backends.cuda.cudnn_sdp_enabled

    def watch(*_):
        seen.append(enabled())
        if len(seen) == 12:
            raise RuntimeError("no room")

    attention_flags("math", "cudnn")
    with target.register_forward_pre_hook(watch), drafter.register_forward_pre_hook(watch):
        drafted(drafter, target, PROMPT, max_new_tokens=3)
        assert 3 <= len(seen) < 12 and enabled()
        with pytest.raises(RuntimeError, match="no room"):
            drafted(drafter, target, PROMPT)
    assert not any(seen) and enabled()
    attention_flags("math")
    drafted(drafter, target, PROMPT, max_new_tokens=3)
    assert not enabled()


def test_attention_that_may_only_be_cudnn_stays(attention_flags):
    attention_flags("cudnn")
    with without_attention_plans():
        assert torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_bound_on_first_use(target, answer):
    drafter = tiny_drafter(target)
    drafter._binding = None
    assert torch.equal(drafted(drafter, target, PROMPT)[0], answer[:36])


def ragged(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(2, 90, (len(lengths), width), generator=generator)
    mask = torch.arange(width)[None] >= width - torch.tensor(lengths)[:, None]
    return ids * mask, mask.long()


def test_rows_of_a_ragged_batch_are_independent():
    """Rows commit different numbers of tokens every round (a good, a bad and a mixed drafter), each as if alone."""
    target = tiny_target()
    ids, mask = ragged([9, 4, 1])
    alone = [greedy(target, row[keep.bool()][None]) for row, keep in zip(ids, mask)]
    answers = torch.stack([row[0, -30:] for row in alone])
    drafter = tiny_drafter(target)
    propose = drafter.propose
    offset = torch.tensor([9, 4, 1])
    progress = {"at": None}

    def scripted(outputs, anchor_ids, temperature=None, uniforms=None):
        proposal = propose(outputs, anchor_ids, temperature, uniforms)
        index = (progress["at"][:, 1:] - offset[:, None]).clamp(0, 29)
        proposal.tokens = answers.gather(1, index)
        proposal.tokens[1] = (proposal.tokens[1] + 1) % 97  # never right
        wrong = index[2] % 4 == 3
        proposal.tokens[2] = torch.where(wrong, (proposal.tokens[2] + 1) % 97, proposal.tokens[2])
        return proposal

    forward = drafter.forward

    def remember(**kwargs):
        progress["at"] = kwargs["position_ids"][:, -6:]
        return forward(**kwargs)

    drafter.propose, drafter.forward = scripted, remember
    output = drafted(drafter, target, ids, attention_mask=mask, return_dict_in_generate=True)
    for row in range(3):
        assert torch.equal(output.sequences[row, -30:], answers[row])
    rounds = [len(r) for r in output.statistics.accepted_lengths]
    assert rounds[0] < rounds[2] < rounds[1] == 29


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    block_size=st.integers(2, 32),
    new_tokens=st.integers(1, 40),
    layers=st.integers(1, 3),
    candidates=st.integers(1, 97),
    switches=st.sampled_from([(True, True), (True, False), (False, True), (False, False)]),
    seed=st.integers(0, 3),
)
def test_any_shape_is_lossless(lengths, block_size, new_tokens, layers, candidates, switches, seed):
    """Prompts of one token, blocks longer than what is left, every switch, any number of candidates."""
    target = tiny_target(seed=seed)
    drafter = tiny_drafter(
        target,
        block_size=block_size,
        num_hidden_layers=layers,
        num_candidates=candidates,
        injection=switches[0],
        refinement=switches[1],
    )
    ids, mask = ragged(lengths, seed)
    expected = greedy(target, ids, attention_mask=mask, max_new_tokens=new_tokens)
    got = drafted(drafter, target, ids, attention_mask=mask, max_new_tokens=new_tokens)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_dtypes(dtype):
    target = tiny_target().to(dtype)
    drafter = tiny_drafter(tiny_target()).to(dtype)
    output = drafted(drafter, target, PROMPT, return_dict_in_generate=True, output_logits=True)
    expected = greedy(target, PROMPT)
    if dtype == torch.float64:
        assert torch.equal(output.sequences, expected)
    else:
        # up to a near-tie: at the first difference the target's own logits must be within half a logit
        differs = (output.sequences[0] != expected[0]).nonzero()
        if len(differs):
            at = int(differs[0])
            logits = target.float()(output.sequences[:, :at]).logits[0, -1]
            assert abs(logits[output.sequences[0, at]] - logits[expected[0, at]]) < 0.5


# ---- where texts end --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", range(1, 13))
def test_eos_anywhere_in_an_accepted_block(target, answer, position):
    eos = int(answer[6 + position])
    expected = greedy(target, PROMPT, eos_token_id=[eos, 999], pad_token_id=0)
    drafter = scripted_drafter(target, answer)
    output = drafted(drafter, target, PROMPT, eos_token_id=[eos, 999], pad_token_id=0, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert output.sequences[0, -1] == eos
    assert sum(output.statistics.accepted_lengths[0]) == output.sequences.shape[1] - 7


def test_rows_end_at_different_times(target):
    ids, mask = ragged([7, 3, 5], seed=4)
    free = greedy(target, ids, attention_mask=mask)
    eos = [int(free[0, 12]), int(free[2, 20])]
    expected = greedy(target, ids, attention_mask=mask, eos_token_id=eos, pad_token_id=0)
    got = drafted(tiny_drafter(target), target, ids, attention_mask=mask, eos_token_id=eos, pad_token_id=0)
    assert torch.equal(got, expected)


class StopAfter(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


def test_custom_stopping_criteria(target, answer):
    drafter = scripted_drafter(target, answer)
    got = drafted(drafter, target, PROMPT, stopping_criteria=[StopAfter(15)])
    assert torch.equal(got[0], answer[:15])


def word_tokenizer():
    """Token i is the word `w<i>`; `abcdef` is there because `StopStringCriteria` probes tokenizers with it."""
    model = WordLevel({"abcdef" if i == 96 else f"w{i}": i for i in range(97)}, unk_token="w0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))


def test_stop_strings(target, answer):
    tokenizer = word_tokenizer()
    stop = f"w{int(answer[16])}"
    drafter = scripted_drafter(target, answer)
    got = drafted(drafter, target, PROMPT, stop_strings=[stop], tokenizer=tokenizer)
    expected = greedy(target, PROMPT, stop_strings=[stop], tokenizer=tokenizer)
    assert torch.equal(got, expected)
    with pytest.raises(ValueError, match="tokenizer"):
        drafted(drafter, target, PROMPT, stop_strings=[stop])


@pytest.mark.parametrize("new_tokens", [1, 2, 5, 6, 7, 8])
def test_max_new_tokens_within_a_block(target, answer, new_tokens):
    drafter = scripted_drafter(target, answer)
    assert torch.equal(drafted(drafter, target, PROMPT, max_new_tokens=new_tokens)[0], answer[: 6 + new_tokens])


# ---- what `generate` was told -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 12, "eos_token_id": 40},
        {"bad_words_ids": [[11], [40, 41]]},
        {"suppress_tokens": [3, 4, 5, 6, 40]},
        {"prefix_allowed_tokens_fn": lambda batch_id, ids: [t for t in range(97) if (t + len(ids)) % 2]},
        {"exponential_decay_length_penalty": (5, 1.2), "eos_token_id": 40},
    ],
    ids=lambda o: next(iter(o)),
)
def test_logits_processors(target, options):
    expected = greedy(target, PROMPT, pad_token_id=0, **options)
    for wrong_every in (None, 3):
        drafter = scripted_drafter(target, torch.cat([expected[0], torch.zeros(40).long()]), wrong_every)
        assert torch.equal(drafted(drafter, target, PROMPT, pad_token_id=0, **options), expected)


def test_processors_see_each_row_of_a_batch(target):
    ids, mask = ragged([7, 3, 5], seed=2)
    options = {
        "repetition_penalty": 1.5,
        "no_repeat_ngram_size": 3,
        "prefix_allowed_tokens_fn": lambda batch_id, ids: [t for t in range(97) if t % 3 != batch_id],
    }
    expected = greedy(target, ids, attention_mask=mask, **options)
    assert torch.equal(drafted(tiny_drafter(target), target, ids, attention_mask=mask, **options), expected)


def test_scores_and_logits_are_those_of_generate(target, answer):
    options = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "repetition_penalty": 1.2,
    }
    expected = greedy(target, PROMPT, **options)
    got = drafted(scripted_drafter(target, expected.sequences[0], 4), target, PROMPT, **options)
    assert torch.equal(got.sequences, expected.sequences) and len(got.scores) == len(expected.scores)
    for name in ("scores", "logits"):
        for ours, theirs in zip(getattr(got, name), getattr(expected, name)):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_returned_cache_holds_the_text(target, answer):
    got = drafted(scripted_drafter(target, answer, 4), target, PROMPT, return_dict_in_generate=True)
    cache = getattr(got, "cache", None) or got.past_key_values
    assert cache.get_seq_length() == got.sequences.shape[1] - 1


class Recorder:
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.reshape(-1).tolist()

    def end(self):
        self.ended = True


@pytest.mark.parametrize("entry", ["spec_generate", "custom_generate"])
def test_streamer(target, answer, entry):
    drafter, streamer = scripted_drafter(target, answer, 4), Recorder()
    if entry == "spec_generate":
        drafted(drafter, target, PROMPT, streamer=streamer)
    else:
        greedy(target, PROMPT, custom_generate=dspine_generate, drafter=drafter, streamer=streamer)
    assert streamer.ended and streamer.tokens == answer[:36].tolist()


def test_static_cache(target, answer):
    drafter = scripted_drafter(target, answer, 4)
    if StaticLayer.is_croppable:
        got = drafted(drafter, target, PROMPT, cache_implementation="static")
        assert torch.equal(got[0], answer[:36])
    else:  # Transformers before 5.20 cannot roll a static cache back
        with pytest.raises(ValueError, match="cannot be cropped"):
            drafted(drafter, target, PROMPT, cache_implementation="static")
    with pytest.raises(ValueError, match="static cache"):
        drafted(drafter, target, PROMPT.expand(2, -1), cache_implementation="static")


def test_seeds(target):
    drafter = tiny_drafter(target)
    ids, mask = ragged([7, 3, 5], seed=2)

    def sample(rows, seeds):
        generators = [torch.Generator().manual_seed(s) for s in seeds]
        return drafted(drafter, target, ids[rows], attention_mask=mask[rows], do_sample=True, generator=generators)

    together = sample([0, 1, 2], [1, 2, 3])
    assert torch.equal(together, sample([0, 1, 2], [1, 2, 3]))
    assert not torch.equal(together, sample([0, 1, 2], [4, 5, 6]))
    for row in range(3):
        assert torch.equal(together[row], sample([row], [row + 1])[0])  # as if alone


def test_num_return_sequences(target):
    torch.manual_seed(0)
    got = drafted(tiny_drafter(target), target, PROMPT, do_sample=True, num_return_sequences=3)
    assert got.shape == (3, 36) and len(set(map(tuple, got.tolist()))) == 3


def test_statistics(target, answer):
    statistics = drafted(scripted_drafter(target, answer, 4), target, PROMPT, return_dict_in_generate=True).statistics
    lengths = statistics.accepted_lengths[0]
    assert statistics.rounds == len(lengths)
    assert statistics.accepted_length == pytest.approx(sum(lengths) / len(lengths))
    assert statistics.accepted_length_per_request == pytest.approx(statistics.accepted_length)
    assert statistics.slot_reached[0] == len(lengths)
    assert all(0 <= a <= r for a, r in zip(statistics.slot_accepted, statistics.slot_reached))
    assert statistics.draft_time > 0 and statistics.verify_time > 0 and statistics.prefill_time > 0


def test_shorter_blocks_than_trained(target, answer):
    drafter = tiny_drafter(target)
    drafter.config.block_size = 3
    assert torch.equal(drafted(drafter, target, PROMPT)[0], answer[:36])
