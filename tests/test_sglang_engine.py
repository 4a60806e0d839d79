"""The SGLang integration inside SGLang, as far as a machine without a GPU allows: hooks, loading, layer maths, the worker's methods.

Skipped where SGLang is not installed; `.ci/sglang` makes environments with the oldest and the newest supported release.
"""

import inspect
import socket
import sys
import types
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F


pytest.importorskip("sglang", reason="SGLang is not installed; .ci/sglang runs these tests")

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402
from sglang_testing import BLOCK, MASK_ID, tiny_config  # noqa: E402
from transformers import LlamaConfig  # noqa: E402

from dspine.configuration_dspine import DSpineConfig  # noqa: E402
from dspine.integrations.sglang import plugin  # noqa: E402
from dspine.integrations.sglang.head import HeadShard  # noqa: E402
from dspine.modeling_dspine.reference_dspine import gated_adjacent_injection, rms, transition_cache  # noqa: E402
from dspine.modeling_dspine.target_dspine import transfer_table  # noqa: E402


CONTEXT = 7


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, a DSpine drafter and a DFlash drafter, configurations only."""
    root = tmp_path_factory.mktemp("checkpoints")
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}
    LlamaConfig(**sizes, num_hidden_layers=6, architectures=["LlamaForCausalLM"]).save_pretrained(root / "target")
    tiny_config().save_pretrained(root / "dspine")
    LlamaConfig(**sizes, num_hidden_layers=2, architectures=["DFlashDraftModel"]).save_pretrained(root / "dflash")
    return SimpleNamespace(**{name: str(root / name) for name in ("target", "dspine", "dflash")})


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """The plugin, through SGLang's own loader where the package is installed with its entry point."""
    from sglang.srt import plugins

    plugins.load_plugins()
    if not hooked(f"{plugin.ALGORITHM_CLASS}.create_worker"):
        plugin._register()
    assert plugin._failure is None


def hooked(path):
    return getattr(plugin.resolve(path), "__wrapped__", None) is not None


def server_arguments(folders, draft, algorithm="DSPINE", **overrides):
    """A server's arguments, resolved as `launch_server` does; nothing here looks for the GPU that they name."""
    from sglang.srt.server_args import ServerArgs

    fields = {
        "model_path": folders.target,
        "device": "cuda",
        "skip_tokenizer_init": True,
        "attention_backend": "triton",
        "mem_fraction_static": 0.5,
        "cuda_graph_max_bs_decode": 8,
        "speculative_algorithm": algorithm,
        "speculative_draft_model_path": draft,
    }
    arguments = ServerArgs(**(fields | overrides))
    if hasattr(arguments, "resolve_once"):  # newer releases resolve when asked, not when made
        arguments.resolve_once()
    return arguments


# ---- the plugin -----------------------------------------------------------------------------------------------------------


def test_entry_point_is_declared():
    from importlib.metadata import PackageNotFoundError, entry_points, version

    try:
        version("dspine")
    except PackageNotFoundError:
        pytest.skip("dspine is on the path but not installed")
    found = [entry for entry in entry_points(group="sglang.srt.plugins") if entry.name == "dspine"]
    assert found and found[0].load() is plugin.register


def test_hooks_take_effect():
    for name in ("_resolve_speculative_algorithm_alias", "_handle_dflash"):
        assert hooked(f"{plugin.SPECULATIVE_HOOK}.{name}")
    assert hooked(f"{plugin.ALGORITHM_CLASS}.create_worker")


def test_everything_relied_on_has_the_expected_signature():
    plugin.check_signatures(plugin.SIGNATURES)
    plugin.check_signatures(plugin.WORKER_SIGNATURES)


def test_signature_check_names_what_changed():
    with pytest.raises(RuntimeError, match=r"_handle_dflash no longer takes \['other'\]"):
        plugin.check_signatures({f"{plugin.SPECULATIVE_HOOK}._handle_dflash": ("server_args", "other")})
    with pytest.raises(RuntimeError, match="_handle_nothing does not exist any more"):
        plugin.check_signatures({f"{plugin.SPECULATIVE_HOOK}._handle_nothing": ()})
    with pytest.raises(RuntimeError, match="sglang.srt.nowhere.f does not exist any more"):
        plugin.check_signatures({"sglang.srt.nowhere.f": ()})


@pytest.mark.parametrize("version", ["0.5.16", "0.5.24", "0.6.0rc1"])
def test_versions_outside_the_range(version, monkeypatch):
    with pytest.raises(RuntimeError, match=f"SGLang {version} is outside the supported range 0.5.17 to 0.5.23"):
        plugin.check_version(version)
    monkeypatch.setenv(plugin.ANY_VERSION, "1")
    plugin.check_version(version)


@pytest.mark.parametrize("version", ["0.5.17", "0.5.17.post1", "0.5.20", "0.5.23"])
def test_versions_inside_the_range(version):
    plugin.check_version(version)


def resolve_alias(*args):
    return plugin.resolve(f"{plugin.SPECULATIVE_HOOK}._resolve_speculative_algorithm_alias")(
        *args, trust_remote_code=False, kwargs={}
    )


def test_alias(folders):
    assert resolve_alias("DSPINE", folders.dspine) == "DFLASH"
    assert resolve_alias("DFLASH", folders.dspine) == "DFLASH"
    assert resolve_alias("EAGLE3", folders.dflash) == "EAGLE3"
    assert resolve_alias(None, None) is None
    with pytest.raises(ValueError, match="needs a DSpine checkpoint .* holds \\['DFlashDraftModel'\\]"):
        resolve_alias("DSPINE", folders.dflash)
    with pytest.raises(ValueError, match="needs --speculative-draft-model-path"):
        resolve_alias("DSPINE", None)


@pytest.mark.parametrize(("asked", "served"), [(None, BLOCK), (4, 4)])
def test_alias_reaches_the_servers_arguments(asked, served, folders):
    arguments = plugin._resolved(server_arguments(folders, folders.dspine, speculative_num_draft_tokens=asked))
    assert arguments.speculative_algorithm == "DFLASH" and arguments.speculative_num_draft_tokens == served


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"speculative_num_draft_tokens": 7}, "between 2 and the drafter's trained block size 6, got 7"),
        ({"speculative_dflash_block_size": 16}, "between 2 and the drafter's trained block size 6, got 16"),
        ({"speculative_accept_threshold_acc": 0.5}, "--speculative-accept-threshold-acc must be 1.0"),
        ({"disaggregation_mode": "decode"}, "disaggregated prefill and decode"),
    ],
    ids=["block", "block-by-other-name", "threshold", "disaggregation"],
)
def test_what_cannot_be_honoured_is_refused(overrides, message, folders):
    for algorithm in ("DSPINE", "DFLASH"):
        with pytest.raises(ValueError, match=message):
            server_arguments(folders, folders.dspine, algorithm, **overrides)
    if "speculative_num_draft_tokens" in overrides:
        server_arguments(folders, folders.dflash, "DFLASH", **overrides)  # another drafter's options are not looked at


def test_worker_class(folders):
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    from dspine.integrations.sglang.model import DSpineDraftModel
    from dspine.integrations.sglang.worker import DSpineWorker

    create = SpeculativeAlgorithm.DFLASH.create_worker
    assert create(server_arguments(folders, folders.dflash, "DFLASH")) is DFlashWorkerV2
    for algorithm in ("DSPINE", "DFLASH", "dspine"):
        # more than once: nothing may be hooked twice
        assert create(server_arguments(folders, folders.dspine, algorithm)) is DSpineWorker
    assert ModelRegistry.resolve_model_cls(["DSpineModel"])[0] is DSpineDraftModel
    assert hooked(plugin.ACCEPTANCE)
    assert not hasattr(plugin.resolve(plugin.ACCEPTANCE).__wrapped__, "__wrapped__")


def test_a_broken_plugin_says_so_when_it_is_asked_for(monkeypatch):
    def fail():
        raise RuntimeError("something moved")

    monkeypatch.setattr(plugin, "_register", fail)
    monkeypatch.setattr(plugin, "_failure", None)
    monkeypatch.setattr(SpeculativeAlgorithm, "from_string", SpeculativeAlgorithm.from_string)
    plugin.register()
    with pytest.raises(
        RuntimeError, match="the dspine plugin does not work with this SGLang: RuntimeError: something moved"
    ):
        SpeculativeAlgorithm.from_string("dspine")
    assert SpeculativeAlgorithm.from_string("DFLASH") is SpeculativeAlgorithm.DFLASH
    with pytest.raises(ValueError, match="Unknown"):
        SpeculativeAlgorithm.from_string("OTHER")


def test_configuration_is_read_as_dflash_reads_it(folders):
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
    from sglang.srt.utils.hf_transformers_utils import get_config

    config = get_config(folders.dspine, trust_remote_code=False)
    assert isinstance(config, DSpineConfig)
    parsed = parse_dflash_draft_config(draft_hf_config=config)
    assert (parsed.block_size, parsed.target_layer_ids, parsed.num_target_layers) == (BLOCK, [1, 3], 6)
    assert parsed.mask_token_id in (None, MASK_ID)  # 0.5.17 does not read it, the worker does
    model_config = ModelConfig(folders.dspine, is_draft_model=True)
    assert model_config.hf_config.architectures == ["DSpineModel"]
    assert (model_config.head_dim, model_config.vocab_size, model_config.num_key_value_heads) == (8, 97, 2)


# ---- the model ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parallel_state(folders):
    """One process that counts as a tensor-parallel group of one, as SGLang's layers need."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import get_context
    from sglang.srt.server_args import ServerArgs

    # SGLang's rotary embedding asks vLLM for a kernel on machines it does not know; the plain PyTorch path is the one that runs
    stand_in = types.ModuleType("vllm._custom_ops")
    stand_in.rotary_embedding = None
    sys.modules.setdefault("vllm", types.ModuleType("vllm"))
    sys.modules.setdefault("vllm._custom_ops", stand_in)
    arguments = ServerArgs(
        model_path=folders.target, device="cpu", skip_tokenizer_init=True, attention_backend="torch_native"
    )
    get_context().set_server_args(arguments)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    parallel_state.init_distributed_environment(
        world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=f"tcp://127.0.0.1:{port}"
    )
    named = "tensor_model_parallel_size" in inspect.signature(parallel_state.initialize_model_parallel).parameters
    parallel_state.initialize_model_parallel(backend="gloo", **({"tensor_model_parallel_size": 1} if named else {}))
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def checkpoint_shapes(config) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint, written down by hand."""
    d, r, ff = config.hidden_size, config.transfer_rank, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes = {"fc.weight": (d, d * len(config.target_layer_ids)), "hidden_norm.weight": (d,), "norm.weight": (d,)}
    for i in range(config.num_hidden_layers):
        shapes |= {
            f"layers.{i}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (d,),
                "post_attention_layernorm": (d,),
                "self_attn.q_proj": (q, d),
                "self_attn.k_proj": (kv, d),
                "self_attn.v_proj": (kv, d),
                "self_attn.o_proj": (d, q),
                "self_attn.q_norm": (config.head_dim,),
                "self_attn.k_norm": (config.head_dim,),
                "mlp.gate_proj": (ff, d),
                "mlp.up_proj": (ff, d),
                "mlp.down_proj": (d, ff),
            }.items()
        }
    gate = {"channel": d, "rank": r}.get(config.injection_gate)
    for i in sorted(set(config.injection_layers) | ({config.num_hidden_layers - 1} if config.refinement else set())):
        shapes |= {f"injections.{i}.norm.weight": (d,), f"injections.{i}.feature.weight": (r, d)}
        shapes |= {f"injections.{i}.write.weight": (d, r)}
        if gate:
            shapes |= {f"injections.{i}.gate.weight": (gate, 2 * r), f"injections.{i}.gate.bias": (gate,)}
    if config.uses_transfer_space:
        shapes["transfer.weight"] = (r, d)
        if config.store_transfer_table:
            shapes["transfer_table"] = (config.vocab_size, r)
    return shapes


def random_weights(config, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.3 + (1.0 if name.endswith("norm.weight") else 0.0)
        for name, shape in checkpoint_shapes(config).items()
    }


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


def build(config, weights=None):
    from dspine.integrations.sglang.model import DSpineDraftModel

    model = DSpineDraftModel(config)
    model.load_weights((random_weights(config) if weights is None else weights).items())
    return model


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


class DenseAttention(torch.nn.Module):
    """In place of RadixAttention and its KV pool: context keys and values by hand, slots of a block see each other."""

    def __init__(self, attention):
        super().__init__()
        self.heads, self.kv_heads, self.size = attention.num_heads, attention.num_kv_heads, attention.head_dim
        self.causal = attention.attn_type.name == "DECODER"
        self.k_scale = self.v_scale = None

    def forward(self, q, k, v, forward_batch, **kwargs):
        shape = (forward_batch.batch_size, BLOCK, -1, self.size)
        k = torch.cat([self.context[0].view(len(q) // BLOCK, CONTEXT, -1, self.size), k.view(shape)], 1).transpose(
            1, 2
        )
        v = torch.cat([self.context[1].view(len(q) // BLOCK, CONTEXT, -1, self.size), v.view(shape)], 1).transpose(
            1, 2
        )
        visible = torch.ones(BLOCK, CONTEXT + BLOCK, dtype=torch.bool)
        if self.causal:
            visible = visible.tril(CONTEXT)
        out = F.scaled_dot_product_attention(q.view(shape).transpose(1, 2), k, v, attn_mask=visible, enable_gqa=True)
        return out.transpose(1, 2).reshape(len(q), -1)


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


def inputs(config, rows=3):
    torch.manual_seed(5)
    width = len(config.target_layer_ids) * config.hidden_size
    anchors = torch.randint(0, 96, (rows,))
    slots = torch.full((rows, BLOCK), MASK_ID)
    slots[:, 0] = anchors
    embedding, W = (
        torch.randn(config.vocab_size, config.hidden_size),
        torch.randn(config.vocab_size, config.hidden_size),
    )
    # rows at different positions, as in serving
    positions = torch.arange(CONTEXT + BLOCK) + torch.tensor([[0], [11], [30]])[:rows]
    return SimpleNamespace(
        anchors=anchors,
        slots=slots,
        embeds=embedding[slots],
        context=torch.randn(rows, CONTEXT, width),
        positions=positions,
        embedding=embedding,
        W=W,
    )


def draft_pass(model, x):
    """One draft pass as the worker does it: context keys and values first, then the block."""
    rows = len(x.anchors)
    context = model.project_target_hidden(x.context.reshape(rows * CONTEXT, -1))
    at = x.positions[:, :CONTEXT].reshape(-1)
    for layer in model.layers:
        attention = layer.self_attn
        if not isinstance(attention.attn, DenseAttention):
            types_of = SimpleNamespace(
                num_heads=attention.num_heads,
                num_kv_heads=attention.num_kv_heads,
                head_dim=attention.head_dim,
                attn_type=attention.attn_type,
            )
            attention.attn = DenseAttention(types_of)
        k, v = attention.kv_proj_only(model.prepare_context_hidden_for_kv(layer, context))
        attention.attn.context = (attention.apply_k_rope(at, attention.apply_k_norm(k)), v)
    batch = SimpleNamespace(batch_size=rows)
    return model.forward(
        x.slots.flatten(), x.positions[:, CONTEXT:].reshape(-1), batch, x.embeds.clone().flatten(0, 1)
    ).hidden_states


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


# ---- the worker's methods -------------------------------------------------------------------------------------------------


def sampling(rows, **overrides):
    """What the scheduler hands over: one greedy row, the others sampled over the whole vocabulary."""
    top_ks = torch.full((rows,), 1 << 30, dtype=torch.int32)
    top_ks[0] = 1
    fields = {
        "temperatures": torch.tensor([[1.0], *[[0.7]] * (rows - 1)]),
        "top_ks": top_ks,
        "top_ps": torch.ones(rows),
        "min_ps": torch.zeros(rows),
        "need_top_k_sampling": True,
        "need_top_p_sampling": False,
        "need_min_p_sampling": False,
        "is_all_greedy": False,
    }
    return SimpleNamespace(**(fields | overrides))


@pytest.fixture
def worker(parallel_state):
    """A worker without the engine around it: model, tail and the state that its own methods read."""
    from dspine.integrations.sglang import worker as module

    config = tiny_config()
    worker = object.__new__(module.DSpineWorker)
    worker.draft_model = build(config)
    worker.draft_model.bind_head(HeadShard(inputs(config).W, 0, 97))
    worker.block_size, worker._draft_sampler, worker._proposal, worker._temperature = BLOCK, None, None, None
    return worker


@pytest.fixture
def renormalise(monkeypatch):
    """sgl_kernel's function, which exists on GPUs only, in PyTorch."""
    from sglang.srt.speculative import dflash_utils

    def top_k(probs, top_ks):
        kept = probs.argsort(-1, descending=True).argsort(-1) < top_ks[:, None]
        return probs * kept / (probs * kept).sum(-1, keepdim=True)

    monkeypatch.setattr(dflash_utils, "top_k_renorm_prob", top_k)


def test_filters_of_sampled_requests_are_run_at_start(renormalise, monkeypatch):
    from sglang.srt.speculative import dflash_utils

    from dspine.integrations.sglang.worker import prepare_sampling

    def top_p(probs, top_ps):
        kept = probs.cumsum(-1) - probs < top_ps[:, None]
        return probs * kept / (probs * kept).sum(-1, keepdim=True)

    device = torch.device("cpu")
    monkeypatch.setattr(dflash_utils, "top_p_renorm_prob", top_p)
    prepare_sampling(device)
    monkeypatch.setattr(dflash_utils, "top_p_renorm_prob", lambda probs, top_ps: probs)
    with pytest.raises(ValueError, match="top_p_renorm_prob must keep"):
        prepare_sampling(device)
    monkeypatch.setattr(dflash_utils, "top_k_renorm_prob", lambda probs, top_ks: 1 / 0)
    with pytest.raises(ValueError, match="top_k_renorm_prob, by which .* does not run .*ZeroDivisionError"):
        prepare_sampling(device)


def test_the_table_keeps_no_history(parallel_state):
    config = tiny_config()
    model = build(config)
    assert model.transfer.weight.requires_grad
    model.bind_head(HeadShard(torch.randn(97, 32), 0, 97))
    assert not model.transfer_table.requires_grad


def test_temperatures_of_a_mixed_batch():
    from dspine.integrations.sglang.worker import draft_temperature

    torch.testing.assert_close(draft_temperature(sampling(3)), torch.tensor([0.0, 0.7, 0.7]))
    assert draft_temperature(None) is None and draft_temperature(sampling(3, is_all_greedy=True)) is None


def test_mask_id_comes_from_the_checkpoint(worker):
    assert worker._resolve_mask_token_id(mask_token="<|MASK|>", mask_token_id=None) == MASK_ID


def test_tail_without_a_graph_equals_the_tail_within(worker):
    from dspine.integrations.sglang.tail import GraphTail

    x = inputs(worker.draft_model.config)
    with torch.no_grad():
        graph = GraphTail(worker.draft_model.tail, worker.draft_model, BLOCK, 4, "cpu")
        graph(draft_pass(worker.draft_model, x))
        hidden = draft_pass(worker.draft_model, x).view(3, BLOCK, -1)
        eager = worker._greedy_sample_from_vocab_parallel_head(
            hidden_states=hidden[:, 1:].reshape(-1, 32), lm_head=None
        )
    assert torch.equal(eager, graph.out[: eager.numel()])
    for got, wanted in zip(worker._proposal, graph.proposal(3)):
        assert torch.equal(got, wanted)


def test_sampled_acceptance_goes_through_the_hook(worker, folders, renormalise, monkeypatch):
    """SGLang's module function, hooked, inside one of our rounds: exact rejection sampling with the q of the tail."""
    from dspine.integrations.sglang import worker as module

    SpeculativeAlgorithm.DFLASH.create_worker(server_arguments(folders, folders.dspine))
    accept, rows = plugin.resolve(plugin.ACCEPTANCE), 3
    x = inputs(worker.draft_model.config)
    worker._temperature = module.draft_temperature(sampling(rows))
    with torch.no_grad():
        hidden = draft_pass(worker.draft_model, x).view(rows, BLOCK, -1)
        tokens = worker._greedy_sample_from_vocab_parallel_head(
            hidden_states=hidden[:, 1:].reshape(-1, 32), lm_head=None
        )
    block = torch.cat([x.anchors[:, None], tokens.view(rows, -1)], 1)
    # a target that agrees with everything, then with nothing
    agreeing = 40 * F.one_hot(torch.cat([block[:, 1:], block[:, :1]], 1), 97).float()
    monkeypatch.setattr(module, "_running", worker)
    arguments = {"candidates": block, "sampling_info": sampling(rows), "max_top_k": None, "uniform_top_k_value": None}
    accepted, own = accept(next_token_logits=agreeing.view(-1, 97), **arguments)
    assert accepted.dtype == torch.int32 and own.dtype == torch.int64
    assert accepted.tolist() == [BLOCK - 1] * rows and torch.equal(own, x.anchors)
    accepted, own = accept(next_token_logits=-agreeing.view(-1, 97), **arguments)
    assert accepted.tolist() == [0] * rows and not (own == block[:, 1]).any()
    # in anyone else's round SGLang's own function runs, which needs its kernels
    monkeypatch.setattr(module, "_running", None)
    with pytest.raises(RuntimeError, match="unavailable"):
        accept(next_token_logits=agreeing.view(-1, 97), **arguments)


def test_target_probabilities(worker, renormalise):
    from dspine.integrations.sglang.worker import target_probabilities

    logits = torch.randn(3 * BLOCK, 97)
    info = sampling(3, top_ks=torch.tensor([1, 5, 1 << 30], dtype=torch.int32))
    probs = target_probabilities(logits, info, 3, BLOCK, max_top_k=None, uniform_top_k_value=None)
    logits = logits.view(3, BLOCK, 97)
    torch.testing.assert_close(probs[0], F.one_hot(logits[0].argmax(-1), 97).float())
    torch.testing.assert_close(probs[2], torch.softmax(logits[2] / 0.7, -1))
    assert ((probs[1] > 0).sum(-1) == 5).all()
    info = sampling(3, need_min_p_sampling=True, min_ps=torch.tensor([0.0, 0.2, 0.0]))
    probs = target_probabilities(logits.view(-1, 97), info, 3, BLOCK, max_top_k=None, uniform_top_k_value=None)
    plain = torch.softmax(logits[1] / 0.7, -1)
    kept = torch.where(plain >= 0.2 * plain.amax(-1, keepdim=True), plain, 0.0)
    torch.testing.assert_close(probs[1], kept / kept.sum(-1, keepdim=True))


def test_a_round_marks_its_worker(worker, monkeypatch):
    """Temperatures are staged before the round, the acceptance hook sees this worker within it and none after it."""
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    from dspine.integrations.sglang import worker as module

    seen, mode = [], SimpleNamespace(is_extend=lambda: False, is_idle=lambda: False)
    batch = SimpleNamespace(forward_mode=mode, is_extend_in_batch=False, sampling_info=sampling(3))
    worker._draft_sampler = SimpleNamespace(stage=seen.append)
    monkeypatch.setattr(DFlashWorkerV2, "forward_batch_generation", lambda self, batch: seen.append(module._running))
    worker.forward_batch_generation(batch)
    torch.testing.assert_close(seen[0], torch.tensor([0.0, 0.7, 0.7]))
    assert seen[1] is worker and module._running is None


def test_last_write_refinement_is_what_the_tail_computes(worker):
    """The tail's scores on SGLang's states, from the method's formula."""
    model = worker.draft_model
    x = inputs(model.config)
    with torch.no_grad():
        hidden = draft_pass(model, x).view(3, BLOCK, -1)
        left_behind = model.take_left_behind()
        _, candidates, _ = model.tail(hidden, left_behind)
        module = model.injections["1"]
        scores = transition_cache(
            left_behind[0][:, 1:], left_behind[1][:, 1:], left_behind[2], candidates, model.transfer_table, x.W,
            model.norm.weight, **module.write_weights,
        )  # fmt: skip
        torch.testing.assert_close(model.tail._pair_scores(left_behind, candidates), scores)


# ---- whole rounds ---------------------------------------------------------------------------------------------------------


class MarkovTarget:
    """A target whose next token depends on the last one only, behind the interface that the worker uses."""

    def __init__(self, table, embedding, W, rows):
        self.table = table
        lm_head = SimpleNamespace(weight=W)
        model = SimpleNamespace(get_input_embeddings=lambda: lambda ids: embedding[ids], lm_head=lm_head)
        pool = SimpleNamespace(req_to_token=torch.zeros(rows, 4096, dtype=torch.int32))
        self.model_runner = SimpleNamespace(model=model, req_to_token_pool=pool, device="cpu")

    def forward_batch_generation(self, batch=None, forward_batch=None, **kwargs):
        logits = self.table[forward_batch.input_ids]
        output = SimpleNamespace(next_token_logits=logits, hidden_states=torch.zeros(len(logits), 2))
        return SimpleNamespace(logits_output=output, can_run_cuda_graph=False)


class CPULengths(torch.Tensor):
    """Lengths that another stream cannot have made."""

    def record_stream(self, stream):
        pass


@pytest.fixture
def rounds(worker, renormalise, folders, monkeypatch):
    """`run(sampling_info, rows, count, classes)`: texts that DFLASH's own decode step, with our overrides, generates on the CPU."""
    from sglang.srt.speculative import dflash_worker_v2 as engine
    from sglang.srt.speculative.draft_worker_common import build_block_pos_offsets, make_draft_input_v2
    from sglang.version import __version__ as version

    if version != "0.5.17":
        pytest.skip("the stand-ins around the decode step are made for SGLang 0.5.17")
    SpeculativeAlgorithm.DFLASH.create_worker(server_arguments(folders, folders.dspine))
    torch.manual_seed(0)
    # flat proposals over the whole vocabulary: a random drafter that a random target accepts now and then
    config = tiny_config(num_candidates=97, output_multiplier=0.1)
    x = inputs(config)
    worker.draft_model = model = build(config)
    model.bind_head(HeadShard(x.W, 0, 97))
    favourites = torch.randn(97, 97) * 1.5
    monkeypatch.setattr(engine, "is_dflash_sampling_verify_available", lambda: True)
    monkeypatch.setattr(engine, "assign_extend_cache_locs_func", lambda **kw: torch.zeros(kw["batch_size"] * BLOCK, dtype=torch.int64))  # fmt: skip
    monkeypatch.setattr(engine.DFlashVerifyInput, "prepare_for_verify", lambda self, batch, target: (SimpleNamespace(input_ids=self.draft_token), None))  # fmt: skip
    monkeypatch.setattr(engine.DFlashWorkerV2, "_append_target_hidden_to_draft_kv_by_loc", lambda self, **kw: None)
    draft_pass(model, x)  # puts dense attention in place
    model.take_left_behind()

    def draft_forward(batch):
        for layer in model.layers:
            attention = layer.self_attn
            zeros = torch.zeros(batch.batch_size * CONTEXT, attention.kv_size)
            attention.attn.context = (zeros, zeros)
        # texts grow longer than the tiny drafter's table of angles
        output = model.forward(batch.input_ids, batch.positions % 64, batch, batch.input_embeds)
        return SimpleNamespace(logits_output=output, can_run_graph=False)

    def run(sampling_info, rows, count, classes=97):
        # tokens of one class have the same successors, so few classes make many samples of each
        table = favourites[torch.arange(97) % classes]
        worker._target_worker = MarkovTarget(table, x.embedding, x.W, rows)
        worker.model_runner, worker.device = worker._target_worker.model_runner, "cpu"
        worker.draft_model_runner = SimpleNamespace(forward=draft_forward)
        worker._draft_block_ids_buf, worker._block_pos_offsets = (
            None,
            build_block_pos_offsets(length=BLOCK, device="cpu"),
        )
        worker._draft_block_spec_info, worker._mask_token_id = None, MASK_ID
        worker._use_triton_prepare_block = worker._use_triton_accept_bonus = worker.use_compact_draft_cache = False
        worker._need_mamba_verify_commit = worker._warned_sampling_fallback = worker._logged_first_verify = False
        worker.ps = SimpleNamespace(tp_rank=0)
        tokens = torch.randint(0, 96, (rows,))
        texts, lengths = [[int(token)] for token in tokens], torch.full((rows,), 5)
        state = make_draft_input_v2(bonus_tokens=tokens, new_seq_lens=lengths)
        mode = SimpleNamespace(is_extend=lambda: False, is_idle=lambda: False)
        for _ in range(count):
            state.max_top_k = int(sampling_info.top_ks.max())  # the scheduler's part
            batch = SimpleNamespace(
                forward_mode=mode, is_extend_in_batch=False, return_logprob=False, has_grammar=False, spec_info=state,
                sampling_info=sampling_info, seq_lens=lengths.as_subclass(CPULengths), seq_lens_cpu=lengths.int(),
                seq_lens_sum=int(lengths.sum()), req_pool_indices=torch.arange(rows), reqs=[None] * rows, out_cache_loc=None,
            )  # fmt: skip
            result = worker.forward_batch_generation(batch)
            new = result.next_token_ids.view(rows, BLOCK)
            for row, kept in enumerate(result.accept_lens.tolist()):
                texts[row] += new[row, :kept].tolist()
            state = result.next_draft_input
            lengths = result.new_seq_lens.as_subclass(torch.Tensor)
        return texts, table

    return run


class Penalties(SimpleNamespace):
    """Sampling parameters of a whole batch, with nothing that changes logits."""

    has_custom_logit_processor = False
    acc_linear_penalties = penalizer_orchestrator = grammar_mask = logit_bias = None

    def __len__(self):
        return len(self.top_ks)


def test_greedy_rounds_follow_the_targets_argmax(rounds):
    texts, table = rounds(Penalties(**vars(sampling(4, is_all_greedy=True))), 4, 8)
    for text in texts:
        assert text[1:] == table.argmax(-1)[torch.tensor(text[:-1])].tolist()


def test_sampled_rounds_follow_the_target_and_greedy_rows_stay_greedy(rounds):
    rows, count = 96, 40
    texts, table = rounds(Penalties(**vars(sampling(rows))), rows, count, classes=2)
    assert texts[0][1:] == table.argmax(-1)[torch.tensor(texts[0][:-1])].tolist()
    pairs = torch.cat([torch.tensor([text[:-1], text[1:]]) for text in texts[1:]], 1)
    assert pairs.shape[1] > (rows - 1) * count * 1.2  # some drafts were kept, or nothing would have been tested
    counts = torch.zeros(2, 97).index_put_((pairs[0] % 2, pairs[1]), torch.ones(pairs.shape[1]), accumulate=True)
    expected = counts.sum(1, keepdim=True) * torch.softmax(table[:2] / 0.7, -1)
    cells = expected > 5
    statistic = ((counts - expected)[cells] ** 2 / expected[cells]).sum()
    freedom = int(cells.sum()) - 2
    assert abs(float(statistic) - freedom) / (2 * freedom) ** 0.5 < 5
