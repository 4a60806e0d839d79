"""Saved drafters: loadable without the package, strict about their tensors, with a card that tells how to use them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file, save_file
from tiny_models import MASK_ID, tiny_drafter, tiny_target
from transformers import AutoConfig, AutoModel, PreTrainedModel, Qwen3Config

from dspine.modeling_dspine import DSpineConfig, DSpineModel


IDS = torch.tensor([[5, 9, 33, 2, 71]])
OPTIONS = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}

# run in a process that cannot import the package: every source is loaded by the Auto classes, drafts, and is saved again
STRANGER = """
import json, sys

class NoDSpine:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "dspine":
            raise ModuleNotFoundError("the package is not installed here: " + name)

sys.meta_path.insert(0, NoDSpine())
job = json.loads(sys.stdin.read())

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

target = AutoModelForCausalLM.from_pretrained(job["target"], dtype=torch.float32)
report = []
for source, resave in job["sources"]:
    config = AutoConfig.from_pretrained(source, trust_remote_code=True)
    drafter = AutoModel.from_pretrained(source, trust_remote_code=True, dtype=torch.float32)
    output = drafter.spec_generate(target, torch.tensor(job["ids"]), **job["options"])
    if resave:
        drafter.save_pretrained(resave)
    report.append({
        "module": type(drafter).__module__,
        "config_type": config.model_type,
        "config_module": type(config).__module__,
        "tokens": output.sequences.tolist(),
        "accepted_lengths": output.statistics.accepted_lengths,
    })
assert not [name for name in sys.modules if name.split(".")[0] == "dspine"]
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def saved(target, tmp_path_factory):
    """A drafter and the folder it was saved to."""
    drafter = tiny_drafter(target, target_name_or_path="org/target")
    folder = tmp_path_factory.mktemp("saved") / "tiny-dspine"
    drafter.save_pretrained(folder)
    return drafter, folder


@pytest.fixture
def copy_of(saved, tmp_path):
    """A copy of the saved folder to damage, and its tensors."""
    folder = tmp_path / "drafter"
    shutil.copytree(saved[1], folder)
    return folder


def edit(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def refused(folder, **kwargs) -> str:
    with pytest.raises(ValueError) as info:
        DSpineModel.from_pretrained(folder, **kwargs)
    message = str(info.value)
    assert "\n" not in message and str(folder) in message
    return message


# ---- without the package --------------------------------------------------------------------------------------------------


def test_loads_and_drafts_where_the_package_is_absent(saved, target, tmp_path):
    drafter, folder = saved
    target.save_pretrained(tmp_path / "target")
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--org--tiny-dspine"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(folder, repository / "snapshots" / commit)

    resaved = tmp_path / "resaved"
    # a local folder, the same as a Hub repository (whose helper files are checked more strictly), and what these saved again
    sources = [[str(folder), str(resaved)], ["org/tiny-dspine", str(tmp_path / "from-hub")], [str(resaved), None]]
    job = {"target": str(tmp_path / "target"), "sources": sources, "ids": IDS.tolist(), "options": OPTIONS}
    environment = os.environ | {
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
    }
    command = [sys.executable, "-P", "-c", STRANGER]
    done = subprocess.run(
        command, input=json.dumps(job), capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]

    expected = drafter.spec_generate(target, IDS, **OPTIONS)
    reports = json.loads(done.stdout.splitlines()[-1])
    assert len(reports) == 3
    for report in reports:
        assert report["module"].startswith("transformers_modules.")
        assert report["config_type"] == "dspine" and report["config_module"].startswith("transformers_modules.")
        assert report["tokens"] == expected.sequences.tolist()
        assert report["accepted_lengths"] == expected.statistics.accepted_lengths
    assert commit in reports[1]["module"]
    for again in (resaved, tmp_path / "from-hub"):
        files = {path.name: path.read_text() for path in folder.glob("*.py")}
        assert files == {path.name: path.read_text() for path in again.glob("*.py")}
        assert_same_weights(DSpineModel.from_pretrained(again), drafter)


def assert_same_weights(one, other) -> None:
    tensors, expected = one.state_dict(), other.state_dict()
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name


def test_saved_folder_holds_code_weights_and_card(saved):
    files = {path.name for path in saved[1].iterdir()}
    assert {"config.json", "model.safetensors", "README.md", "configuration_dspine.py", "modeling_dspine.py"} <= files
    config = json.loads((saved[1] / "config.json").read_text())
    assert config["auto_map"] == {
        "AutoConfig": "configuration_dspine.DSpineConfig",
        "AutoModel": "modeling_dspine.DSpineModel",
    }
    assert config["architectures"] == ["DSpineModel"]
    # the real configuration file, not the shim that stands for it inside the package
    assert "class DSpineConfig" in (saved[1] / "configuration_dspine.py").read_text()


def test_owns_no_embeddings(saved):
    names = load_file(saved[1] / "model.safetensors")
    assert not [name for name in names if "embed" in name or "lm_head" in name or name == "transfer_table"]


@pytest.mark.parametrize("trust", [True, None])
def test_auto_classes_prefer_the_installed_package(saved, trust):
    assert type(AutoConfig.from_pretrained(saved[1], trust_remote_code=trust)) is DSpineConfig
    assert type(AutoModel.from_pretrained(saved[1], trust_remote_code=trust)) is DSpineModel


def test_save_then_load_gives_the_same_drafts(saved, target):
    drafter, folder = saved
    again = DSpineModel.from_pretrained(folder)
    assert_same_weights(again, drafter)
    expected, got = drafter.spec_generate(target, IDS, **OPTIONS), again.spec_generate(target, IDS, **OPTIONS)
    assert torch.equal(got.sequences, expected.sequences)
    assert got.statistics.accepted_lengths == expected.statistics.accepted_lengths


def test_sharded_checkpoint(saved, tmp_path):
    saved[0].save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert_same_weights(DSpineModel.from_pretrained(tmp_path), saved[0])


# ---- the transfer table ---------------------------------------------------------------------------------------------------


def test_stored_table_serves_a_quantised_head(tmp_path, quantise_head):
    target = tiny_target()
    drafter = tiny_drafter(target, store_transfer_table=True)
    drafter.save_pretrained(tmp_path)
    table = load_file(tmp_path / "model.safetensors")["transfer_table"]
    assert table.shape == (97, 8) and table.abs().sum() > 0
    assert torch.equal(table, drafter.ensure_transfer_table())

    quantise_head(target)
    again = DSpineModel.from_pretrained(tmp_path)
    again.bind_target(target)
    assert again.binding.head_weight is None
    assert torch.equal(again.ensure_transfer_table(), table)
    expected = target.generate(IDS, max_new_tokens=12, do_sample=False)
    assert torch.equal(again.spec_generate(target, IDS, max_new_tokens=12, do_sample=False), expected)


def test_table_cannot_be_stored_before_it_is_known(target, tmp_path):
    fields = {"mask_token_id": MASK_ID, "num_hidden_layers": 1, "transfer_rank": 8, "store_transfer_table": True}
    drafter = DSpineModel(DSpineConfig.from_target(target.config, **fields))
    with pytest.raises(ValueError, match=r"bind_target\(target\)"):
        drafter.save_pretrained(tmp_path)
    drafter.bind_target(target)
    drafter.save_pretrained(tmp_path)


# ---- strict loading -------------------------------------------------------------------------------------------------------


def test_missing_tensor(copy_of):
    edit(copy_of, lambda tensors: tensors.pop("layers.1.mlp.up_proj.weight"))
    assert "missing: layers.1.mlp.up_proj.weight" in refused(copy_of)


def test_extra_tensor(copy_of):
    edit(copy_of, lambda tensors: tensors.update({"layers.7.extra": torch.zeros(2)}))
    assert "unexpected: layers.7.extra" in refused(copy_of)


def test_misshaped_tensor(copy_of):
    edit(copy_of, lambda tensors: tensors.update({"fc.weight": torch.zeros(32, 32)}))
    message = refused(copy_of)
    assert "misshaped: fc.weight (expected [32, 64], got [32, 32])" in message


def test_all_faults_are_named_at_once(copy_of):
    def change(tensors):
        del tensors["norm.weight"]
        tensors["stray"] = torch.zeros(1)
        tensors["hidden_norm.weight"] = torch.zeros(31)

    edit(copy_of, change)
    message = refused(copy_of, ignore_mismatched_sizes=True)
    assert (
        "norm.weight" in message and "stray" in message and "hidden_norm.weight (expected [32], got [31])" in message
    )


@pytest.mark.parametrize("keep", [5, 200, 0.5, -1], ids=["in-length", "in-header", "half", "last-byte"])
def test_truncated_file(copy_of, keep):
    path = copy_of / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    assert "damaged or cut off" in refused(copy_of)


def test_auto_class_is_as_strict(copy_of):
    edit(copy_of, lambda tensors: tensors.pop("fc.weight"))
    with pytest.raises(ValueError, match="missing: fc.weight"):
        AutoModel.from_pretrained(copy_of)


def test_loading_information_is_still_available(saved):
    model, info = DSpineModel.from_pretrained(saved[1], output_loading_info=True)
    assert isinstance(model, DSpineModel) and not info["missing_keys"]


# ---- DFlash checkpoints ---------------------------------------------------------------------------------------------------


@pytest.fixture
def dflash_folder(tmp_path):
    dflash = pytest.importorskip("dflash.model", reason="needs the dflash package (extra `dev`)")
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
        num_target_layers=6,
        block_size=6,
        dflash_config={"mask_token_id": MASK_ID, "target_layer_ids": [1, 3]},
    )
    torch.manual_seed(5)
    model = dflash.DFlashDraftModel(config)
    model.save_pretrained(tmp_path / "dflash")
    return tmp_path / "dflash"


def test_dflash_checkpoint_becomes_a_drafter(dflash_folder, target, tmp_path):
    drafter = DSpineModel.from_dflash(dflash_folder).eval()
    backbone = load_file(dflash_folder / "model.safetensors")
    state = drafter.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in backbone.items())
    assert set(state) - set(backbone) and all(
        name.startswith(("injections.", "transfer.")) for name in set(state) - set(backbone)
    )
    drafter.bind_target(target, init_transfer=True)
    expected = target.generate(IDS, max_new_tokens=12, do_sample=False)
    assert torch.equal(drafter.spec_generate(target, IDS, max_new_tokens=12, do_sample=False), expected)
    drafter.save_pretrained(tmp_path / "dspine")
    assert_same_weights(DSpineModel.from_pretrained(tmp_path / "dspine"), drafter)


def test_dflash_checkpoint_is_checked(dflash_folder):
    edit(dflash_folder, lambda tensors: tensors.pop("layers.0.self_attn.q_norm.weight"))
    with pytest.raises(ValueError, match="missing: layers.0.self_attn.q_norm.weight"):
        DSpineModel.from_dflash(dflash_folder)


def test_other_checkpoints_are_not_dflash(target, tmp_path):
    target.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expected the config.json of a DFlash drafter"):
        DSpineModel.from_dflash(tmp_path)


def test_missing_writes_point_to_from_dflash(copy_of):
    def only_backbone(tensors):
        for name in [name for name in tensors if name.startswith(("injections.", "transfer."))]:
            del tensors[name]

    edit(copy_of, only_backbone)
    assert "DSpineModel.from_dflash" in refused(copy_of)


# ---- the model card -------------------------------------------------------------------------------------------------------


def test_card(saved):
    text = (saved[1] / "README.md").read_text()
    data = ModelCard(text).data
    assert data.base_model == "org/target" and data.library_name == "transformers"
    assert "speculative-decoding" in data.tags and "dspine" in data.tags
    assert "spec_generate" in text and "trust_remote_code=True" in text and "'tiny-dspine'" in text
    assert "Accepted length" not in text
    assert str(saved[1].parent) not in text


def test_card_shows_measured_accepted_lengths(saved, tmp_path):
    drafter, _ = saved
    drafter.config.measured_accepted_length = {"gsm8k": {"T=0": 3.456, "T=1": 3.1}, "mbpp": {"T=0": 2.0}}
    try:
        drafter.save_pretrained(tmp_path)
    finally:
        del drafter.config.measured_accepted_length
    text = (tmp_path / "README.md").read_text()
    assert "| benchmark | T=0 | T=1 |" in text and "| gsm8k | 3.46 | 3.10 |" in text and "| mbpp | 2.00 |  |" in text
    assert DSpineConfig.from_pretrained(tmp_path).measured_accepted_length["gsm8k"]["T=1"] == 3.1


def test_card_names_no_folder_of_this_machine(target, tmp_path):
    drafter = tiny_drafter(target, target_name_or_path=str(tmp_path / "my-target"))
    drafter.save_pretrained(tmp_path / "my-drafter")
    text = (tmp_path / "my-drafter" / "README.md").read_text()
    assert str(tmp_path) not in text and "my-target" in text and "my-drafter" in text
    assert ModelCard(text).data.base_model is None


def test_existing_card_is_kept(saved, tmp_path):
    (tmp_path / "README.md").write_text("written by hand")
    saved[0].save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "written by hand"


@pytest.mark.parametrize("existing", [None, "---\nlicense: mit\n---\nwritten by hand"], ids=["new", "has-a-card"])
def test_push_to_hub_brings_the_card(saved, monkeypatch, existing):
    from transformers.utils import hub

    class Api:
        def create_repo(self, repo_id, **kwargs):
            return type("Repository", (), {"repo_id": f"org/{repo_id}"})

    def load_card(repo_id, **kwargs):
        if existing is None:
            raise EntryNotFoundError("no card")
        return ModelCard(existing)

    pushed = {}

    def upload(self, working_dir, repo_id, *args, **kwargs):
        pushed.update({path.name: path.read_bytes() for path in Path(working_dir).iterdir()}, repo_id=repo_id)

    # releases differ in whether they make the repository through a function or an API object
    monkeypatch.setattr(hub, "hf_api", Api, raising=False)
    monkeypatch.setattr(hub, "create_repo", Api().create_repo, raising=False)
    monkeypatch.setattr(hub.ModelCard, "load", load_card)
    monkeypatch.setattr(PreTrainedModel, "_upload_modified_files", upload)
    saved[0].push_to_hub("tiny")
    assert pushed["repo_id"] == "org/tiny" and "model.safetensors" in pushed and "modeling_dspine.py" in pushed
    card = pushed["README.md"].decode()
    if existing is None:
        assert ModelCard(card).data.base_model == "org/target" and "'org/tiny'" in card
    else:
        assert "written by hand" in card
