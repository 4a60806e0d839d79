"""What the tests inside SGLang share: tiny checkpoints, a process that counts as one rank, a drafter on dense attention.

Importable where SGLang is installed only.
"""

import contextlib
import inspect
import socket
import sys
import types
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from sglang_testing import BLOCK, MASK_ID, tiny_config
from transformers import LlamaConfig

from dspine.integrations.sglang import plugin


CONTEXT = 7


def make_folders(root) -> SimpleNamespace:
    """A target, a DSpine drafter and a DFlash drafter below `root`, configurations only."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}
    LlamaConfig(**sizes, num_hidden_layers=6, architectures=["LlamaForCausalLM"]).save_pretrained(root / "target")
    tiny_config().save_pretrained(root / "dspine")
    LlamaConfig(**sizes, num_hidden_layers=2, architectures=["DFlashDraftModel"]).save_pretrained(root / "dflash")
    return SimpleNamespace(**{name: str(root / name) for name in ("target", "dspine", "dflash")})


def load_plugin() -> None:
    """The plugin, through SGLang's own loader where the package is installed with its entry point."""
    from sglang.srt import plugins

    plugins.load_plugins()
    if not any(plugin.is_around(path, function) for path, function in plugin.hooks().items()):
        from sglang.srt.plugins.hook_registry import HookRegistry

        plugin._register()
        HookRegistry.apply_hooks()
    assert plugin._failure is None
    plugin.check_hooks()


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


@contextlib.contextmanager
def one_process(target: str):
    """One process that counts as a tensor-parallel group of one, as SGLang's layers need."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import get_context
    from sglang.srt.server_args import ServerArgs

    # SGLang's rotary embedding asks vLLM for a kernel on machines it does not know; the plain PyTorch path is the one that runs
    stand_in = types.ModuleType("vllm._custom_ops")
    stand_in.rotary_embedding = None
    sys.modules.setdefault("vllm", types.ModuleType("vllm"))
    sys.modules.setdefault("vllm._custom_ops", stand_in)
    arguments = ServerArgs(model_path=target, device="cpu", skip_tokenizer_init=True, attention_backend="torch_native")
    get_context().set_server_args(arguments)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    parallel_state.init_distributed_environment(
        world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=f"tcp://127.0.0.1:{port}"
    )
    named = "tensor_model_parallel_size" in inspect.signature(parallel_state.initialize_model_parallel).parameters
    parallel_state.initialize_model_parallel(backend="gloo", **({"tensor_model_parallel_size": 1} if named else {}))
    try:
        yield
    finally:
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


def build(config, weights=None):
    from dspine.integrations.sglang.model import DSpineDraftModel

    model = DSpineDraftModel(config)
    model.load_weights((random_weights(config) if weights is None else weights).items())
    return model


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
