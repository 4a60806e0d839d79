"""Checkpoints and single layers in the measurements of a served drafter: padded heads, prepared folders, where two sides part."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import load_example
from sglang_testing import example, tiny_config


check = example("check_sglang")
checkpoints = example("sglang_checks.checkpoints")
layers = example("sglang_checks.layers")


# ---- checkpoints ----------------------------------------------------------------------------------------------------------


def test_padded_heads_compute_the_same(checkpoints, tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 50, "hidden_size": 36, "intermediate_size": 24, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=9, num_key_value_heads=3)).eval()
    model.save_pretrained(tmp_path / "a")
    checkpoints.padded_heads(tmp_path / "a", tmp_path / "b", 2)
    padded = AutoModelForCausalLM.from_pretrained(tmp_path / "b").eval()
    assert (padded.config.num_attention_heads, padded.config.num_key_value_heads, padded.config.head_dim) == (12, 4, 4)
    ids = torch.arange(14).view(2, 7)
    with torch.no_grad():
        torch.testing.assert_close(padded(ids).logits, model(ids).logits)


def test_padded_drafter_computes_the_same(checkpoints, tmp_path):
    tiny_models = pytest.importorskip("tiny_models", exc_type=ImportError)
    from dspine.modeling_dspine import DSpineModel

    target = tiny_models.tiny_target()
    drafter = tiny_models.tiny_drafter(target)
    drafter.save_pretrained(tmp_path / "a")
    checkpoints.padded_heads(tmp_path / "a", tmp_path / "b", 4)
    padded = DSpineModel.from_pretrained(tmp_path / "b").eval()
    assert padded.config.num_key_value_heads % 4 == 0
    padded.bind_target(target)
    prompt = torch.tensor([[5, 6, 7, 8]])
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}
    got, wanted = (one.spec_generate(target, prompt, **options) for one in (padded, drafter))
    assert torch.equal(got.sequences, wanted.sequences)
    assert got.statistics.accepted_lengths == wanted.statistics.accepted_lengths


def test_prepared_folders(check, tmp_path):
    result = check.main(["prepare", "--folder", str(tmp_path), "--output", str(tmp_path / "prepare.json")])
    assert set(result["done"]) >= {"qwen3-4b", "qwen3-8b"} and not result["failed"]
    from dspine.integrations.sglang.checks import check_draft, check_target

    for name, width in (("qwen3-4b", 2560), ("qwen3-8b", 4096)):
        raw = json.loads((tmp_path / name / "target" / "config.json").read_text())
        assert raw["architectures"] == ["Qwen3ForCausalLM"] and raw["hidden_size"] == width
        drafter = type(tiny_config()).from_pretrained(tmp_path / name / "dspine")
        check_draft(drafter, 16)
        text = SimpleNamespace(hidden_size=width, num_hidden_layers=36)
        check_target(drafter, SimpleNamespace(vocab_size=raw["vocab_size"], hf_text_config=text))
        dflash = json.loads((tmp_path / name / "dflash" / "config.json").read_text())
        assert dflash["architectures"] == ["DFlashDraftModel"]
        assert dflash["dflash_config"]["target_layer_ids"] == drafter.target_layer_ids
        shared = ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "num_hidden_layers")
        assert all(dflash[key] == getattr(drafter, key) for key in shared)


# ---- layers ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def decoded():
    """A tiny target and drafter, a prompt, and what the drafter decodes."""
    tiny_models = pytest.importorskip("tiny_models", exc_type=ImportError)
    from dspine.integrations.evaluation.decoding import decode_with_drafter
    from dspine.integrations.evaluation.prompts import Prompt

    target = tiny_models.tiny_target()
    drafter = tiny_models.tiny_drafter(target)
    prompt = [5, 6, 7, 8]
    return SimpleNamespace(
        target=target,
        drafter=drafter,
        prompt=prompt,
        answer=decode_with_drafter(target, drafter, [Prompt("s", 0, prompt)], 24)[0],
    )


def test_draft_pass_is_what_decoding_does(layers, decoded):
    """Accepted lengths of every round follow from passes without a cache."""
    ids, start = decoded.prompt + decoded.answer.output_ids, len(decoded.prompt)
    for length in decoded.answer.accepted_lengths[:-1]:  # the last one may have been cut
        drafts = layers.draft_pass(decoded.target, decoded.drafter, ids, start)["tokens"].tolist()
        following = ids[start + 1 : start + 1 + len(drafts)]
        agreed = next((i for i, (a, b) in enumerate(zip(drafts, following)) if a != b), len(drafts))
        assert agreed + 1 == length
        start += length


def test_layers(check, layers, decoded, tmp_path, monkeypatch):
    import copy

    from dspine.modeling_dspine import DSpineModel

    transformers = pytest.importorskip("transformers")
    ids = decoded.prompt + decoded.answer.output_ids
    exact = {}
    (tmp_path / "records").mkdir()
    for n, start in enumerate((4, 9, 15)):
        exact[start] = one = layers.draft_pass(decoded.target, decoded.drafter, ids, start)
        one = one | {"ids": torch.tensor([ids[start]]), "positions": torch.tensor([start])}
        torch.save(one, tmp_path / "records" / f"pass-{n:03d}.pt")
    stored = {"prompts": {"s": [decoded.prompt]}, "texts": {"eager": {"s": [{"ids": decoded.answer.output_ids}]}}}
    (tmp_path / "parity.json").write_text(json.dumps(stored))

    def rounded(model):
        return lambda folder, dtype: copy.deepcopy(model).to(dtype)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", rounded(decoded.target))
    monkeypatch.setattr(DSpineModel, "from_pretrained", rounded(decoded.drafter))
    arguments = ["layers", "--records", str(tmp_path / "records"), "--parity", str(tmp_path / "parity.json")]
    arguments += ["--target", "t", "--drafter", "d", "--device", "cpu", "--output", str(tmp_path / "layers.json")]
    result = check.main(arguments)
    assert result["passed"] and result["passes"] == 3
    assert set(result["relative_error"]) == {"norm(h)", *(f"injection {name}" for name in decoded.drafter.injections)}
    for part in result["relative_error"].values():
        assert part["served"] < 1e-6 < 1e-3 < part["hf"] < 0.3
    assert result["served_against_fp32"] == {"same_tokens": 1.0, "same_candidates": 1.0}

    # states that are further off than rounding
    for n, start in enumerate((4, 9, 15)):
        wrong = exact[start] | {"ids": torch.tensor([ids[start]]), "positions": torch.tensor([start])}
        wrong["hidden"] = wrong["hidden"] * 1.5
        torch.save(wrong, tmp_path / "records" / f"pass-{n:03d}.pt")
    assert not check.main(arguments)["passed"]
    for path in (tmp_path / "records").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match="no stored pass"):
        check.main(arguments)


def test_recording(tmp_path, monkeypatch):
    recorder = load_example("record_sglang")

    class Injection(torch.nn.Module):
        def forward(self, x):
            return x + 1, x

    class Model(torch.nn.Module):
        block_size = 3

        def __init__(self):
            super().__init__()
            self.injections = torch.nn.ModuleDict({"0": Injection()})

        def forward(self, ids, positions, batch):
            written, _ = self.injections["0"](ids.float().view(-1, 3, 1))
            return SimpleNamespace(hidden_states=written.view(-1, 1))

    class Worker:
        recorded = 0

        def _greedy_sample_from_vocab_parallel_head(self, *, hidden_states):
            self._proposal = (torch.zeros(1, 2, 4), torch.ones(1, 2, 4))
            return torch.tensor([7, 8])

    recorder.record(Worker, Model, tmp_path / "r")
    worker = Worker()
    worker.draft_model = Model()
    for rows in (1, 2, 1):  # passes of several blocks are left out
        ids = torch.arange(3 * rows)
        out = worker.draft_model(ids, ids + 10, None)
        assert worker._greedy_sample_from_vocab_parallel_head(hidden_states=out.hidden_states).tolist() == [7, 8]
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == ["pass-000.pt", "pass-001.pt"]
    stored = torch.load(tmp_path / "r" / "pass-000.pt")
    assert stored["positions"].tolist() == [10, 11, 12] and stored["layers"]["0"].view(-1).tolist() == [1, 2, 3]
    assert stored["hidden"].shape == (3, 1) and stored["candidates"].shape == (2, 4)
    monkeypatch.delenv("DSPINE_RECORD", raising=False)
    assert recorder.register() is None


def test_fixed_drafts():
    recorder = load_example("record_sglang")
    module = SimpleNamespace(make_draft_sampler_capture_hook=lambda draft_sampler: draft_sampler.sample)
    recorder.fix_drafts(module, 200)

    class Sampler:
        def __init__(self):
            self.out, self.seen = torch.zeros(30, dtype=torch.int64), []

        def sample(self, hidden_states, number):
            self.seen.append(number)
            self.out.fill_(7)

    first, second = Sampler(), Sampler()
    for sampler in (first, second):
        module.make_draft_sampler_capture_hook(sampler)("hidden", number=3)
    assert first.seen == [3] and torch.equal(first.out, second.out)
    assert len(set(first.out.tolist())) > 15 and first.out.min() >= 100 and first.out.max() < 200
