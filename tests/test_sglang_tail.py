"""The parts of the SGLang integration that are plain PyTorch: acceptance, the target's head in shards, the decoding tail, checks.

They need no SGLang. The drafts' own distribution is part of the losslessness tests: tokens are drawn by the walk, then accepted.
"""

import threading
from types import SimpleNamespace

import pytest
import torch
from sglang_testing import tiny_config
from torch import nn

from dspine.integrations.sglang.acceptance import accept_block, filter_min_p
from dspine.integrations.sglang.checks import check_draft, check_server, check_target
from dspine.integrations.sglang.head import HeadShard, head_shard
from dspine.integrations.sglang.tail import DecodingTail, GraphTail
from dspine.modeling_dspine import use_implementation
from dspine.modeling_dspine.reference_dspine import select_candidates, walk_transition_cache
from dspine.modeling_dspine.target_dspine import transfer_table


V, K = 11, 4


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Excess of the chi-square statistic over its expectation, in standard deviations."""
    expected = probs * counts.sum()
    cells = expected > 5
    assert counts[probs == 0].sum() == 0
    statistic = ((counts - expected)[cells] ** 2 / expected[cells]).sum()
    freedom = int(cells.sum()) - 1
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


# ---- acceptance -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 3.0])
def test_output_follows_the_target(sharpness):
    """Two slots, a target that looks at the token before: first and second token, over 400,000 blocks."""
    rows = 400_000
    generator = torch.Generator().manual_seed(int(10 * sharpness))
    first = torch.softmax(torch.randn(V, generator=generator), -1)
    second = torch.softmax(torch.randn(V, V, generator=generator), -1)
    third = torch.softmax(torch.randn(V, V, generator=generator), -1)
    candidates = torch.randperm(V, generator=generator)[: 2 * K].view(1, 2, K).expand(rows, -1, -1)
    scores = sharpness * torch.randn(1, 2, K, K, generator=generator)
    scores[:, 0] = scores[:, 0, :1]  # the slot before the first is the anchor
    temperature = torch.ones(rows)
    drafts, q = walk_transition_cache(
        scores.expand(rows, -1, -1, -1), candidates, temperature, torch.rand(rows, 2, generator=generator)
    )
    block = torch.cat([torch.zeros(rows, 1, dtype=torch.long), drafts], dim=1)
    probs = torch.stack([first.expand(rows, -1), second[drafts[:, 0]], third[drafts[:, 1]]], dim=1)
    accepted, own = accept_block(block, probs, candidates, q, torch.rand(rows, 3, generator=generator))

    text = torch.cat([drafts, own[:, None]], dim=1).scatter(1, accepted.long()[:, None], own[:, None])
    assert chi_square(torch.bincount(text[:, 0], minlength=V), first) < 4
    two = accepted >= 1
    for token in torch.unique(candidates[0, 0]).tolist():
        after = text[two & (text[:, 0] == token), 1]
        if len(after) > 1000:
            assert chi_square(torch.bincount(after, minlength=V), second[token]) < 4
    # the share of accepted first drafts is the overlap of p and q
    overlap = torch.minimum(first[candidates[0, 0]], q[0, 0]).sum()
    assert abs(float(two.float().mean() - overlap)) < 0.004


def test_a_draft_like_the_target_is_always_kept():
    generator = torch.Generator().manual_seed(0)
    q = torch.softmax(torch.randn(500, 3, K, generator=generator), -1)
    candidates = torch.randint(0, V // 2, (500, 3, 1), generator=generator) + torch.arange(K)
    probs = torch.zeros(500, 4, V).scatter(
        -1, torch.cat([candidates, candidates[:, :1]], 1), torch.cat([q, q[:, :1]], 1)
    )
    drafts = candidates.gather(-1, torch.multinomial(q.view(-1, K), 1, generator=generator).view(500, 3, 1))[..., 0]
    block = torch.cat([drafts[:, :1], drafts], dim=1)
    accepted, own = accept_block(block, probs, candidates, q, torch.rand(500, 4, generator=generator))
    assert (accepted == 3).all()
    assert (probs[:, 3].gather(-1, own[:, None]) > 0).all()


def test_greedy_rows_are_argmax():
    """A one-hot p and a one-hot q: drafts are kept while they equal the target's choice, which also ends the block."""
    choice = torch.tensor([[3, 4, 5, 6], [3, 4, 5, 6], [3, 4, 5, 6]])
    block = torch.tensor([[0, 3, 4, 5], [0, 3, 9, 5], [0, 1, 4, 5]])
    probs = torch.nn.functional.one_hot(choice, V).float()
    candidates = torch.stack([block[:, 1:], torch.full((3, 3), 10)], dim=-1)
    q = torch.tensor([1.0, 0.0]).expand(3, 3, 2)
    accepted, own = accept_block(block, probs, candidates, q, torch.rand(3, 4))
    assert accepted.tolist() == [3, 1, 0] and own.tolist() == [6, 4, 3]


def test_a_residual_lost_to_rounding_falls_back_to_the_target():
    probs = torch.tensor([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])
    q = torch.tensor([[[0.5000001, 0.4999999]]])
    accepted, own = accept_block(
        torch.tensor([[0, 0]]), probs, torch.tensor([[[0, 1]]]), q, torch.tensor([[0.99999999, 0.3]])
    )
    assert own[0] in (0, 1)


def test_min_p():
    probs = torch.tensor([[[0.6, 0.3, 0.1]], [[0.6, 0.3, 0.1]]])
    kept = filter_min_p(probs, torch.tensor([0.4, 0.0]))
    torch.testing.assert_close(kept, torch.tensor([[[2 / 3, 1 / 3, 0.0]], [[0.6, 0.3, 0.1]]]))


def test_shapes_are_checked():
    probs, q = torch.ones(2, 3, V) / V, torch.ones(2, 2, K) / K
    with pytest.raises(ValueError, match="target_probs and uniforms"):
        accept_block(torch.zeros(2, 3, dtype=torch.long), probs[:, :2], q.long(), q, torch.rand(2, 3))
    with pytest.raises(ValueError, match="candidates and draft_probs"):
        accept_block(torch.zeros(2, 3, dtype=torch.long), probs, q.long()[:, :1], q, torch.rand(2, 3))


# ---- the head in shards ---------------------------------------------------------------------------------------------------


class ThreadGroup:
    """Stands in for SGLang's tensor-parallel group: ranks are threads of this process."""

    def __init__(self, ranks: int):
        self.world_size, self.barrier, self.slots = ranks, threading.Barrier(ranks), [None] * ranks
        self.rank = threading.local()

    def _exchange(self, tensor):
        self.slots[self.rank.index] = tensor.clone()
        self.barrier.wait()
        gathered = list(self.slots)
        self.barrier.wait()
        return gathered

    def all_reduce(self, tensor):
        return torch.stack(self._exchange(tensor)).sum(0)

    def all_gather_into_tensor(self, out, tensor):
        out.copy_(torch.cat(self._exchange(tensor)))

    def run(self, function):
        """`function(rank)` on every rank; the results in order of rank."""
        results, errors = [None] * self.world_size, []

        def body(rank):
            self.rank.index = rank
            try:
                results[rank] = function(rank)
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=body, args=(i,)) for i in range(self.world_size)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        if errors:
            raise errors[0]
        return results


def shards(weight, bounds, group):
    return [HeadShard(weight[start:end], start, weight.shape[0], group) for start, end in zip(bounds[:-1], bounds[1:])]


@pytest.mark.parametrize("bounds", [(0, 48, 97), (0, 95, 97), (0, 97, 97), (0, 30, 60, 90, 97)])
def test_sharded_selection_equals_the_whole(bounds):
    """Uneven shards, one smaller than the number of candidates, one empty; repeated rows make ties."""
    torch.manual_seed(0)
    weight, hidden = torch.randn(97, 16), torch.randn(3, 5, 16)
    weight[60:66] = weight[20:26]
    values, tokens = select_candidates(hidden @ weight.T, 8)
    # a matrix product of other shape may round a tie apart: ids are compared where the value is unique, the next one included
    nine = torch.topk(hidden @ weight.T, 9).values
    unique = (values[..., :, None] - nine[..., None, :]).abs().add(torch.eye(8, 9)).amin(-1) > 1e-5
    group = ThreadGroup(len(bounds) - 1)
    heads = shards(weight, bounds, group)
    for got_values, got_tokens in group.run(lambda rank: heads[rank].select(heads[rank].logits(hidden), 8)):
        torch.testing.assert_close(got_values, values)
        assert torch.equal(got_tokens[unique], tokens[unique])


def test_sharded_table_equals_the_whole():
    torch.manual_seed(0)
    weight, A = torch.randn(97, 16), torch.randn(8, 16)
    group = ThreadGroup(2)
    heads = shards(weight, (0, 64, 97), group)
    for table in group.run(lambda rank: heads[rank].table(A, 1e-6, torch.float32)):
        torch.testing.assert_close(table, transfer_table(weight, A, 1e-6, torch.float32))


# ---- the tail -------------------------------------------------------------------------------------------------------------


def random_tail(config, head, seed=0):
    torch.manual_seed(seed)
    d, r = config.hidden_size, config.transfer_rank
    weights = {
        "gate_weight": torch.randn(d, 2 * r),
        "gate_bias": torch.randn(d),
        "write_weight": torch.randn(d, r),
        "eps": config.rms_norm_eps,
        "gate": "channel",
    }
    return DecodingTail(config, torch.rand(d) + 0.5, weights, torch.randn(config.vocab_size, r), head)


def random_blocks(config, rows=3, seed=1):
    torch.manual_seed(seed)
    B, d, r = config.block_size, config.hidden_size, config.transfer_rank
    return torch.randn(rows, B, d), (torch.randn(rows, B, d), torch.randn(rows, B, r), torch.randn(rows, r))


@pytest.mark.parametrize("overrides", [{}, {"output_multiplier": 0.5, "final_logit_softcapping": 20.0}])
def test_sharded_tail_equals_the_whole(overrides):
    config = tiny_config(**overrides)
    weight = torch.randn(97, 32)
    hidden, left_behind = random_blocks(config)
    temperature, uniforms = torch.tensor([0.0, 1.0, 0.7]), torch.rand(3, 5)
    whole = random_tail(config, HeadShard(weight, 0, 97))(hidden, left_behind, temperature, uniforms)
    group = ThreadGroup(2)
    heads = shards(weight, (0, 64, 97), group)
    # one after the other: each thread seeds the process's generator
    tails = [random_tail(config, head) for head in heads]
    for got in group.run(lambda rank: tails[rank](hidden, left_behind, temperature, uniforms)):
        assert torch.equal(got[0], whole[0]) and torch.equal(got[1], whole[1])
        torch.testing.assert_close(got[2], whole[2])


def test_triton_tail_equals_the_reference():
    config = tiny_config(num_candidates=4)
    tail = random_tail(config, HeadShard(torch.randn(97, 32), 0, 97))
    hidden, left_behind = random_blocks(config, rows=2)
    arguments = (hidden, left_behind, torch.tensor([0.0, 0.9]), torch.rand(2, 5))
    with use_implementation("reference"):
        expected = tail(*arguments)
    pytest.importorskip("triton")
    try:
        with use_implementation("triton"):
            got = tail(*arguments)
    except ValueError as error:
        pytest.skip(str(error))  # neither a GPU nor the interpreter
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    torch.testing.assert_close(got[2], expected[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"injection_gate": "rank"},
        {"refinement": False},
        {"output_multiplier": 0.5},
        {"refinement_guidance": 0.5},
    ],
)
def test_tail_equals_the_model(overrides):
    """The tail on what the Hugging Face model leaves behind, against the model's own `propose`."""
    tiny_models = pytest.importorskip("tiny_models", exc_type=ImportError)
    target = tiny_models.tiny_target()
    drafter = tiny_models.tiny_drafter(target, **overrides)
    config = drafter.config
    torch.manual_seed(2)
    with torch.no_grad():
        anchors = torch.randint(0, 96, (3,))
        slots = torch.full((3, 6), config.mask_token_id)
        slots[:, 0] = anchors
        width = len(config.target_layer_ids) * config.hidden_size
        outputs = drafter(
            noise_embeds=drafter.binding.embed(slots, 1.0),
            context_hidden_states=torch.randn(3, 7, width),
            anchor_ids=anchors[:, None],
        )
        temperature, uniforms = torch.tensor([0.0, 1.0, 0.6]), torch.rand(3, 5)
        expected = drafter.propose(outputs, anchors, temperature, uniforms)
        write_weights = drafter.injections["1"].write_weights if config.refinement else None
        table = drafter.ensure_transfer_table()
        head = HeadShard(drafter.binding.head_weight, 0, config.vocab_size)
        tail = DecodingTail(config, drafter.norm.weight, write_weights, table, head)
        left_behind = (outputs.pre_write_hidden_state, outputs.features, table[anchors])
        tokens, candidates, probs = tail(outputs.last_hidden_state, left_behind, temperature, uniforms)
    assert torch.equal(tokens, expected.tokens) and torch.equal(candidates, expected.candidates)
    torch.testing.assert_close(probs, expected.probs)


def test_buffers_of_the_graph_keep_their_address():
    config = tiny_config()
    tail = random_tail(config, HeadShard(torch.randn(97, 32), 0, 97))
    hidden, left_behind = random_blocks(config, rows=2)
    model = SimpleNamespace(take_left_behind=lambda: left_behind)
    graph = GraphTail(tail, model, block_size=6, max_rows=4, device="cpu")
    addresses = [t.data_ptr() for t in (graph.out, graph.candidates, graph.probs, graph.temperature, graph.uniforms)]
    graph.stage(
        torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0])
    )  # one row more than was captured: runs eagerly, only must not fail
    graph(hidden.view(12, -1))
    greedy = graph.out[:10].view(2, 5)[0].clone()
    assert (
        graph.proposal(2)[1][0].max(-1).values.eq(1).all() and not graph.proposal(2)[1][1].max(-1).values.eq(1).all()
    )
    drawn = graph.uniforms.clone()
    assert 0 < drawn.min() and drawn.max() < 1
    graph.stage(None)
    graph(hidden.view(12, -1))
    assert torch.equal(graph.out[:5], greedy)
    assert torch.equal(graph.uniforms, drawn)  # greedy batches draw none
    assert graph.proposal(2)[1].max(-1).values.eq(1).all()
    assert addresses == [
        t.data_ptr() for t in (graph.out, graph.candidates, graph.probs, graph.temperature, graph.uniforms)
    ]


# ---- reading the head -----------------------------------------------------------------------------------------------------


def shard_indices(start, size, added=0):
    return SimpleNamespace(org_vocab_start_index=start, num_org_elements=size, num_added_elements=added)


def test_plain_head_is_a_view():
    lm_head = SimpleNamespace(weight=torch.randn(128, 16), shard_indices=shard_indices(0, 97))
    head = head_shard(lm_head, 97, 16, torch.float32, None)
    assert head.weight.data_ptr() == lm_head.weight.data_ptr() and head.weight.shape == (97, 16) and head.group is None


def test_second_rank_knows_its_offset():
    lm_head = SimpleNamespace(weight=torch.randn(64, 16), shard_indices=shard_indices(64, 33))
    head = head_shard(lm_head, 97, 16, torch.float32, ThreadGroup(2))
    assert (head.start, len(head.weight)) == (64, 33) and head.group is not None


class QuantisedMethod:
    """The interface of SGLang's quantised layers, with int8 rows."""

    def apply(self, layer, x, bias=None):
        return (x.float() @ (layer.weight.float() * layer.scale).T).to(x.dtype)


def test_quantised_head_is_multiplied_out():
    W = torch.randn(97, 300)
    scale = W.abs().amax(1, keepdim=True) / 127
    lm_head = nn.Module()
    lm_head.weight, lm_head.scale = (W / scale).round().to(torch.int8), scale
    lm_head.quant_method = QuantisedMethod()
    head = head_shard(lm_head, 97, 300, torch.float32, None)
    torch.testing.assert_close(head.weight, lm_head.weight.float() * scale)
    lm_head.quant_method = None
    with pytest.raises(ValueError, match="cannot be multiplied out"):
        head_shard(lm_head, 97, 300, torch.float32, None)


@pytest.mark.parametrize(
    ("lm_head", "ranks", "message"),
    [
        (SimpleNamespace(), 1, "has no `weight`"),
        (SimpleNamespace(weight=torch.ones(97, 16), bias=torch.ones(97)), 1, "has a bias"),
        (SimpleNamespace(weight=torch.ones(97, 16)), 2, "does not say which rows"),
        (SimpleNamespace(weight=torch.ones(99, 16), shard_indices=shard_indices(0, 97, 2)), 1, "2 added rows"),
        (SimpleNamespace(weight=torch.ones(90, 16)), 1, "must have 97 rows of width 16"),
    ],
    ids=["none", "bias", "unknown-shard", "added", "short"],
)
def test_heads_that_are_refused(lm_head, ranks, message):
    with pytest.raises(ValueError, match=message):
        head_shard(lm_head, 97, 16, torch.float32, ThreadGroup(ranks))


# ---- what is refused ------------------------------------------------------------------------------------------------------


def test_block_sizes():
    check_draft(tiny_config(), 6)
    check_draft(tiny_config(), 2)
    for size in (7, 1):
        with pytest.raises(ValueError, match=f"between 2 and the drafter's trained block size 6, got {size}"):
            check_draft(tiny_config(), size)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"mask_token_id": None}, "mask_token_id is not set"),
        ({"input_embedding_scale": 4.0}, "scale their input embeddings"),
        ({"hidden_act": "gelu"}, "silu"),
        ({"soft_token_features": True}, "soft_token_features=true are not supported"),
        (
            {"is_causal": False, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8},
            "is_causal=false",
        ),
    ],
    ids=["mask", "scale", "activation", "soft-tokens", "sliding"],
)
def test_drafters_that_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        check_draft(tiny_config(**overrides), 6)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_dp_attention", True),
        ("enable_dp_lm_head", True),
        ("speculative_use_block_verification", True),
        ("device", "xpu"),
        ("pp_size", 2),
        ("disaggregation_mode", "decode"),
        ("speculative_accept_threshold_single", 0.5),
        ("speculative_accept_threshold_acc", 0.5),
    ],
)
def test_options_that_are_refused(name, value):
    check_server(SimpleNamespace())
    with pytest.raises(ValueError) as error:
        check_server(SimpleNamespace(**{name: value}))
    assert "\n" not in str(error.value)


def test_target_must_fit():
    sizes = {"hidden_size": 32, "num_hidden_layers": 6}
    check_target(tiny_config(), SimpleNamespace(vocab_size=97, hf_text_config=SimpleNamespace(**sizes)))
    for name in sizes:
        wrong = SimpleNamespace(vocab_size=97, hf_text_config=SimpleNamespace(**(sizes | {name: 7})))
        with pytest.raises(ValueError, match=f"{name}={sizes[name]}, the served one has {name}=7"):
            check_target(tiny_config(), wrong)
