"""The configuration class: what it refuses, what it derives from a target or a DFlash checkpoint, and that it survives saving.

Imports nothing of the model, so that it runs with every Transformers release that has strict configuration classes.
"""

import json

import pytest
import transformers
from packaging.version import Version
from transformers import (
    Gemma3Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    T5Config,
)

from dspine.configuration_dspine import DSpineConfig
from dspine.configuration_dspine.configuration_dspine import default_target_layer_ids


SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def small(**overrides):
    """A valid configuration of a small drafter, with fields replaced."""
    fields = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_target_layers": 12,
        "mask_token_id": 500,
        "transfer_rank": 16,
    }
    return DSpineConfig(**(fields | overrides))


# ---- what is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("block_size", 1, r"block_size must be at least 2 .*got 1"),
        ("block_size", 0, r"block_size must be at least 2 .*got 0"),
        ("mask_token_id", 512, r"mask_token_id must be a row of the target's embedding, 0 to 511, got 512"),
        ("mask_token_id", -1, r"mask_token_id must be a row .*got -1"),
        ("target_layer_ids", [1, 11], r"must not contain the target's last layer \(11\).*the largest id is 10"),
        ("target_layer_ids", [1, 12], r"target_layer_ids must be zero-based layers 0 to 10 .*got 12"),
        ("target_layer_ids", [-1, 4], r"target_layer_ids must be zero-based layers .*got -1"),
        ("target_layer_ids", [], r"target_layer_ids must name at least one target layer"),
        ("target_layer_ids", [3, 3], r"target_layer_ids must be different layers, got \[3, 3\]"),
        ("num_key_value_heads", 3, r"num_attention_heads must be a multiple of num_key_value_heads \(3\), got 4"),
        ("layer_types", ["full_attention"], r"layer_types must have one entry for each of the 3 layers, got 1"),
        ("layer_types", ["full_attention", "linear_attention", "full_attention"], r"layer_types must be .*linear_attention"),
        ("layer_types", ["sliding_attention"] * 3, r"sliding_window must be a positive number .*got None"),
        ("transfer_rank", 0, r"transfer_rank must be between 1 and hidden_size \(64\), got 0"),
        ("transfer_rank", 65, r"transfer_rank must be between 1 and hidden_size \(64\), got 65"),
        ("transfer_init", "svd", r"transfer_init must be one of .*'svd'"),
        ("num_candidates", 0, r"num_candidates must be between 1 and vocab_size \(512\), got 0"),
        ("num_candidates", 513, r"num_candidates must be between 1 and vocab_size \(512\), got 513"),
        ("refinement_guidance", -0.1, r"refinement_guidance must be a number of at least 0, got -0.1"),
        ("injection_layers", [3], r"injection_layers must be draft layers 0 to 2, got 3"),
        ("injection_gate", "scalar", r"injection_gate must be one of .*'scalar'"),
        ("supervision", "mse", r"supervision must be one of .*'mse'"),
    ],
    ids=lambda value: str(value) if not isinstance(value, str) or len(value) < 24 else "",
)  # fmt: skip
def test_impossible_values_are_refused_by_name(field, value, message):
    with pytest.raises(Exception, match=message):
        small(**{field: value})


@pytest.mark.parametrize(
    "field, value", [("block_size", "16"), ("hidden_size", 64.5), ("target_layer_ids", "1,2"), ("refinement", "yes")]
)
def test_types_are_checked(field, value):
    with pytest.raises(Exception, match=field):
        small(**{field: value})


def test_types_are_checked_on_assignment():
    config = small()
    with pytest.raises(Exception, match="block_size"):
        config.block_size = "8"


# ---- what follows from a target -------------------------------------------------------------------------------------------

DENSE = [LlamaConfig, Qwen2Config, Qwen3Config, MistralConfig, Gemma3TextConfig]


@pytest.mark.parametrize("family", DENSE, ids=lambda c: c.__name__)
def test_from_target_follows_dense_decoders(family):
    target = family(**SHAPE)
    config = DSpineConfig.from_target(target, mask_token_id=500)
    assert (config.hidden_size, config.vocab_size, config.num_target_layers) == (64, 512, 12)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert config.head_dim == (getattr(target, "head_dim", None) or 16)
    assert config.target_model_type == target.model_type
    assert config.block_size == 16 and config.num_hidden_layers == 5
    assert config.target_layer_ids == [1, 3, 5, 7, 9]
    assert config.layer_types == ["full_attention"] * 5
    assert config.injection_layers == [0, 1, 2, 3, 4]


def test_gemma_scales_embeddings_and_caps_logits():
    target = Gemma3TextConfig(**SHAPE, final_logit_softcapping=30.0)
    config = DSpineConfig.from_target(target, mask_token_id=500)
    assert config.input_embedding_scale == 8.0
    assert config.final_logit_softcapping == 30.0
    assert config.rope_parameters["rope_theta"] == target.rope_parameters["full_attention"]["rope_theta"]


def test_granite_multipliers():
    target = GraniteConfig(**SHAPE, embedding_multiplier=12.0, logits_scaling=8.0)
    config = DSpineConfig.from_target(target, mask_token_id=500)
    assert (config.input_embedding_scale, config.output_multiplier) == (12.0, 1 / 8)


def test_multimodal_wrapper_is_reduced_to_its_text_part():
    target = Gemma3Config(text_config=SHAPE)
    config = DSpineConfig.from_target(target, mask_token_id=500)
    assert config.target_model_type == "gemma3_text"
    assert (config.hidden_size, config.num_target_layers, config.input_embedding_scale) == (64, 12, 8.0)


def test_mixture_of_experts_target_gets_a_dense_drafter():
    target = Qwen3MoeConfig(**SHAPE, moe_intermediate_size=32, num_experts=4, head_dim=16)
    config = DSpineConfig.from_target(target, mask_token_id=500)
    assert config.intermediate_size == 96 and config.target_model_type == "qwen3_moe"


def test_overrides_win():
    config = DSpineConfig.from_target(
        LlamaConfig(**SHAPE), mask_token_id=500, num_hidden_layers=2, block_size=8, target_layer_ids=[0, 5]
    )
    assert (config.num_hidden_layers, config.block_size, config.target_layer_ids) == (2, 8, [0, 5])
    assert config.layer_types == ["full_attention"] * 2 and config.injection_layers == [0, 1]


def test_encoder_decoder_is_refused():
    with pytest.raises(ValueError, match="decoder-only model, got 't5'"):
        DSpineConfig.from_target(T5Config(), mask_token_id=3)


def test_recurrent_layers_are_refused():
    with pytest.raises(ValueError, match=r"'qwen3_next'.*\['linear_attention'\], whose state cannot be rolled back"):
        DSpineConfig.from_target(Qwen3NextConfig(**SHAPE), mask_token_id=3)


class FakeTokenizer:
    chat_template = "{{ messages }}"

    def __init__(self, length, mask_token_id=None):
        self.length, self.mask_token_id = length, mask_token_id

    def __len__(self):
        return self.length


def test_mask_id_must_be_found_or_given():
    target = LlamaConfig(**SHAPE)
    with pytest.raises(ValueError, match="mask_token_id must be given: no tokenizer"):
        DSpineConfig.from_target(target)
    with pytest.raises(ValueError, match="all 512 embedding rows are in use"):
        DSpineConfig.from_target(target, tokenizer=FakeTokenizer(512))
    assert DSpineConfig.from_target(target, tokenizer=FakeTokenizer(512, mask_token_id=7)).mask_token_id == 7
    assert DSpineConfig.from_target(target, tokenizer=FakeTokenizer(400)).mask_token_id == 400


def test_chat_template_is_recorded_as_a_hash():
    config = DSpineConfig.from_target(LlamaConfig(**SHAPE), tokenizer=FakeTokenizer(400))
    assert config.target_chat_template_hash == DSpineConfig.chat_template_hash("{{ messages }}")
    assert len(config.target_chat_template_hash) == 16
    assert DSpineConfig.chat_template_hash(None) is None


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_scaling_follows_the_target(rope):
    target = LlamaConfig(**SHAPE, max_position_embeddings=4096, rope_parameters=rope)
    config = DSpineConfig.from_target(target, mask_token_id=500)
    assert {k: config.rope_parameters[k] for k in rope} == rope
    assert config.max_position_embeddings == 4096


@pytest.mark.parametrize(
    "layers, taps, expected",
    [(36, 5, [1, 9, 17, 25, 33]), (30, 5, [1, 8, 14, 20, 27]), (4, 5, [2]), (3, 2, [1]), (2, 1, [0]), (28, 1, [14])],
)
def test_default_taps(layers, taps, expected):
    assert default_target_layer_ids(layers, taps) == expected


@pytest.mark.parametrize("layers", range(2, 40))
def test_default_taps_are_always_valid(layers):
    for taps in range(1, 9):
        small(num_target_layers=layers, target_layer_ids=default_target_layer_ids(layers, taps))


def test_one_layer_targets_are_refused():
    with pytest.raises(ValueError, match="num_target_layers must be at least 2 .*got 1"):
        default_target_layer_ids(1, 5)


# ---- DFlash checkpoints ---------------------------------------------------------------------------------------------------

RELEASED = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 16,
    "num_target_layers": 12,
    "dflash_config": {"mask_token_id": 501, "target_layer_ids": [1, 5, 9]},
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layer_types": ["full_attention"] * 3,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "vocab_size": 512,
    "dtype": "bfloat16",
}


def test_from_dflash_reads_released_files():
    config = DSpineConfig.from_dflash(RELEASED)
    assert (config.mask_token_id, config.target_layer_ids, config.block_size) == (501, [1, 5, 9], 16)
    assert config.rope_parameters["rope_theta"] == 1e6 and config.model_type == "dspine"
    assert config.injection and config.refinement


def test_from_dflash_reads_keys_at_either_level():
    flat = {k: v for k, v in RELEASED.items() if k != "dflash_config"} | RELEASED["dflash_config"]
    nested = {k: v for k, v in RELEASED.items() if k != "block_size"}
    nested["dflash_config"] = nested["dflash_config"] | {"block_size": 8, "final_logit_softcapping": 20.0}
    assert DSpineConfig.from_dflash(flat).target_layer_ids == [1, 5, 9]
    config = DSpineConfig.from_dflash(nested)
    assert (config.block_size, config.final_logit_softcapping) == (8, 20.0)


def test_from_dflash_follows_old_rope_scaling():
    old = RELEASED | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}
    rope = DSpineConfig.from_dflash(old).rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("yarn", 4.0, 1e6)


def test_from_dflash_refuses_other_checkpoints():
    with pytest.raises(ValueError, match=r"expected the config.json of a DFlash drafter .*Qwen3ForCausalLM"):
        DSpineConfig.from_dflash(RELEASED | {"architectures": ["Qwen3ForCausalLM"]})
    with pytest.raises(ValueError, match="expected the config.json of a DFlash drafter"):
        DSpineConfig.from_dflash({k: v for k, v in RELEASED.items() if k != "dflash_config"})


def test_nested_keys_are_read_by_the_class_itself():
    config = small(mask_token_id=None, dflash_config={"mask_token_id": 3, "target_layer_ids": [2], "block_size": 4})
    assert (config.mask_token_id, config.target_layer_ids, config.block_size) == (3, [2], 4)


# ---- saving ---------------------------------------------------------------------------------------------------------------


def test_survives_saving(tmp_path):
    config = small(
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=32,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
        injection_layers=[1, 2],
        injection_gate="rank",
        block_size=7,
        target_name_or_path="org/target",
        target_thinking=False,
        store_transfer_table=True,
        measured_accepted_length={"gsm8k": {"T=0": 3.5}},
    )
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "dspine"
    again = DSpineConfig.from_pretrained(tmp_path)
    for field in DSpineConfig.__dataclass_fields__:
        if not field.startswith("_") and field != "transformers_version":
            assert getattr(again, field) == getattr(config, field), field
    assert again.measured_accepted_length == {"gsm8k": {"T=0": 3.5}}


def test_damaged_values_are_refused_at_loading(tmp_path):
    small().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_layer_ids": [1, 11]}))
    with pytest.raises(Exception, match="must not contain the target's last layer"):
        DSpineConfig.from_pretrained(tmp_path)


def test_switches_decide_whether_there_is_a_transfer_space():
    assert small().uses_transfer_space
    assert small(injection=False).uses_transfer_space and small(injection=False).injection_layers == []
    assert not small(injection=False, refinement=False).uses_transfer_space


def test_old_transformers_get_the_operations_but_not_the_model():
    """Serving engines pin releases too old for the model; they still import the configuration and the operations."""
    import dspine.modeling_dspine as package
    from dspine.modeling_dspine.reference_dspine import REFERENCES

    assert REFERENCES and package.DSpineConfig is DSpineConfig
    if Version(transformers.__version__) < Version("5.17"):
        with pytest.raises(ImportError, match="needs transformers 5.17"):
            package.DSpineModel  # noqa: B018
    else:
        assert package.DSpineModel.config_class is DSpineConfig
