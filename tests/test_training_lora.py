"""LoRA: training, saving, resuming, reloading, merging; warm starts from DSpine and DFlash checkpoints."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_training_trainer import answers, arguments, new_drafter
from tiny_models import MASK_ID, tiny_target

from dspine.integrations.training import (
    DSpineTrainer,
    PackedDataset,
    build_drafter,
    export_drafter,
    from_records,
    lora_config,
    lora_modules_to_save,
    lora_target_modules,
    merge_adapter,
)
from dspine.integrations.training.arguments import DrafterArguments
from dspine.modeling_dspine import DSpineModel


peft = pytest.importorskip("peft")


def train(target, model, folder, resume=None, **options):
    data = PackedDataset(from_records(answers(target)), 128, 20)
    options = arguments(folder, **({"max_steps": 8, "learning_rate": 1e-2} | options))
    trainer = DSpineTrainer(model, options, target=target, train_dataset=data, eval_dataset=data)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def drafts(drafter, target):
    torch.manual_seed(0)
    drafter.eval()
    ids = torch.randint(3, 90, (2, 12))
    taps = torch.randn(2, 11, len(drafter.config.target_layer_ids) * drafter.config.hidden_size)
    noise = torch.full((2, drafter.config.block_size), MASK_ID)
    noise[:, 0] = ids[:, -1]
    with torch.no_grad():
        outputs = drafter(
            noise_embeds=drafter.binding.embed(noise, 1.0), context_hidden_states=taps, anchor_ids=ids[:, -1:]
        )
        proposal = drafter.propose(outputs, ids[:, -1], torch.ones(2), torch.full((2, 5), 0.4))
    return outputs.last_hidden_state, proposal.probs


@pytest.mark.parametrize(
    "overrides", [{}, {"store_transfer_table": True}, {"injection": False, "refinement": False}], ids=str
)
def test_adapter_trains_reloads_and_merges(tmp_path, overrides):
    target = tiny_target(initializer_range=0.2)
    base = new_drafter(target, **overrides)
    base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, lora_config(base.config, rank=4))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = train(target, model, tmp_path / "out")
    assert trainer.evaluate()["eval_accepted_length"] >= 1
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved and all("lora_" in name or "modules_to_save" in name for name in moved)
    # every adapter and every module trained whole takes part
    assert moved == {name for name, p in model.named_parameters() if p.requires_grad}
    wanted = drafts(trainer.drafter, target)

    trainer.save_model()
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "out" / "model.safetensors").exists()
    fresh = DSpineModel.from_pretrained(tmp_path / "base")
    fresh.bind_target(target)
    reloaded = peft.PeftModel.from_pretrained(fresh, str(tmp_path / "out"))
    for got, expected in zip(drafts(reloaded.get_base_model(), target), wanted):
        torch.testing.assert_close(got, expected)

    merged = merge_adapter(reloaded)
    assert isinstance(merged, DSpineModel) and not any("lora" in name for name in merged.state_dict())
    merged.save_pretrained(tmp_path / "merged")
    again = DSpineModel.from_pretrained(tmp_path / "merged")  # strict
    if overrides.get("store_transfer_table"):
        # the table that goes with the trained map, before anything is bound
        merged_table = again.transfer_table.clone()
        again.bind_target(target)
        torch.testing.assert_close(merged_table, again.ensure_transfer_table())
        assert not torch.allclose(merged_table, DSpineModel.from_pretrained(tmp_path / "base").transfer_table)
    again.bind_target(target)
    for drafter in (merged, again):
        for got, expected in zip(drafts(drafter, target), wanted):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    export_drafter(trainer.adapter, str(tmp_path / "exported"))
    assert DSpineModel.from_pretrained(tmp_path / "exported").dtype == torch.bfloat16
    assert trainer.adapter.get_base_model() is trainer.drafter, "exporting must leave the trained model alone"


def test_resume_of_an_adapter_is_bit_for_bit(tmp_path):
    target = tiny_target()

    def run(folder, resume=None):
        base = new_drafter(target)
        torch.manual_seed(3)
        model = peft.get_peft_model(base, lora_config(base.config, rank=4))
        trainer = train(target, model, folder, resume, save_strategy="steps", save_steps=5)
        return {name: p for name, p in trainer.drafter.named_parameters() if p.requires_grad}

    whole = run(tmp_path / "a")
    resumed = run(tmp_path / "b", str(tmp_path / "a" / "checkpoint-5"))
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


def test_a_stored_table_is_not_left_stale(tmp_path):
    target = tiny_target()
    base = new_drafter(target, store_transfer_table=True)
    base.save_pretrained(tmp_path)
    unbound = peft.get_peft_model(DSpineModel.from_pretrained(tmp_path), lora_config(base.config))
    with pytest.raises(ValueError, match="must be recomputed after merging"):
        merge_adapter(unbound)
    again = peft.get_peft_model(DSpineModel.from_pretrained(tmp_path), lora_config(base.config))
    assert merge_adapter(again, target).binding.lm_head is target.lm_head


def test_module_names_exist():
    target = tiny_target()
    for overrides in (
        {},
        {"transfer_learned": False},
        {"injection": False},
        {"injection": False, "refinement": False},
    ):
        drafter = new_drafter(target, **overrides)
        names = [name for name, _ in drafter.named_modules()]
        for suffix in lora_target_modules(drafter.config):
            assert any(name == suffix or name.endswith(f".{suffix}") for name in names)
        assert set(lora_modules_to_save(drafter.config)) <= set(names)
        kept = {f"injections.{i}" for i in drafter.injections} | (
            {"transfer"} if drafter.transfer is not None else set()
        )
        left = kept - set(lora_modules_to_save(drafter.config))
        assert left == ({"transfer"} if overrides == {"transfer_learned": False} else set())
    plain = lora_config(drafter.config, injections=False, lora_dropout=0.1)
    assert plain.modules_to_save is None and plain.lora_dropout == 0.1


def dflash_checkpoint(target, folder):
    """A checkpoint as DFlash drafters are released: their keys, their tensor names."""
    drafter = new_drafter(target, injection=False, refinement=False)
    drafter.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    nested = {"mask_token_id": config["mask_token_id"], "target_layer_ids": config["target_layer_ids"]}
    keep = """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act
        rms_norm_eps max_position_embeddings rope_parameters block_size num_target_layers""".split()
    config = {name: config[name] for name in keep} | {"model_type": "qwen3", "dflash_config": nested}
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["DFlashDraftModel"]}))
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors", {"format": "pt"})
    return drafter


def test_start_from_a_dflash_checkpoint(tmp_path):
    target = tiny_target()
    dflash = dflash_checkpoint(target, tmp_path)
    drafter = build_drafter(DrafterArguments(init_from=str(tmp_path), transfer_rank=8, num_candidates=8), target)
    assert drafter.config.uses_transfer_space and drafter.config.injection_layers == [0, 1]
    assert drafter.config.transfer_rank == 8 and drafter.config.mask_token_id == MASK_ID
    torch.testing.assert_close(drafts(drafter, target)[0], drafts(dflash, target)[0])
    plain = DrafterArguments(init_from=str(tmp_path), injection=False, refinement=False)
    torch.testing.assert_close(drafts(build_drafter(plain, target), target)[0], drafts(dflash, target)[0])


def test_start_from_a_dspine_checkpoint(tmp_path):
    target = tiny_target()
    source = new_drafter(target)
    source.save_pretrained(tmp_path / "a")
    same = build_drafter(DrafterArguments(init_from=str(tmp_path / "a")), target)
    for name, value in source.state_dict().items():
        assert torch.equal(value, same.state_dict()[name]), name
    # another depth: what agrees is copied
    deeper = build_drafter(DrafterArguments(init_from=str(tmp_path / "a"), num_hidden_layers=3), target)
    assert len(deeper.config.layer_types) == 3 and deeper.config.injection_layers == [0, 1, 2]
    assert torch.equal(deeper.layers[1].mlp.up_proj.weight, source.layers[1].mlp.up_proj.weight)
    assert torch.equal(deeper.transfer.weight, source.transfer.weight), "the learned space is kept"
    assert not deeper.injections["2"].write.weight.any()
    # a DSpine configuration with the parts off, switched on
    new_drafter(target, injection=False, refinement=False).save_pretrained(tmp_path / "b")
    grown = build_drafter(
        DrafterArguments(init_from=str(tmp_path / "b"), injection=True, refinement=True, transfer_rank=8), target
    )
    assert grown.config.injection_layers == [0, 1] and not grown.injections["1"].write.weight.any()
    assert grown.transfer.weight.any()
