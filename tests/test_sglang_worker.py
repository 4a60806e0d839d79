"""The worker inside SGLang, as far as a machine without a GPU allows: its own methods, and whole rounds of DFLASH's decode step.

Skipped where SGLang is not installed; `.ci/sglang` makes environments with the oldest and the newest supported release.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F


pytest.importorskip("sglang", reason="SGLang is not installed; .ci/sglang runs these tests")

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402
from sglang_engine_testing import (  # noqa: E402
    CONTEXT,
    build,
    draft_pass,
    inputs,
    load_plugin,
    make_folders,
    one_process,
    server_arguments,
)
from sglang_testing import BLOCK, MASK_ID, tiny_config  # noqa: E402

from dspine.integrations.sglang import plugin  # noqa: E402
from dspine.integrations.sglang.head import HeadShard  # noqa: E402
from dspine.modeling_dspine.reference_dspine import transition_cache  # noqa: E402


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


def test_rounds_without_sampled_rows_prepare_nothing(worker, monkeypatch):
    """Beyond DFLASH's own step a greedy round runs no operation at all: each would be a launch that the GPU may wait for."""
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
    from torch.utils._python_dispatch import TorchDispatchMode

    from dspine.integrations.sglang.tail import GraphTail

    operations = []

    class Listen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            operations.append(str(function))
            return function(*args, **(kwargs or {}))

    mode = SimpleNamespace(is_extend=lambda: False, is_idle=lambda: False)
    worker._draft_sampler = GraphTail(worker.draft_model.tail, worker.draft_model, BLOCK, 4, "cpu")
    monkeypatch.setattr(DFlashWorkerV2, "forward_batch_generation", lambda self, batch: None)

    def of_a_round(sampling_info):
        operations.clear()
        with Listen():
            worker.forward_batch_generation(
                SimpleNamespace(forward_mode=mode, is_extend_in_batch=False, sampling_info=sampling_info)
            )
        return list(operations)

    greedy = sampling(3, is_all_greedy=True)
    assert of_a_round(None) == of_a_round(greedy) == []
    assert any("uniform" in name for name in of_a_round(sampling(3)))
    # the first greedy round after a sampled one sets the temperatures back
    assert [name for name in of_a_round(greedy) if "zero" in name] and of_a_round(greedy) == []


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
    """`run(sampling_info, rows, count, classes)`: texts that DFLASH's own decode step, with our overrides, generates on the CPU.

    With `captured` the tail runs as in a graph of that many rows: on padded batches, with buffers that stay from round to round. With
    `leaving` rows every round has another choice of the rows, in another order.
    """
    from sglang.srt.speculative import dflash_worker_v2 as engine
    from sglang.srt.speculative.draft_worker_common import build_block_pos_offsets, make_draft_input_v2
    from sglang.version import __version__ as version

    if version != "0.5.17":
        pytest.skip("the stand-ins around the decode step are made for SGLang 0.5.17")
    SpeculativeAlgorithm.DFLASH.create_worker(server_arguments(folders, folders.dspine))
    torch.manual_seed(0)
    # flat proposals over the whole vocabulary: a random drafter that a random target accepts now and then
    from dspine.integrations.sglang.tail import GraphTail

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
        graph, own = worker._draft_sampler, len(batch.input_ids)
        size = batch.batch_size if graph is None else len(graph.temperature)
        # a graph's rows beyond the batch hold what was there before: here the first row's
        at = torch.arange(size * BLOCK).where(torch.arange(size * BLOCK) < own, torch.arange(size * BLOCK) % BLOCK)
        for layer in model.layers:
            attention = layer.self_attn
            zeros = torch.zeros(size * CONTEXT, attention.kv_size)
            attention.attn.context = (zeros, zeros)
        # texts grow longer than the tiny drafter's table of angles
        positions, padded = batch.positions[at] % 64, SimpleNamespace(batch_size=size)
        output = model.forward(batch.input_ids[at], positions, padded, batch.input_embeds[at])
        if graph is not None:
            graph(output.hidden_states)
            return SimpleNamespace(logits_output=output, can_run_graph=True)
        return SimpleNamespace(logits_output=output, can_run_graph=False)

    def run(sampling_info, rows, count, classes=97, captured=None, leaving=0):
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
        worker._draft_sampler = None
        if captured:
            worker._draft_sampler = GraphTail(model.tail, model, BLOCK, captured, "cpu")
        tokens = torch.randint(0, 96, (rows,))
        texts, lengths = [[int(token)] for token in tokens], torch.full((rows,), 5)
        mode = SimpleNamespace(is_extend=lambda: False, is_idle=lambda: False)
        for _ in range(count):
            # the scheduler's part
            there = torch.randperm(rows)[leaving:] if leaving else torch.arange(rows)
            of_rows = {k: v[there] if isinstance(v, torch.Tensor) else v for k, v in vars(sampling_info).items()}
            own = type(sampling_info)(**of_rows)
            state = make_draft_input_v2(bonus_tokens=tokens[there], new_seq_lens=lengths[there])
            state.max_top_k = int(own.top_ks.max())
            batch = SimpleNamespace(
                forward_mode=mode, is_extend_in_batch=False, return_logprob=False, has_grammar=False, spec_info=state,
                sampling_info=own, seq_lens=lengths[there].as_subclass(CPULengths), seq_lens_cpu=lengths[there].int(),
                seq_lens_sum=int(lengths[there].sum()), req_pool_indices=there, reqs=[None] * len(there), out_cache_loc=None,
            )  # fmt: skip
            result = worker.forward_batch_generation(batch)
            new = result.next_token_ids.view(len(there), BLOCK)
            for row, kept, tokens_of in zip(there.tolist(), result.accept_lens.tolist(), new):
                texts[row] += tokens_of[:kept].tolist()
            tokens[there] = result.next_draft_input.bonus_tokens
            lengths[there] = result.new_seq_lens.as_subclass(torch.Tensor)
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


@pytest.mark.parametrize(
    ("captured", "leaving"), [(None, 0), (None, 40), (128, 40)], ids=["eager", "leaving", "graph"]
)
def test_sampled_rounds_follow_the_target_and_greedy_rows_stay_greedy(captured, leaving, rounds):
    """Rows at two temperatures and a greedy one, staying or leaving and coming back, on the tail's two ways."""
    rows, count = 96, 60 if leaving else 40
    temperatures = torch.tensor([1.0, 0.7])[torch.arange(rows) % 2, None]
    info = Penalties(**vars(sampling(rows, temperatures=temperatures)))
    texts, table = rounds(info, rows, count, classes=2, captured=captured, leaving=leaving)
    assert texts[0][1:] == table.argmax(-1)[torch.tensor(texts[0][:-1])].tolist()
    for parity, temperature in enumerate((1.0, 0.7)):
        of_rows = texts[2 if parity == 0 else 1 :: 2]
        pairs = torch.cat([torch.tensor([text[:-1], text[1:]]) for text in of_rows], 1)
        # some drafts were kept, or nothing would have been tested
        assert pairs.shape[1] > len(of_rows) * count * (rows - leaving) / rows * 1.15
        counts = torch.zeros(2, 97).index_put_((pairs[0] % 2, pairs[1]), torch.ones(pairs.shape[1]), accumulate=True)
        expected = counts.sum(1, keepdim=True) * torch.softmax(table[:2] / temperature, -1)
        cells = expected > 5
        statistic = ((counts - expected)[cells] ** 2 / expected[cells]).sum()
        freedom = int(cells.sum()) - 2
        assert abs(float(statistic) - freedom) / (2 * freedom) ** 0.5 < 5, temperature
