"""Peers: the same DFlash weights give the same rounds in `dflash` and here, and the adapters of other drafters."""

import importlib.util
import statistics
import sys

import pytest
import torch
from conftest import ROOT
from tiny_models import tiny_drafter, tiny_target

from dspine.integrations.evaluation.acceptance import summarise
from dspine.integrations.evaluation.prompts import Prompt
from dspine.modeling_dspine import DSpineModel


dflash = pytest.importorskip("dflash.model", reason="needs the dflash package (extra `dev`)")


def load_peer(name: str):
    folder = str(ROOT / "examples" / "peers")
    if folder not in sys.path:
        sys.path.append(folder)  # the scripts of the folder import each other
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def peer():
    return load_peer("dflash_equality")


@pytest.fixture(scope="module")
def trained(peer, tmp_path_factory):
    """A target, a DFlash drafter that learned some of its answers, and the prompts; as models of both packages."""
    from test_training_trainer import answers, arguments

    from dspine.integrations.training import DSpineTrainer, PackedDataset, from_records

    folder = tmp_path_factory.mktemp("dflash")
    target = tiny_target(initializer_range=0.2)
    records = answers(target, count=8)
    drafter = tiny_drafter(target, spread=0.1, injection=False, refinement=False, block_size=8).float()
    trainer = DSpineTrainer(
        drafter,
        arguments(folder, max_steps=90, learning_rate=1e-2),
        target=target,
        train_dataset=PackedDataset(from_records(records), 256, 40),
    )
    trainer.train()
    peer.export_dflash(drafter.eval(), folder / "export")
    ours = DSpineModel.from_dflash(
        folder / "export", config_overrides={"injection": False, "refinement": False}
    ).eval()
    target.set_attn_implementation("sdpa")
    ours.bind_target(target)
    theirs = dflash.DFlashDraftModel.from_pretrained(folder / "export", attn_implementation="sdpa").eval()
    asked = [Prompt("set", i, r["input_ids"][: r["prompt_length"]].tolist()) for i, r in enumerate(records)]
    return target, ours, theirs, asked


def test_every_round_equals_dflash(peer, trained):
    target, ours, theirs, asked = trained
    result = peer.compare(target, ours, theirs, asked, 24)
    assert result["equal_texts"] == result["equal_rounds"] == result["requests"] == len(asked)
    lengths = {length for row in result["ours"]["rounds"] for length in row}
    assert len(lengths) > 3, "the drafter must be accepted now and then, or nothing is compared"
    assert result["ours"] == result["dflash"]


def test_at_the_limit_only_rounds_of_less_than_a_block_may_differ(peer, trained):
    target, ours, theirs, asked = trained
    for limit in (9, 17, 24):
        result = peer.compare(target, ours, theirs, asked, limit, room=False)
        assert result["equal_texts"] == result["equal_before_limit"] == len(asked)


def test_metric_is_what_dflash_prints(peer, trained):
    target, ours, theirs, asked = trained
    rounds = [peer.decode_dflash(target, theirs, prompt, 24)[1] for prompt in asked]
    # `dflash benchmark` prints the mean of requests' means
    printed = statistics.mean(statistics.mean(row) for row in rounds)
    assert summarise(rounds, 8)["accepted_length_per_request"] == pytest.approx(printed, abs=1e-12)


def test_end_token_ends_both_in_the_same_round(peer, trained):
    target, ours, theirs, asked = trained
    (answer,) = peer.decode_with_drafter(target, ours, asked[:1], 24)
    target.generation_config.eos_token_id = answer.output_ids[12]
    try:
        result = peer.compare(target, ours, theirs, asked[:1], 24)
        assert result["equal_texts"] == result["equal_rounds"] == 1
        assert sum(result["ours"]["rounds"][0]) == answer.output_ids.index(answer.output_ids[12])
    finally:
        target.generation_config.eos_token_id = None


def test_export_refuses_what_dflash_cannot_say(peer, tmp_path):
    with pytest.raises(ValueError, match="injection=False and refinement=False"):
        peer.export_dflash(tiny_drafter(tiny_target()), tmp_path)


def test_rounds_are_cut_and_counted(peer):
    assert peer.cut_rounds([3, 2, 4], 7) == [3, 2, 2] and peer.cut_rounds([3, 2], 3) == [3]
    # limit 20, blocks of 8: a round that begins after 13 tokens or more is short of room
    assert peer.rounds_before_limit([8, 4, 1, 3], 20, 8) == 3


def test_package_never_imports_peers():
    for folder in ("modeling_dspine", "configuration_dspine", "kernels", "integrations"):
        for path in (ROOT / folder).rglob("*.py"):
            for line in path.read_text().splitlines():
                assert not line.lstrip().startswith(
                    ("import speculators", "from speculators", "import dflash", "from dflash")
                ), path


# ---- drafters of `speculators` and `specforge` ---------------------------------------------------------------------------------


NEEDS = {"dflash": "speculators", "dflash2": "speculators", "dspark": "speculators", "domino": "specforge"}


@pytest.fixture(scope="module", params=list(NEEDS))
def their_drafter(request, tmp_path_factory):
    """A peer trained for some steps on a tiny target's answers, by its own code, and the same weights as a drafter here."""
    kind, package = request.param, NEEDS[request.param]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}, which is no dependency")
    from argparse import Namespace

    from test_training_trainer import answers

    from dspine.integrations.training import PackedDataset, TargetRunner, from_records
    from dspine.modeling_dspine import DSpineConfig

    drafters, training, peers = (load_peer(n) for n in ("peer_drafters", "peer_training", f"{package}_peers"))
    target = tiny_target(initializer_range=0.2)
    records = answers(target, count=8)
    config = DSpineConfig.from_target(
        target.config, mask_token_id=96, block_size=6, num_hidden_layers=2, injection=False, refinement=False
    )
    folder = tmp_path_factory.mktemp(kind)
    options = {
        "kind": kind,
        "rank": 8,
        "gru_hidden": 12,
        "uncorrected_slots": 1,
        "loss_fn": "kl_div",
        "learning_rate": 1e-2,
        "max_steps": 60,
        "decay_gamma": 4.0,
        "max_anchors": 40,
        "seed": 0,
        "bf16": False,
        "compile": False,
        "device": "cpu",
        "logging_steps": 1,
        "save_steps": 50,
        "time_limit": None,
        "resume": False,
        "out": str(folder),
    }
    options = Namespace(**options)
    torch.manual_seed(0)
    peer = peers.make_peer(options, config, target)
    layers = [*config.target_layer_ids, *([config.num_target_layers - 1] if peer.needs_last_layer else [])]
    runner = TargetRunner(target, layers)
    data = PackedDataset(from_records(records), 256, 40)

    def save():
        drafters.save_peer(folder, config, peer.about, peer.state(), torch.float32)

    log = training.train(peer, runner, data, options, save)
    drafter = drafters.load_peer(folder, torch.float32)
    drafter.bind_target(target)
    return Namespace(**locals())


def test_their_loss_falls(their_drafter):
    log = their_drafter.log
    assert log[-1]["loss"] < 0.6 * log[0]["loss"] and log[-1]["accepted_length_base"] > 1.2


def test_training_resumes_and_keeps_its_time(their_drafter):
    """A checkpoint continues with the next step; a time limit that is over ends after one step, with the learning rate at its end."""
    from argparse import Namespace

    t = their_drafter
    options = Namespace(**vars(t.options) | {"max_steps": 90, "resume": True, "time_limit": 1e-6})
    state = {name: value.clone() for name, value in t.peer.state().items()}
    log = t.training.train(t.peer, t.runner, t.data, options)
    assert [entry["step"] for entry in log] == [*range(1, 61), 61]
    assert log[-1]["learning_rate"] < 1e-6
    # at a learning rate of (almost) 0 nothing has moved
    assert all(torch.allclose(value, state[name], atol=1e-6) for name, value in t.peer.state().items())


def test_backbone_is_the_one_they_trained(their_drafter, monkeypatch):
    """Hidden states of the decoding model on the blocks of a training row equal theirs."""
    from dspine.integrations.training.masks import PACKED_ATTENTION, slot_masks
    from dspine.integrations.training.objective import draft_packed

    t = their_drafter
    row = t.data[(0, 0)]
    anchors = torch.nonzero(row["loss_mask"])[:, 0][[0, 3, 9, 25]]
    row["anchors"], row["anchor_mask"] = anchors, torch.ones(4, dtype=torch.bool)
    states, taps = t.runner(row), len(t.config.target_layer_ids)
    context = states[..., : taps * t.config.hidden_size].float()
    with torch.no_grad():
        if t.package == "speculators":
            from speculators.models.dflash import core

            monkeypatch.setattr(core, "select_anchors", lambda *args: (anchors, row["anchor_mask"]))
            theirs = t.peer.module._backbone_forward(**t.peers.as_batch(row, states, taps), max_anchors=4)[0]
        else:
            t.peer.module.row = row
            theirs = t.peer.module._forward_draft_blocks(row["input_ids"][None], context, None)[2]
        before = t.drafter.config._attn_implementation
        t.drafter.set_attn_implementation(PACKED_ATTENTION)
        masks = slot_masks(t.drafter.config, anchors, row["document_starts"])
        tokens = row["input_ids"][anchors]
        ours = draft_packed(t.drafter, context, row["position_ids"], anchors, tokens, masks).last_hidden_state
        t.drafter.set_attn_implementation(before)
    theirs = theirs.view(4, 6, -1)
    assert torch.allclose(ours, theirs, atol=1e-5), float((ours - theirs).abs().max())


def test_head_scores_as_in_training(their_drafter):
    """Slot by slot, given the data's own tokens to the left, the decoding head gives the scores that their loss saw."""
    t = their_drafter
    if t.kind == "dflash":
        pytest.skip("DFlash has no head")
    torch.manual_seed(1)
    hidden = torch.randn(3, 6, t.config.hidden_size)
    tokens = torch.randint(0, 90, (3, 6))
    module, slots = t.peer.module.eval(), range(1, 6)
    with torch.no_grad():
        logits = t.drafter.compute_logits(hidden)
        state, ours = None, []
        for slot in slots:
            here = slice(slot, slot + 1)
            ids, scores, state = t.drafter.score(
                slot - 1, hidden[:, here], logits[:, here], tokens[:, slot - 1], state
            )
            ours.append((ids, scores))
        before = torch.cat([tokens[:, :1], tokens[:, :-1]], dim=1)
        if t.kind == "dflash2":
            ids = logits.topk(t.config.num_candidates, dim=-1).indices
            theirs = module.candidate_selector.score_candidates(logits, hidden, before, ids)
        elif t.kind == "dspark":
            theirs = logits + module.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
        else:
            theirs = module._apply_domino_head(logits[None], hidden[None], tokens[None], tokens[None])[0]
    for slot, (_, scores) in zip(slots, ours):
        assert torch.allclose(scores[:, 0], theirs[:, slot], atol=1e-5), slot
    module.train()


def test_their_drafts_are_verified_like_ours(their_drafter):
    from dspine.integrations.evaluation.decoding import decode_alone, decode_with_drafter

    t = their_drafter
    t.target.set_attn_implementation("sdpa")
    asked = [Prompt("set", i, r["input_ids"][: r["prompt_length"]].tolist()) for i, r in enumerate(t.records[:4])]
    alone = [decode_alone(t.target, [prompt], 24)[0] for prompt in asked]
    drafted = [decode_with_drafter(t.target, t.drafter, [prompt], 24)[0] for prompt in asked]
    assert [a.output_ids for a in alone] == [d.output_ids for d in drafted]
    assert max(length for d in drafted for length in d.accepted_lengths) > 2, "the head must be accepted now and then"
    sampled = decode_with_drafter(t.target, t.drafter, asked, 24, temperature=1.0, block_size=4)
    assert all(len(d.output_ids) == 24 and max(d.accepted_lengths) <= 4 for d in sampled)


def test_fused_losses_run_outside_of_graphs(monkeypatch):
    pytest.importorskip("triton", reason="their fused losses are Triton kernels")
    speculators_peers = load_peer("speculators_peers")
    try:
        speculators_peers.load_speculators()
    except ImportError as error:
        pytest.skip(str(error))
    from speculators.losses import fused
    from speculators.losses.utils import kl_div_loss, tv_loss

    traced = []

    class Loss:  # in place of the kernels
        @staticmethod
        def apply(logits, targets, op):
            traced.append(torch.compiler.is_compiling())
            return (logits - targets).square().sum(-1)

    monkeypatch.setattr(fused, "_FusedLoss", Loss)

    @torch.compile(backend="eager")
    def both(logits, targets):
        return kl_div_loss(2 * logits, targets).sum() + tv_loss(2 * logits, targets).sum()

    logits, targets = torch.randn(1, 3, 5, requires_grad=True), torch.randn(1, 3, 5)
    speculators_peers.keep_losses_out_of_graphs()
    speculators_peers.keep_losses_out_of_graphs()
    both(logits, targets).backward()
    assert traced == [False, False]
    assert torch.allclose(logits.grad, 8 * (2 * logits.detach() - targets))


def test_unknown_peers_are_named(tmp_path):
    drafters = load_peer("peer_drafters")
    with pytest.raises(ValueError, match="kind of a peer must be one of .*'domino'.*, got 'other'"):
        drafters.make_drafter(None, {"kind": "other"})
