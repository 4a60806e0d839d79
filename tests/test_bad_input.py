"""What a user can get wrong when pairing a drafter with a target or asking for a generation: one sentence each, before any work."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from tiny_models import MASK_ID, tiny_drafter, tiny_target
from torch import nn
from transformers import TextStreamer

from dspine.modeling_dspine import DSpineConfig, DSpineModel, dspine_generate


IDS = torch.tensor([[5, 9, 33, 2]])
TWO = torch.tensor([[5, 9, 33, 2], [7, 8, 1, 4]])


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def drafter(target):
    return tiny_drafter(target)


def refuse(call, *parts: str):
    """The call raises one sentence (no line break) holding all `parts`."""
    with pytest.raises((ValueError, StrictDataclassClassValidationError)) as info:
        call()
    # a configuration's own check arrives wrapped in the line "Class validation error for validator ..."
    message = str(info.value.__cause__ if isinstance(info.value, StrictDataclassClassValidationError) else info.value)
    assert "\n" not in message, message
    for part in parts:
        assert part in message, message


# ---- binding --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides, parts",
    [
        ({"num_hidden_layers": 5}, ("num_hidden_layers=6", "num_hidden_layers=5")),
        ({"hidden_size": 64}, ("hidden_size=32", "hidden_size=64")),
        ({"vocab_size": 101}, ("vocab_size=97", "vocab_size=101")),
    ],
    ids=["layers", "hidden", "vocabulary"],
)
def test_wrong_target(drafter, overrides, parts):
    other = tiny_target(**overrides)
    refuse(lambda: drafter.bind_target(other), "LlamaForCausalLM", *parts)
    refuse(lambda: drafter.spec_generate(other, IDS, max_new_tokens=2), *parts)


def test_refused_target_leaves_the_old_binding(target, drafter):
    refuse(lambda: drafter.bind_target(tiny_target(num_hidden_layers=5)), "num_hidden_layers")
    assert drafter.binding.lm_head is target.get_output_embeddings()


def test_unbound_drafter(target):
    config = DSpineConfig.from_target(target.config, mask_token_id=MASK_ID, transfer_rank=8)
    refuse(lambda: DSpineModel(config).binding, "not bound to a target", "bind_target")


def test_mask_id_absent(target):
    config = DSpineConfig.from_target(target.config, mask_token_id=MASK_ID, transfer_rank=8)
    config.mask_token_id = None
    refuse(lambda: DSpineModel(config).bind_target(target), "mask_token_id is not set")


def test_mask_id_outside_the_embedding(target):
    refuse(lambda: DSpineConfig.from_target(target.config, mask_token_id=97), "mask_token_id", "0 to 96", "got 97")
    config = DSpineConfig.from_target(target.config, mask_token_id=MASK_ID, transfer_rank=8)
    config.mask_token_id = 200  # assignment does not run the class's checks; binding does
    refuse(lambda: DSpineModel(config).bind_target(target), "mask_token_id", "0 to 96", "got 200")


def test_block_of_one_slot(target):
    refuse(
        lambda: DSpineConfig.from_target(target.config, mask_token_id=MASK_ID, block_size=1),
        "block_size",
        "at least 2",
        "got 1",
    )


def test_tap_of_the_last_layer(target):
    refuse(
        lambda: DSpineConfig.from_target(target.config, mask_token_id=MASK_ID, target_layer_ids=[1, 5]),
        "target_layer_ids",
        "last layer (5)",
        "largest id is 4",
    )


def test_target_without_a_head(drafter, target):
    refuse(lambda: drafter.bind_target(target.model), "input and output embeddings", "LlamaModel")


def test_head_with_a_bias(drafter):
    other = tiny_target()
    other.lm_head = nn.Linear(32, 97)
    refuse(lambda: drafter.bind_target(other), "output head has a bias")


def test_quantised_head_needs_a_stored_table(quantise_head):
    other = tiny_target()
    drafter = tiny_drafter(other)
    quantise_head(other)
    refuse(lambda: drafter.bind_target(other), "quantised or sharded", "store_transfer_table=True")
    refuse(lambda: drafter.spec_generate(other, IDS, max_new_tokens=2), "store_transfer_table=True")


# ---- generating -----------------------------------------------------------------------------------------------------------


def test_no_drafter(target):
    refuse(lambda: target.generate(IDS, custom_generate=dspine_generate, max_new_tokens=2), "drafter must be given")


def test_dtype_mismatch(target):
    drafter = tiny_drafter(target).to(torch.bfloat16)
    refuse(lambda: drafter.spec_generate(target, IDS, max_new_tokens=2), "same dtype", "bfloat16", "float32")


def test_tensors_of_another_device_than_the_drafter(target):
    drafter = tiny_drafter(target).to("meta")
    embeds, context = torch.zeros(1, 6, 32), torch.zeros(1, 4, 32 * len(drafter.config.target_layer_ids))
    refuse(
        lambda: drafter(embeds, context, anchor_ids=torch.tensor([[1]])), "drafter's device meta", "got cpu and cpu"
    )


@pytest.mark.gpu
def test_cpu_tensors_with_a_cuda_drafter(target):
    drafter = tiny_drafter(target).to("cuda")
    embeds, context = torch.zeros(1, 6, 32), torch.zeros(1, 4, 32 * len(drafter.config.target_layer_ids))
    refuse(
        lambda: drafter(embeds, context, anchor_ids=torch.tensor([[1]])), "drafter's device cuda:0", "got cpu and cpu"
    )


def test_slots_that_are_not_whole_blocks(drafter):
    context = torch.zeros(1, 4, 32 * len(drafter.config.target_layer_ids))
    refuse(lambda: drafter(torch.zeros(1, 7, 32), context, block_size=3), "whole blocks of 3 slots", "got 7")


def test_mask_of_the_wrong_length(drafter):
    context = torch.zeros(1, 4, 32 * len(drafter.config.target_layer_ids))
    mask = torch.ones(1, 9)
    refuse(
        lambda: drafter(torch.zeros(1, 6, 32), context, anchor_ids=torch.tensor([[1]]), attention_mask=mask),
        "0 + 4 + 6",
        "got 9",
    )


@pytest.mark.parametrize(
    "ids, options, parts",
    [
        (IDS, {"num_beams": 2, "do_sample": False}, ("num_beams must be 1", "got 2")),
        (IDS, {"use_cache": False}, ("use_cache must be True",)),
        (TWO, {"cache_implementation": "static"}, ("static cache", "dynamic cache")),
        (TWO, {"generator": [torch.Generator()]}, ("one per row (2)", "got 1")),
        (
            IDS,
            {"output_hidden_states": True, "return_dict_in_generate": True},
            ("output_hidden_states", "one-token steps"),
        ),
        (IDS, {"output_attentions": True, "return_dict_in_generate": True}, ("output_attentions",)),
        (IDS, {"stop_strings": ["x"]}, ("stop_strings", "tokenizer")),
    ],
    ids=["beams", "no-cache", "static-batch", "generators", "hidden-states", "attentions", "stop-strings"],
)
def test_options_that_block_decoding_cannot_honour(target, drafter, ids, options, parts):
    refuse(lambda: drafter.spec_generate(target, ids, max_new_tokens=4, **options), *parts)


def test_streamer_with_a_batch(target, drafter):
    class Words:
        def decode(self, *args, **kwargs):
            return ""

    # `generate` of some releases refuses a batch by itself
    with pytest.raises(ValueError, match="streamer|batch"):
        drafter.spec_generate(target, TWO, max_new_tokens=4, streamer=TextStreamer(Words()))


def test_classifier_free_guidance(target, drafter):
    refuse(
        lambda: drafter.spec_generate(target, IDS, max_new_tokens=4, guidance_scale=1.5),
        "not supported by speculative decoding",
    )


def test_cache_that_already_holds_tokens(target, drafter):
    cache = target(IDS[:, :3], use_cache=True).past_key_values
    refuse(
        lambda: drafter.spec_generate(target, IDS, max_new_tokens=4, past_key_values=cache),
        "cache must be empty",
        "3 tokens",
    )


def test_refusals_leave_the_pair_usable(target, drafter):
    refuse(lambda: drafter.spec_generate(target, IDS, max_new_tokens=4, num_beams=2), "num_beams")
    expected = target.generate(IDS, max_new_tokens=8, do_sample=False)
    assert torch.equal(drafter.spec_generate(target, IDS, max_new_tokens=8, do_sample=False), expected)
