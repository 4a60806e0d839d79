"""Peers: the same DFlash weights give the same rounds in `dflash` and here, and the adapters of other drafters."""

import importlib.util
import statistics

import pytest
import torch
from conftest import ROOT
from tiny_models import tiny_drafter, tiny_target

from dspine.integrations.evaluation.acceptance import summarise
from dspine.integrations.evaluation.prompts import Prompt
from dspine.modeling_dspine import DSpineModel


dflash = pytest.importorskip("dflash.model", reason="needs the dflash package (extra `dev`)")


def load_peer(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / "peers" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


# ---- drafters of `speculators` --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["dflash2", "dspark"])
def their_drafter(request, tmp_path_factory):
    """A peer trained for some steps on a tiny target's answers, by its own code, and the same weights as a drafter here."""
    pytest.importorskip("speculators", reason="needs speculators 0.9.0, which is no dependency")
    from argparse import Namespace

    from test_training_trainer import answers

    from dspine.integrations.training import PackedDataset, TargetRunner, from_records
    from dspine.modeling_dspine import DSpineConfig

    peers = load_peer("speculators_peers")
    target = tiny_target(initializer_range=0.2)
    records = answers(target, count=8)
    config = DSpineConfig.from_target(
        target.config, mask_token_id=96, block_size=6, num_hidden_layers=2, injection=False, refinement=False
    )
    torch.manual_seed(0)
    model = peers.build(request.param, config, target, rank=8).train()
    runner = TargetRunner(target, [*config.target_layer_ids, config.num_target_layers - 1])
    data = PackedDataset(from_records(records), 256, 40)
    options = Namespace(
        learning_rate=1e-2, max_steps=60, loss_fn="kl_div", decay_gamma=4.0, max_anchors=40, seed=0, bf16=False
    )
    log = peers.train(model, runner, data, Namespace(**vars(options), logging_steps=1, time_limit=None))
    folder = tmp_path_factory.mktemp(request.param)
    peers.save_peer(folder, request.param, 8, config, model.state_dict(), torch.float32)
    drafter = peers.load_peer(folder, torch.float32)
    target.set_attn_implementation("sdpa")
    drafter.bind_target(target)
    return peers, model.eval(), drafter, target, data, records, log, runner


def test_their_loss_falls(their_drafter):
    log = their_drafter[6]
    assert log[-1]["loss"] < 0.6 * log[0]["loss"]


def test_backbone_is_the_one_they_trained(their_drafter, monkeypatch):
    """Hidden states of the decoding model on the blocks of a training row equal theirs."""
    from speculators.models.dflash import core

    from dspine.integrations.training.masks import PACKED_ATTENTION, slot_masks
    from dspine.integrations.training.objective import draft_packed

    peers, model, drafter, target, data, _, _, runner = their_drafter
    row = {name: torch.from_numpy(value) for name, value in data.row(0).items()}
    anchors = torch.nonzero(row["loss_mask"])[:, 0][[0, 3, 9, 25]]
    monkeypatch.setattr(core, "select_anchors", lambda *args: (anchors, torch.ones(4, dtype=torch.bool)))
    batch = peers.captured(runner, row, len(drafter.config.target_layer_ids))
    with torch.no_grad():
        theirs = model._backbone_forward(**batch, max_anchors=4)[0].view(4, 6, -1)
        before = drafter.config._attn_implementation
        drafter.set_attn_implementation(PACKED_ATTENTION)
        masks = slot_masks(drafter.config, anchors, row["document_starts"])
        ours = draft_packed(
            drafter, batch["hidden_states"], row["position_ids"], anchors, row["input_ids"][anchors], masks
        ).last_hidden_state
        drafter.set_attn_implementation(before)
    assert torch.allclose(ours, theirs, atol=1e-5), float((ours - theirs).abs().max())


def test_their_drafts_are_verified_like_ours(their_drafter):
    from dspine.integrations.evaluation.decoding import decode_alone, decode_with_drafter

    _, _, drafter, target, _, records, _, _ = their_drafter
    asked = [Prompt("set", i, r["input_ids"][: r["prompt_length"]].tolist()) for i, r in enumerate(records[:4])]
    alone = [decode_alone(target, [prompt], 24)[0] for prompt in asked]
    drafted = [decode_with_drafter(target, drafter, [prompt], 24)[0] for prompt in asked]
    assert [a.output_ids for a in alone] == [d.output_ids for d in drafted]
    assert max(length for d in drafted for length in d.accepted_lengths) > 2, "the head must be accepted now and then"
    sampled = decode_with_drafter(target, drafter, asked, 24, temperature=1.0, block_size=4)
    assert all(len(d.output_ids) == 24 and max(d.accepted_lengths) <= 4 for d in sampled)
