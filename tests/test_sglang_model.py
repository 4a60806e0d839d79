"""The drafter on SGLang's layers, as far as a machine without a GPU allows: loading, and the maths of a draft pass.

Skipped where SGLang is not installed; `.ci/sglang` makes environments with the oldest and the newest supported release.
"""

import pytest
import torch
import torch.nn.functional as F


pytest.importorskip("sglang", reason="SGLang is not installed; .ci/sglang runs these tests")

from sglang_engine_testing import (  # noqa: E402
    CONTEXT,
    build,
    checkpoint_shapes,
    draft_pass,
    inputs,
    load_plugin,
    make_folders,
    one_process,
    random_weights,
)
from sglang_testing import BLOCK, tiny_config  # noqa: E402

from dspine.integrations.sglang.head import HeadShard  # noqa: E402
from dspine.modeling_dspine.reference_dspine import gated_adjacent_injection, rms  # noqa: E402
from dspine.modeling_dspine.target_dspine import transfer_table  # noqa: E402


VARIANTS = {
    "default": {},
    "rank-gate": {"injection_gate": "rank"},
    "no-gate": {"injection_gate": "none"},
    "one-layer": {"injection_layers": [0]},
    "no-injection": {"injection": False},
    "no-refinement": {"refinement": False},
    "dflash": {"injection": False, "refinement": False},
    "stored-table": {"store_transfer_table": True},
    "causal": {"is_causal": True},
}
variants = pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return make_folders(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module", autouse=True)
def loaded():
    load_plugin()


@pytest.fixture(scope="module")
def parallel_state(folders):
    with one_process(folders.target):
        yield


@variants
def test_every_tensor_is_mapped(overrides, parallel_state):
    from dspine.integrations.sglang.model import DSpineDraftModel

    config = tiny_config(**overrides)
    weights = random_weights(config)
    model = DSpineDraftModel(config)
    assert model.load_weights(weights.items()) == set(weights) == set(model.checkpoint_names())
    fused = torch.cat([weights[f"layers.1.self_attn.{name}_proj.weight"] for name in "qkv"])
    assert torch.equal(model.layers[1].self_attn.qkv_proj.weight, fused)
    gate_up = torch.cat([weights[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")])
    assert torch.equal(model.layers[0].mlp.gate_up_proj.weight, gate_up)
    for name, (parameter, shard) in model.checkpoint_names().items():
        if shard is None:
            assert torch.equal(parameter, weights[name]), name


@variants
def test_the_models_own_checkpoint_has_these_tensors(overrides):
    try:
        from dspine.modeling_dspine import DSpineModel
    except ImportError as error:
        pytest.skip(str(error))
    config = tiny_config(**overrides)
    state = DSpineModel(config).state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == checkpoint_shapes(config)


def test_missing_and_unknown_tensors_are_named(parallel_state):
    config = tiny_config()
    weights = random_weights(config)
    for name in ("injections.1.gate.bias", "layers.0.self_attn.k_proj.weight", "transfer.weight"):
        with pytest.raises(ValueError, match=f"lacks 1 tensors: {name}"):
            build(config, {k: v for k, v in weights.items() if k != name})
    with pytest.raises(ValueError, match="does not account for: injections.7.write.weight"):
        build(config, weights | {"injections.7.write.weight": torch.zeros(2, 2)})
    with pytest.raises(ValueError, match="does not account for: transfer_table"):
        build(config, weights | {"transfer_table": torch.zeros(97, 8)})
    for name in ("injections.0.write.weight", "layers.0.self_attn.q_proj.weight"):
        with pytest.raises(ValueError, match=f"tensor {name} of the DSpine checkpoint does not fit"):
            build(config, weights | {name: torch.zeros(3, 5)})


def plain_backbone(config, weights, context, positions, embeds, anchor_features):
    """The method in plain PyTorch, from its description: `[N, B, d]` states, and what the last layer leaves behind."""
    eps, d, N = config.rms_norm_eps, config.head_dim, len(embeds)

    def norm(x, name):
        return weights[f"{name}.weight"] * rms(x, eps)

    def heads(x):
        return x.view(*x.shape[:-1], -1, d)

    def rotate(x, at):
        angles = at[..., None].float() * config.rope_parameters["rope_theta"] ** -(torch.arange(0, d, 2) / d)
        cos, sin = angles.cos()[:, :, None], angles.sin()[:, :, None]
        left, right = x.chunk(2, -1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)

    c = norm(context @ weights["fc.weight"].T, "hidden_norm")
    h, left_behind = embeds, None
    for i in range(config.num_hidden_layers):
        x, layer = norm(h, f"layers.{i}.input_layernorm"), f"layers.{i}.self_attn"
        both = torch.cat([c, x], 1)
        q = rotate(norm(heads(x @ weights[f"{layer}.q_proj.weight"].T), f"{layer}.q_norm"), positions[:, CONTEXT:])
        k = rotate(norm(heads(both @ weights[f"{layer}.k_proj.weight"].T), f"{layer}.k_norm"), positions)
        v = heads(both @ weights[f"{layer}.v_proj.weight"].T)
        visible = torch.ones(BLOCK, CONTEXT + BLOCK, dtype=torch.bool)
        if config.is_causal:
            visible = visible.tril(CONTEXT)
        out = F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), attn_mask=visible, enable_gqa=True
        )
        h = h + out.transpose(1, 2).reshape(N, BLOCK, -1) @ weights[f"{layer}.o_proj.weight"].T
        x, mlp = norm(h, f"layers.{i}.post_attention_layernorm"), f"layers.{i}.mlp"
        x = F.silu(x @ weights[f"{mlp}.gate_proj.weight"].T) * (x @ weights[f"{mlp}.up_proj.weight"].T)
        h = h + x @ weights[f"{mlp}.down_proj.weight"].T
        if f"injections.{i}.norm.weight" in weights:
            names = ("norm.weight", "feature.weight", "gate.weight", "gate.bias", "write.weight")
            arguments = [weights.get(f"injections.{i}.{name}") for name in names]
            written, u = gated_adjacent_injection(h, anchor_features, *arguments, eps, config.injection_gate)
            left_behind = (h, u, anchor_features)
            h = written if i in config.injection_layers else h
    return norm(h, "norm"), left_behind


@variants
def test_draft_pass_equals_the_method(overrides, parallel_state):
    config = tiny_config(**overrides)
    weights, x = random_weights(config), inputs(config)
    model = build(config, weights)
    model.bind_head(HeadShard(x.W, 0, 97))
    table = weights.get("transfer_table")
    if table is None and config.uses_transfer_space:
        table = transfer_table(x.W, weights["transfer.weight"], config.rms_norm_eps, torch.float32)
    anchor_features = None if table is None else table[x.anchors]
    if table is not None:
        torch.testing.assert_close(model.transfer_table, table)
    with torch.no_grad():
        hidden = draft_pass(model, x).view(3, BLOCK, -1)
        left_behind = model.take_left_behind()
        expected, expected_left = plain_backbone(config, weights, x.context, x.positions, x.embeds, anchor_features)
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4)
    assert model.take_left_behind() is None
    if not config.refinement:
        assert left_behind is None
        return
    for got, wanted in zip(left_behind, expected_left):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@variants
def test_draft_pass_and_tail_equal_the_hugging_face_model(overrides, parallel_state):
    try:
        from dspine.modeling_dspine import DSpineModel
    except ImportError as error:
        pytest.skip(str(error))
    from dspine.modeling_dspine.target_dspine import TargetBinding

    config = tiny_config(**overrides)
    weights, x = random_weights(config), inputs(config)
    drafter = DSpineModel(config).eval()
    drafter.load_state_dict(weights)
    lm_head = torch.nn.Linear(32, 97, bias=False)
    lm_head.weight.data = x.W
    drafter._binding = TargetBinding(torch.nn.Embedding.from_pretrained(x.embedding), lm_head, torch.nn.ModuleList())
    drafter._table_is_current = config.store_transfer_table
    model = build(config, weights)
    model.bind_head(HeadShard(x.W, 0, 97))
    temperature, uniforms = torch.tensor([0.0, 1.0, 0.5]), torch.rand(3, BLOCK - 1)
    with torch.no_grad():
        outputs = drafter(
            noise_embeds=x.embeds,
            context_hidden_states=x.context,
            anchor_ids=x.anchors[:, None],
            position_ids=x.positions,
        )
        proposal = drafter.propose(outputs, x.anchors, temperature, uniforms)
        hidden = draft_pass(model, x).view(3, BLOCK, -1)
        tokens, candidates, probs = model.tail(hidden, model.take_left_behind(), temperature, uniforms)
    torch.testing.assert_close(hidden, outputs.last_hidden_state, rtol=1e-4, atol=1e-4)
    assert torch.equal(tokens, proposal.tokens) and torch.equal(candidates, proposal.candidates)
    torch.testing.assert_close(probs, proposal.probs, rtol=1e-3, atol=1e-4)


def test_the_table_keeps_no_history(parallel_state):
    config = tiny_config()
    model = build(config)
    assert model.transfer.weight.requires_grad
    model.bind_head(HeadShard(torch.randn(97, 32), 0, 97))
    assert not model.transfer_table.requires_grad


def test_shorter_blocks_and_empty_batches(parallel_state):
    config = tiny_config()
    model = build(config)
    model.bind_head(HeadShard(torch.randn(97, 32), 0, 97))
    empty = model.forward(torch.zeros(0, dtype=torch.long), torch.zeros(0), None, torch.zeros(0, 32))
    assert empty.hidden_states.shape == (0, 32)
    with pytest.raises(ValueError, match="between 2 and the drafter's trained block size 6, got 7"):
        model.set_block_size(7)
    model.set_block_size(4)
    with pytest.raises(ValueError, match="whole blocks of 4 slots, got 6 slots"):
        model.forward(torch.zeros(6, dtype=torch.long), torch.zeros(6), None, torch.zeros(6, 32))
    with pytest.raises(ValueError, match="input_embeds must be given"):
        model.forward(torch.zeros(4, dtype=torch.long), torch.zeros(4), None)
    with pytest.raises(ValueError, match="bind_head must be called"):
        build(config).forward(torch.zeros(6, dtype=torch.long), torch.zeros(6), None, torch.zeros(6, 32))


def test_new_weights_update_the_table_in_place(parallel_state):
    config = tiny_config()
    model = build(config)
    W = torch.randn(97, 32)
    model.bind_head(HeadShard(W, 0, 97))
    address, weights = model.transfer_table.data_ptr(), random_weights(config, seed=1)
    model.load_weights(weights.items())
    expected = transfer_table(W, weights["transfer.weight"], config.rms_norm_eps, torch.float32)
    torch.testing.assert_close(model.transfer_table, expected)
    assert model.transfer_table.data_ptr() == address and model.tail.transfer_table.data_ptr() == address
