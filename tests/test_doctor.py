"""The doctor: a healthy pair passes, and every fault it knows is provoked and named."""

import json

import pytest
import torch
from tiny_checkpoints import CHAT_TEMPLATE, THINKING_TEMPLATE, save_pair, tiny_tokenizer
from tiny_models import tiny_target
from transformers import Qwen3Config

from dspine.integrations import doctor, doctor_routes
from dspine.integrations.evaluation.prompts import Prompt
from dspine.integrations.evaluation.serving import Served


PROMPTS = [Prompt("test", i, [3, 10 + i, 20 + i, 4]) for i in range(3)]


@pytest.fixture
def healthy(tmp_path):
    target, drafter, tokenizer = save_pair(tmp_path)
    return target, tokenizer, tmp_path / "drafter"


def examine(target, tokenizer, folder, **options):
    options = {"prompts": PROMPTS, "max_new_tokens": 16} | options
    return doctor.examine(target, tokenizer, str(folder), **options)


def edit(folder, **fields):
    """Changes fields of the drafter's stored configuration."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def messages(found, check):
    return " ".join(finding.message for finding in found.findings if finding.check == check)


def test_healthy_pair(healthy):
    found = examine(*healthy)
    assert not found.failed, found.findings
    assert found.rounds["walk"] == found.rounds["decoding"]
    assert found.accepted_lengths["walk"] == found.accepted_lengths["decoding"] >= 1
    checked = {
        "layers",
        "hidden size",
        "vocabulary",
        "taps",
        "mask id",
        "chat template",
        "thinking",
        "RoPE",
        "weights",
    }
    assert {name for name, level in found.levels().items() if level == "ok"} >= checked | {
        "dtype",
        "transfer table",
        "text",
        "routes",
    }


@pytest.mark.parametrize(
    ("check", "overrides"),
    [
        ("layers", {"num_hidden_layers": 7}),
        ("hidden size", {"hidden_size": 40}),
        ("vocabulary", {"vocab_size": 101}),
    ],
)
def test_another_target(healthy, check, overrides):
    _, tokenizer, folder = healthy
    found = examine(tiny_target(**overrides), tokenizer, folder)
    assert found.levels()[check] == "failure" and found.levels()["routes"] == "note"
    (value,) = overrides.values()
    assert str(value) in messages(found, check)


def test_another_family(healthy):
    _, tokenizer, folder = healthy
    found = examine(tiny_target(Qwen3Config), tokenizer, folder)
    assert found.levels()["target"] == "warning" and "'qwen3'" in messages(found, "target")


@pytest.mark.parametrize(("mask", "level"), [(0, "warning"), (40, "warning"), (96, "ok"), (None, "failure")])
def test_mask_id(healthy, mask, level):
    target, tokenizer, folder = healthy
    edit(folder, mask_token_id=mask)
    assert examine(target, tokenizer, folder).levels()["mask id"] == level


def test_template_of_another_training(healthy):
    target, _, folder = healthy
    found = examine(target, tiny_tokenizer(CHAT_TEMPLATE + " "), folder)
    assert found.levels()["chat template"] == "failure" and found.levels()["routes"] == "ok"
    assert examine(target, tiny_tokenizer(None), folder).levels()["chat template"] == "warning"


def test_thinking_of_another_training(tmp_path):
    target, _, tokenizer = save_pair(tmp_path, THINKING_TEMPLATE, target_thinking=True)
    assert examine(target, tokenizer, tmp_path / "drafter").levels()["thinking"] == "failure"
    assert examine(target, tokenizer, tmp_path / "drafter", thinking=True).levels()["thinking"] == "ok"
    edit(tmp_path / "drafter", target_thinking=None)
    assert examine(target, tokenizer, tmp_path / "drafter").levels()["thinking"] == "warning"


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    ],
)
def test_rope_of_another_target(healthy, rope):
    target, tokenizer, folder = healthy
    edit(folder, rope_parameters=rope)
    found = examine(target, tokenizer, folder)
    assert found.levels()["RoPE"] == "failure" and "positions look different" in messages(found, "RoPE")


def test_scales_of_another_target(healthy):
    target, tokenizer, folder = healthy
    edit(folder, final_logit_softcapping=30.0)
    assert "final_logit_softcapping is 30.0" in messages(examine(target, tokenizer, folder), "scales")


@pytest.mark.parametrize("fault", ["missing", "unexpected", "misshaped", "cut"])
def test_incomplete_weights(healthy, fault):
    from safetensors.torch import load_file, save_file

    target, tokenizer, folder = healthy
    path = folder / "model.safetensors"
    state = load_file(path)
    if fault == "missing":
        state.pop("layers.0.mlp.up_proj.weight")
    elif fault == "unexpected":
        state["layers.0.extra.weight"] = torch.zeros(2)
    elif fault == "misshaped":
        state["fc.weight"] = torch.zeros(3, 3)
    if fault == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        save_file(state, path, metadata={"format": "pt"})
    found = examine(target, tokenizer, folder)
    assert found.levels()["weights"] == "failure"
    assert {"cut": "damaged or cut off"}.get(fault, f"{fault}:") in messages(found, "weights")


def test_damaged_and_untrained_weights(tmp_path):
    target, drafter, tokenizer = save_pair(tmp_path)
    with torch.no_grad():
        drafter.injections["0"].write.weight.zero_()
    drafter.save_pretrained(tmp_path / "drafter")
    found = examine(target, tokenizer, tmp_path / "drafter")
    assert found.levels()["weights"] == "warning" and "injections.0.write.weight" in messages(found, "weights")
    with torch.no_grad():
        drafter.norm.weight[0] = float("nan")
    drafter.save_pretrained(tmp_path / "drafter")
    found = examine(target, tokenizer, tmp_path / "drafter")
    assert found.levels()["weights"] == "failure" and "norm.weight" in messages(found, "weights")


def test_stale_transfer_table(tmp_path):
    target, drafter, tokenizer = save_pair(tmp_path, store_transfer_table=True)
    assert examine(target, tokenizer, tmp_path / "drafter").levels()["transfer table"] == "ok"
    other = tiny_target(seed=9, initializer_range=0.2)
    found = examine(other, tokenizer, tmp_path / "drafter")
    assert found.levels()["transfer table"] == "failure" and "stale or of another model" in messages(
        found, "transfer table"
    )


def test_collapsed_transfer_space(tmp_path):
    target, drafter, tokenizer = save_pair(tmp_path)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.01).add_(torch.ones(32))
        drafter.transfer.weight.copy_(torch.ones(8, 32))
    drafter.save_pretrained(tmp_path / "drafter")
    assert examine(target, tokenizer, tmp_path / "drafter").levels()["transfer table"] == "warning"


def test_unreadable_head(healthy, quantise_head):
    target, tokenizer, folder = healthy
    quantise_head(target)
    found = examine(target, tokenizer, folder)
    assert found.levels()["transfer table"] == "failure" and "store_transfer_table=True" in messages(
        found, "transfer table"
    )


def test_precision_of_the_checkpoint(tmp_path):
    target, drafter, tokenizer = save_pair(tmp_path)
    drafter.half().save_pretrained(tmp_path / "drafter")
    found = examine(target.bfloat16(), tokenizer, tmp_path / "drafter")
    assert found.levels()["dtype"] == "warning" and "torch.float16" in messages(found, "dtype")


def test_kernel_fault_is_found_and_named(healthy, monkeypatch):
    """A faster operation with wrong results: decoding leaves the walk, which always uses the references."""
    from dspine.modeling_dspine import registry_dspine as registry

    target, tokenizer, folder = healthy

    def wrong(scores, *others, **named):
        return registry.REFERENCES["walk_transition_cache"](-scores, *others, **named)

    table = registry._implementations["walk_transition_cache"]
    monkeypatch.setitem(table, "broken", registry.Implementation(wrong, lambda *args, **kwargs: None))
    # a drafter whose drafts are accepted, or a wrong choice of tokens would not show
    scripted(monkeypatch, target)
    with registry.use_implementation("reference", walk_transition_cache="broken"):
        found = examine(target, tokenizer, folder)
    assert found.levels()["routes"] == "failure"
    assert "With reference operations they agree" in messages(found, "routes") and "broken" in messages(
        found, "routes"
    )


def scripted(monkeypatch, target):
    """Lets drafters under test see the target's own next logits, so that they draft well: head logits of the true text."""
    from dspine.modeling_dspine import DSpineModel

    original = DSpineModel.compute_logits

    def helped(self, hidden_states):
        logits = original(self, hidden_states)
        return logits - 1e3 * (torch.arange(logits.shape[-1]) % 97 != helped.token)

    answer = target.generate(torch.tensor([PROMPTS[0].input_ids]), max_new_tokens=2, do_sample=False)
    helped.token = int(answer[0, -1])
    monkeypatch.setattr(DSpineModel, "compute_logits", helped)


def test_decoding_that_sees_other_states_than_training(healthy, monkeypatch):
    """Taps of another layer in decoding only: the walk is right, and neither kernels nor attention are to blame."""
    target, tokenizer, folder = healthy
    prompt = PROMPTS[0]
    monkeypatch.setattr(doctor_routes, "walked_rounds", lambda *args: [9, 9])
    found = examine(target, tokenizer, folder, prompts=[prompt])
    assert found.levels()["routes"] == "failure"
    assert "part in round 1 of prompt 1 (9 tokens in the walk" in messages(found, "routes")
    assert "other states in decoding than in training" in messages(found, "routes")


def test_text_that_is_not_the_targets(healthy, monkeypatch):
    target, tokenizer, folder = healthy
    honest = doctor_routes.decode_with_drafter

    def wrong(*args, **kwargs):
        answers = honest(*args, **kwargs)
        for answer in answers:
            answer.output_ids[3] = (answer.output_ids[3] + 1) % 97
        return answers

    monkeypatch.setattr(doctor_routes, "decode_with_drafter", wrong)
    found = examine(target, tokenizer, folder)
    assert found.levels()["text"] == "failure" and "at token 4" in messages(found, "text")


class StubServer:
    """A server that answers with the target's text and the rounds it is told to report."""

    def __init__(self, target, rounds, width=6):
        self.target, self.rounds, self.width = target, rounds, width

    def info(self):
        return {"speculative_num_draft_tokens": self.width}

    def generate(self, input_ids, max_new_tokens):
        from dspine.integrations.evaluation.decoding import decode_alone

        ids = decode_alone(self.target, [Prompt("", 0, input_ids)], max_new_tokens)[0].output_ids
        return Served(len(ids), ids, self.rounds(len(ids)), None, 1.0)


def test_server_that_agrees(healthy):
    target, tokenizer, folder = healthy
    tau = examine(*healthy).accepted_lengths["decoding"]
    found = examine(*healthy, server=StubServer(target, lambda count: round((count - 1) / tau)))
    assert found.levels()["server"] == "ok" and found.levels()["server text"] == "ok", found.findings


@pytest.mark.parametrize(
    ("rounds", "width", "message"),
    [
        (lambda count: None, 6, "started without a drafter"),
        (lambda count: 5, 6, "it runs another drafter"),
        (lambda count: 15, 8, "the server drafts blocks of 8, the drafter was trained with 6"),
    ],
)
def test_server_that_does_not_agree(healthy, rounds, width, message):
    target = healthy[0]
    found = examine(*healthy, server=StubServer(target, rounds, width))
    assert found.levels()["server"] == "failure" and message in messages(found, "server")


def test_server_that_accepts_nothing(healthy):
    found = doctor.Examination(accepted_lengths={"decoding": 3.0})
    from dspine.modeling_dspine import DSpineConfig

    config = DSpineConfig.from_pretrained(healthy[2])
    server = StubServer(healthy[0], lambda count: count - 1)
    doctor_routes.compare_server(found, server, config, healthy[0], PROMPTS, [[1]] * 3, 8)
    assert "accepts almost no drafts" in messages(found, "server")


def test_dflash_checkpoint(tmp_path):
    target, drafter, tokenizer = save_pair(tmp_path, injection=False, refinement=False)
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    for key in ("auto_map", "model_type"):
        config.pop(key)
    nested = {key: config.pop(key) for key in ("mask_token_id", "target_layer_ids")}
    config |= {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dflash_config": nested}
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(config))
    found = examine(target, tokenizer, tmp_path / "drafter")
    assert not found.failed and found.levels()["configuration"] == "note" and found.levels()["routes"] == "ok"


# ---- the command ----------------------------------------------------------------------------------------------------------------


def test_command(tmp_path, capsys):
    save_pair(tmp_path)
    texts = tmp_path / "prompts.txt"
    texts.write_text("w1 w2\nw5\n\n")
    arguments = [str(tmp_path / "target"), str(tmp_path / "drafter"), "--prompts", str(texts), "--device", "cpu"]
    assert doctor.main([*arguments, "--max-new-tokens", "8", "--json", str(tmp_path / "out.json")]) == 0
    assert "accepted length: walk" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "out.json").read_text())["rounds"]["walk"]) == 2
    edit(tmp_path / "drafter", rope_parameters={"rope_type": "default", "rope_theta": 5.0})
    assert doctor.main([*arguments, "--max-new-tokens", "8"]) == 1
    assert "FAILURE  RoPE: rope_theta is 5.0" in capsys.readouterr().out
    assert doctor.main([str(tmp_path / "nowhere"), str(tmp_path / "drafter")]) == 2
    assert doctor.main([str(tmp_path / "target"), str(tmp_path / "nowhere"), "--device", "cpu"]) == 1


def test_server_out_of_reach_is_a_finding(healthy):
    from dspine.integrations.evaluation.serving import Server

    found = examine(*healthy, server=Server("http://127.0.0.1:9"))
    assert found.levels()["server"] == "failure" and "cannot be reached" in messages(found, "server")
