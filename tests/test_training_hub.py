"""Fine-tuning and pushing as the example scripts do it, with a Hub that only takes notes."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import load_example
from test_training_trainer import answers, arguments, new_drafter
from tiny_models import tiny_target
from training_helpers import tiny_tokenizer

from dspine.integrations.training import DSpineTrainer, PackedDataset, export_drafter, from_records
from dspine.modeling_dspine import DSpineModel


class FakeHub:
    """Stands in for `HfApi`: remembers calls and what the uploaded folder held."""

    def __init__(self):
        self.calls, self.uploads = [], []

    def __call__(self):
        return self

    def create_repo(self, repo_id, **kwargs):
        self.calls.append(("create_repo", repo_id, kwargs))
        return SimpleNamespace(repo_id=repo_id)

    def create_branch(self, repo_id, **kwargs):
        self.calls.append(("create_branch", repo_id, kwargs))

    def create_tag(self, repo_id, **kwargs):
        self.calls.append(("create_tag", repo_id, kwargs))

    def upload_folder(self, *, repo_id, folder_path, **kwargs):
        from huggingface_hub.utils import filter_repo_objects

        files = {p.name: p.read_bytes() for p in Path(folder_path).iterdir() if p.is_file()}
        names = set(filter_repo_objects(files, ignore_patterns=kwargs.get("ignore_patterns")))
        self.uploads.append({name: files[name] for name in names})
        self.calls.append(("upload_folder", repo_id, kwargs))
        return SimpleNamespace(oid="abc", commit_url=f"https://hub/{repo_id}/commit/abc")


@pytest.fixture
def folder(tmp_path):
    """A drafter as a training run leaves it, other files included."""
    target = tiny_target()
    drafter = new_drafter(target, store_transfer_table=True)
    drafter.config.target_name_or_path = "org/tiny"
    export_drafter(drafter, str(tmp_path / "out"))
    (tmp_path / "out" / "training_args.bin").write_bytes(b"x")
    (tmp_path / "out" / "checkpoint-5").mkdir()
    return tmp_path / "out"


def test_dry_run_writes_what_would_be_pushed(folder, tmp_path, capsys):
    script = load_example("push_to_hub")
    script.main([str(folder), "--repo-id", "me/tiny-dspine", "--dry-run", str(tmp_path / "pushed")])
    names = {path.name for path in (tmp_path / "pushed").iterdir()}
    assert {"config.json", "model.safetensors", "README.md", "modeling_dspine.py"} <= names
    assert not names & {"training_args.bin", "checkpoint-5"}
    card = (tmp_path / "pushed" / "README.md").read_text()
    assert "me/tiny-dspine" in card and "base_model: org/tiny" in card and str(tmp_path) not in card
    assert isinstance(DSpineModel.from_pretrained(tmp_path / "pushed"), DSpineModel)
    assert "tensors, BF16" in capsys.readouterr().out
    with pytest.raises(ValueError, match="must be empty"):
        script.main([str(folder), "--repo-id", "me/tiny-dspine", "--dry-run", str(tmp_path / "pushed")])


def test_push_with_branch_and_tag(folder, monkeypatch):
    script, hub = load_example("push_to_hub"), FakeHub()
    monkeypatch.setattr(script, "HfApi", hub)
    options = ["--repo-id", "me/tiny-dspine", "--private", "--revision", "next", "--tag", "v1"]
    assert script.main([str(folder), *options]).endswith("/abc")
    assert [name for name, *_ in hub.calls] == ["create_repo", "create_branch", "upload_folder", "create_tag"]
    assert hub.calls[0][2]["private"] and hub.calls[2][2]["revision"] == "next"
    assert hub.calls[3][2] == {"tag": "v1", "revision": "abc"}
    assert "model.safetensors" in hub.uploads[0] and "training_args.bin" not in hub.uploads[0]


def test_a_folder_that_does_not_fit_is_refused(folder, tmp_path):
    script = load_example("push_to_hub")

    def push():
        script.main([str(folder), "--repo-id", "me/x", "--dry-run", str(tmp_path / "pushed")])

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"target_name_or_path": str(tmp_path)}))
    with pytest.raises(ValueError, match="--base-model"):
        push()
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    with pytest.raises(ValueError, match="misshaped"):
        push()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_dspine.py").rename(folder / "elsewhere.py")
    with pytest.raises(ValueError, match="lacks"):
        push()
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="merged drafter"):
        push()


@pytest.mark.parametrize("edited", [False, True])
def test_trainer_pushes_our_card_and_the_dtype_of_serving(tmp_path, monkeypatch, edited):
    hub = FakeHub()
    monkeypatch.setattr("transformers.trainer.hf_api", hub, raising=False)
    monkeypatch.setattr("transformers.trainer.create_repo", hub.create_repo, raising=False)
    monkeypatch.setattr("transformers.trainer.upload_folder", hub.upload_folder, raising=False)
    target = tiny_target()
    data = PackedDataset(from_records(answers(target)), 128, 12)
    options = arguments(tmp_path / "out", max_steps=1, push_to_hub=True, hub_model_id="me/tiny-dspine")
    trainer = DSpineTrainer(new_drafter(target), options, target=target, train_dataset=data)
    trainer.train()
    if edited:
        trainer.save_model(_internal_call=True)
        card = tmp_path / "out" / "README.md"
        card.write_text(card.read_text() + "\nMine.\n")
    trainer.push_to_hub()
    uploaded = hub.uploads[-1]
    card = uploaded["README.md"].decode()
    assert "generated from" not in card and "speculative-decoding" in card and str(tmp_path) not in card
    assert card.endswith("Mine.\n") if edited else "me/tiny-dspine" in card
    assert b'"BF16"' in uploaded["model.safetensors"] and b'"F32"' not in uploaded["model.safetensors"]


def test_finetuning_script(tmp_path):
    peft = pytest.importorskip("peft")
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    target = tiny_target(initializer_range=0.2)
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    new_drafter(target).save_pretrained(tmp_path / "drafter")
    records = [{**record, "input_ids": record["input_ids"].tolist()} for record in answers(target, count=12)]
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "data.parquet")
    load_example("train")
    report = load_example("finetune_lora").main(
        f"""--drafter {tmp_path}/drafter --target {tmp_path}/target --target_dtype float32 --data {tmp_path}/data.parquet
        --eval_data {tmp_path}/data.parquet --tokens_per_batch 256 --max_anchors 40 --rank 4 --learning_rate 1e-2
        --max_steps 30 --use_cpu --per_device_train_batch_size 1 --report_to none --disable_tqdm true --save_strategy no
        --export_dtype float32 --output_dir {tmp_path}/out""".split()
    )
    assert report["after_data_accepted_length"] > report["before_data_accepted_length"]
    merged = DSpineModel.from_pretrained(tmp_path / "out" / "merged")
    assert merged.dtype == torch.float32
    base = DSpineModel.from_pretrained(tmp_path / "drafter")
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "out")).merge_and_unload()
    for name, value in merged.state_dict().items():
        torch.testing.assert_close(adapted.state_dict()[name], value, msg=name)
