"""Soft-token features: what a neighbour passes on is the average token it predicts, in training and decoding alike."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from test_training_trainer import answers, arguments, new_drafter
from tiny_models import tiny_drafter, tiny_target

from dspine.integrations.training import DSpineTrainer, PackedDataset, from_records, walk_dataset
from dspine.modeling_dspine import DSpineConfig, DSpineModel
from dspine.modeling_dspine.modeling_dspine import soft_token
from dspine.modeling_dspine.reference_dspine import gated_adjacent_injection, gated_write


def test_soft_token_is_the_average_over_the_table():
    torch.manual_seed(0)
    features, table = torch.randn(3, 5, 8), torch.randn(40, 8)
    wanted = torch.softmax(features @ table.T / 8**0.5, dim=-1) @ table
    torch.testing.assert_close(soft_token(features, table), wanted)
    certain = soft_token(200 * table[None], table)
    torch.testing.assert_close(certain[0, table.norm(dim=-1).argmax()], table[table.norm(dim=-1).argmax()])


def test_only_what_is_passed_on_changes():
    drafter = tiny_drafter(tiny_target(), soft_token_features=True)
    module, table = drafter.injections["0"], drafter.ensure_transfer_table()
    torch.manual_seed(0)
    states, anchors = torch.randn(4, 6, drafter.config.hidden_size), table[:4]
    weights = (module.norm.weight, module.feature.weight)
    _, features = gated_adjacent_injection(states, anchors, *weights, **module.write_weights)
    written, own = module(states, anchors, table)
    torch.testing.assert_close(own, features)
    assert torch.equal(written[:, 0], states[:, 0]), "the anchor's slot is left alone"
    left = torch.cat([anchors[:, None], soft_token(features[:, 1:-1], table)], dim=1)
    write = gated_write(features[:, 1:], left, module.gate.weight, module.gate.bias, module.write.weight)
    torch.testing.assert_close(written[:, 1:], states[:, 1:] + write)


def test_trains_walks_and_decodes_the_same(tmp_path):
    target = tiny_target(initializer_range=0.2)
    records = answers(target)
    data = PackedDataset(from_records(records), 256, 40)
    drafter = new_drafter(target, soft_token_features=True)
    map_before = drafter.transfer.weight.clone()
    options = arguments(tmp_path, max_steps=80, learning_rate=1e-2)
    trainer = DSpineTrainer(drafter, options, target=target, train_dataset=data)
    trainer.train()
    assert not torch.equal(map_before, drafter.transfer.weight)
    drafter.eval().save_pretrained(tmp_path / "saved")
    again = DSpineModel.from_pretrained(tmp_path / "saved").eval()
    again.bind_target(target)
    assert again.config.soft_token_features
    walked = walk_dataset(again, trainer.run_target, data, torch.device("cpu")).metrics()["accepted_length"]
    assert walked > 2
    rounds = []
    for record in records:
        ids, prompt = record["input_ids"], record["prompt_length"]
        output = again.spec_generate(
            target,
            torch.tensor(ids[:prompt])[None],
            max_new_tokens=len(ids) - prompt,
            do_sample=False,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
        assert output.sequences[0].tolist() == ids.tolist()
        rounds += output.statistics.accepted_lengths[0]
    assert sum(rounds) / len(rounds) == pytest.approx(walked)


def test_the_table_is_constant_in_training():
    drafter = tiny_drafter(tiny_target(), soft_token_features=True).train()
    table = drafter.soft_token_table()
    assert not table.requires_grad
    torch.testing.assert_close(table, drafter.eval().ensure_transfer_table())


def test_needs_injection():
    with pytest.raises(StrictDataclassError, match="soft_token_features must be False without injection"):
        DSpineConfig(injection=False, soft_token_features=True)
    assert not DSpineConfig().soft_token_features
