"""`DSpineTrainer` on tiny models: learning, resuming, evaluating, two processes, the training script."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import load_example
from tiny_models import MASK_ID, tiny_drafter, tiny_target
from torch._dynamo.testing import CompileCounter
from training_helpers import tiny_tokenizer
from transformers import TrainingArguments

from dspine.integrations.training import (
    DSpineTrainer,
    LossArguments,
    PackedDataset,
    TargetRunner,
    TimeLimitCallback,
    export_drafter,
    from_records,
    shard_target,  # noqa: F401, for the worker below
    start_from_drafter,
    start_from_target_layers,
    walk_dataset,
)
from dspine.integrations.training.metrics import walk, walk_row
from dspine.modeling_dspine import DSpineModel


def answers(target, count=10, new_tokens=24, prompt=5, seed=0):
    """Greedy answers of the target to random prompts, as records."""
    torch.manual_seed(seed)
    prompts = torch.randint(3, 90, (count, prompt))
    texts = target.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new_tokens, do_sample=False
    )
    return [{"input_ids": text.numpy(), "prompt_length": prompt} for text in texts]


def arguments(folder, **overrides):
    options = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 1,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.04,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 20,
    }
    return TrainingArguments(**(options | overrides))


def new_drafter(target, **overrides):
    return tiny_drafter(target, spread=0.1, **overrides).float()


def test_overfits_to_almost_whole_blocks_and_reloads(tmp_path):
    target = tiny_target(initializer_range=0.2)
    data = PackedDataset(from_records(answers(target)), 256, 40)
    drafter = new_drafter(target)
    options = arguments(tmp_path, max_steps=200, learning_rate=1e-2)
    trainer = DSpineTrainer(drafter, options, target=target, train_dataset=data, eval_dataset={"train": data})
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_train_accepted_length"] > 0.85 * drafter.config.block_size
    assert metrics["eval_train_candidate_recall"] > 0.9
    assert not any(p.requires_grad for p in target.parameters())
    logged = [entry for entry in trainer.state.log_history if "loss_refined" in entry]
    assert logged[-1]["loss_refined"] < 0.3 * logged[0]["loss_refined"]
    export_drafter(trainer.drafter, str(tmp_path / "final"), torch.float32)
    again = DSpineModel.from_pretrained(tmp_path / "final").eval()
    again.bind_target(target)
    assert not any("target" in name or "lm_head" in name for name in again.state_dict())
    statistics = walk_dataset(again, trainer.run_target, data, torch.device("cpu"))
    assert statistics.metrics()["accepted_length"] == metrics["eval_train_accepted_length"]


@pytest.mark.parametrize("refinement", [True, False], ids=["dspine", "dflash"])
def test_walking_equals_decoding(tmp_path, refinement):
    target = tiny_target(eos_token_id=2)
    records = answers(target, count=8, new_tokens=30)
    records = [r for r in records if len(r["input_ids"]) > r["prompt_length"] + 1]
    data = PackedDataset(from_records(records), 128, 20)
    drafter = new_drafter(target, injection=refinement, refinement=refinement)
    # half trained, so that rounds of all lengths occur
    trainer = DSpineTrainer(drafter, arguments(tmp_path, max_steps=60), target=target, train_dataset=data)
    trainer.train()
    drafter.eval()
    rounds = {}
    for index in range(len(data)):
        row = {name: torch.from_numpy(array) for name, array in data.row(index).items()}
        walk_row(drafter, trainer.run_target(row), row, data.documents(index), chunk=7, rounds=rounds)
    lengths = []
    for number, record in enumerate(records):
        prompt = torch.tensor(record["input_ids"][: record["prompt_length"]])[None]
        output = drafter.spec_generate(
            target, prompt, max_new_tokens=30, do_sample=False, return_dict_in_generate=True, pad_token_id=0
        )
        text = output.sequences[0]
        stop = len(record["input_ids"])
        assert text[:stop].tolist() == record["input_ids"].tolist()
        assert rounds[number] == output.statistics.accepted_lengths[0]
        lengths += rounds[number]
    assert len(set(lengths)) > 2


def test_walk_ends_with_the_text():
    accepted = np.array([0, 0, 3, 0, 0, 0, 2, 1, 0])
    assert walk(accepted, 2, 8, 4) == ([2, 6], [4, 2])
    assert walk(accepted, 2, 7, 4) == ([2, 6], [4, 1])
    assert walk(np.zeros(5, dtype=int), 1, 4, 4) == ([1, 2, 3], [1, 1, 1])


def test_resume_is_bit_for_bit(tmp_path):
    target = tiny_target()
    records = answers(target, count=20)

    def run(folder, stop_at=None, resume=None):
        data = PackedDataset(from_records(records), 128, 12)
        options = {"max_steps": 13, "save_strategy": "steps", "save_steps": 7, "gradient_accumulation_steps": 2}
        trainer = DSpineTrainer(
            new_drafter(target, supervision="cosine", supervision_weight=0.1),
            arguments(folder, **options),
            target=target,
            train_dataset=data,
        )
        torch.manual_seed(1 if resume else 2)  # nothing may hang on the global state
        trainer.train(resume_from_checkpoint=resume)
        return trainer.drafter.state_dict(), len(data)

    whole, rows = run(tmp_path / "a")
    assert 7 * 2 % rows, "the checkpoint must lie inside an epoch"
    resumed, _ = run(tmp_path / "b", resume=str(tmp_path / "a" / "checkpoint-7"))
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name
    assert isinstance(DSpineModel.from_pretrained(tmp_path / "a" / "checkpoint-7"), DSpineModel)


def test_gradient_checkpointing_changes_nothing(tmp_path):
    target = tiny_target()
    data = PackedDataset(from_records(answers(target)), 128, 12)
    states = []
    for on in (False, True):
        trainer = DSpineTrainer(
            new_drafter(target),
            arguments(tmp_path, max_steps=3, gradient_checkpointing=on),
            target=target,
            train_dataset=data,
        )
        trainer.train()
        states.append(trainer.drafter.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], msg=name)


def test_weight_decay_spares_norms_and_biases(tmp_path):
    target = tiny_target()
    data = PackedDataset(from_records(answers(target)), 128, 12)
    trainer = DSpineTrainer(
        new_drafter(target), arguments(tmp_path, weight_decay=0.1), target=target, train_dataset=data
    )
    decayed = set(trainer.get_decay_parameter_names(trainer.model))
    names = {name for name, _ in trainer.model.named_parameters()}
    assert {name for name in names if "norm" in name or name.endswith("bias")} == names - decayed
    assert "drafter.injections.0.gate.bias" in names and "drafter.injections.0.gate.weight" in decayed


def test_training_with_a_distance_to_the_target(tmp_path):
    target = tiny_target(initializer_range=0.2)
    data = PackedDataset(from_records(answers(target)), 256, 40)
    trainer = DSpineTrainer(
        new_drafter(target),
        arguments(tmp_path, max_steps=30, learning_rate=1e-2, logging_steps=10),
        target=target,
        train_dataset=data,
        loss_arguments=LossArguments(base_weight=0.0, refined_weight=0.0, distance="tv"),
    )
    trainer.train()
    distances = [entry["loss_distance"] for entry in trainer.state.log_history if "loss_distance" in entry]
    assert distances[-1] < distances[0] - 0.05


def test_time_limit_stops_cleanly(tmp_path):
    target = tiny_target()
    data = PackedDataset(from_records(answers(target)), 128, 12)
    trainer = DSpineTrainer(
        new_drafter(target),
        arguments(tmp_path, max_steps=500),
        target=target,
        train_dataset=data,
        callbacks=[TimeLimitCallback(0.0, every=2)],
    )
    trainer.train()
    assert trainer.state.global_step == 2


def test_a_run_cut_by_the_time_limit_resumes(tmp_path):
    target = tiny_target()
    records = answers(target)

    def run(callbacks, resume=None):
        options = arguments(tmp_path / "run", max_steps=6, save_strategy="steps", save_steps=100)
        data = PackedDataset(from_records(records), 128, 12)
        trainer = DSpineTrainer(new_drafter(target), options, target=target, train_dataset=data, callbacks=callbacks)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run([]).drafter.state_dict()
    assert run([TimeLimitCallback(0.0, every=2)]).state.global_step == 2
    resumed = run([], str(tmp_path / "run" / "checkpoint-2"))
    assert resumed.state.global_step == 6
    for name, value in whole.items():
        assert torch.equal(value, resumed.drafter.state_dict()[name]), name


def test_refuses_what_it_cannot_do(tmp_path):
    target = tiny_target()
    data = PackedDataset(from_records(answers(target)), 128, 12)
    with pytest.raises(ValueError, match="per_device_train_batch_size must be 1"):
        options = arguments(tmp_path, per_device_train_batch_size=2)
        DSpineTrainer(new_drafter(target), options, target=target, train_dataset=data)
    with pytest.raises(ValueError, match="bound to the given target"):
        DSpineTrainer(new_drafter(tiny_target(seed=3)), arguments(tmp_path), target=target, train_dataset=data)


def test_warm_starts():
    target = tiny_target()
    dflash = new_drafter(target, injection=False, refinement=False)
    dspine = new_drafter(target)
    copied, kept = start_from_drafter(dspine, dflash)
    assert set(copied) == set(dict(dflash.named_parameters())) and all(
        "injections" in n or "transfer" in n for n in kept
    )
    assert torch.equal(dspine.layers[0].mlp.up_proj.weight, dflash.layers[0].mlp.up_proj.weight)
    copied = start_from_target_layers(dspine, target, [1, 4])
    assert torch.equal(dspine.layers[1].self_attn.q_proj.weight, target.model.layers[4].self_attn.q_proj.weight)
    assert not any("q_norm" in name for name in copied)
    with pytest.raises(ValueError, match="2 target layers"):
        start_from_target_layers(dspine, target, [1])


WORKER = """
import sys, torch
sys.path.insert(0, {tests!r})
from accelerate import PartialState
from accelerate.utils import DistributedType
from test_training_trainer import *
torch.set_num_threads(1)
target = tiny_target()
data = PackedDataset(from_records(answers(target, count=16)), 128, 12)
options = dict(
    max_steps=4,
    gradient_accumulation_steps={accumulation},
    ddp_find_unused_parameters=False,
    logging_steps=2,
    save_strategy="steps",
    save_steps=2,
)
options = arguments({folder!r}, **options)
if {fsdp}:
    # Accelerate shards on accelerators only; the sharding itself runs on CPU too
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    PartialState._shared_state["backend"] = "gloo"
    target = shard_target(target, options.device)

def train(options, resume=None):
    drafter = new_drafter(target, store_transfer_table=True)
    sets = dict(train_dataset=data, eval_dataset=data)
    trainer = DSpineTrainer(drafter, options, target=target, export_dtype=torch.float32, **sets)
    trainer.train(resume_from_checkpoint=resume)
    return trainer

trainer = train(options)
metrics = trainer.evaluate()
trainer.save_model()
state = trainer.whole_drafter().state_dict()
if {fsdp}:
    options.save_strategy = "no"
    again = train(options, {folder!r} + "/checkpoint-2").whole_drafter().state_dict()
    for name, value in state.items():
        assert torch.equal(value, again[name]), name
assert trainer.is_fsdp_enabled == {fsdp} == trainer.run_target.sharded
if trainer.is_world_process_zero():
    logged = [entry["loss_refined"] for entry in trainer.state.log_history if "loss_refined" in entry]
    torch.save((state, metrics["eval_accepted_length"], logged), {folder!r} + "/state.pt")
"""


def run_worker(folder, world, fsdp=False):
    """Trains in `world` processes; the drafter's weights, its accepted length and the logged losses."""
    folder.mkdir()
    script = folder / "worker.py"
    values = {"tests": str(Path(__file__).parent), "accumulation": 2 // world, "folder": str(folder), "fsdp": fsdp}
    script.write_text(WORKER.format(**values))
    launcher = [] if world == 1 else ["-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29517"]
    sharding = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "DSpineDecoderLayer",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    }
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"} | (sharding if fsdp else {}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "state.pt", weights_only=False)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    return run_worker(tmp_path_factory.mktemp("one") / "run", 1)


@pytest.mark.parametrize("fsdp", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["ddp", "fsdp2"])
def test_two_processes_equal_one(tmp_path, one_process, fsdp):
    one, length, logged = one_process
    two, length_two, logged_two = run_worker(tmp_path / "run", 2, fsdp)
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=1e-4, atol=1e-5, msg=name)
    assert length == pytest.approx(length_two) and logged == pytest.approx(logged_two, abs=1e-4)
    for folder in ("", "checkpoint-4"):
        saved = DSpineModel.from_pretrained(tmp_path / "run" / folder).state_dict()
        for name, value in one.items():
            torch.testing.assert_close(saved[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_training_script(tmp_path, capsys):
    target = tiny_target()
    target.save_pretrained(tmp_path / "target")
    pandas = pytest.importorskip("pandas")
    records = [{**record, "source": "tiny"} for record in answers(target, count=12)]
    pandas.DataFrame(records).to_parquet(tmp_path / "data.parquet")
    recipes = Path(__file__).parents[1] / "examples" / "recipes"
    options = f"""--target {tmp_path}/target --target_dtype float32 --data {tmp_path}/data.parquet --mask_token_id {MASK_ID}
        --eval_data greedy={tmp_path}/data.parquet --eval_documents 6 --num_hidden_layers 2 --block_size 6 --transfer_rank 8
        --tokens_per_batch 256 --max_anchors 30 --bf16 false --compile_drafter false --compile_target false --dataloader_num_workers 0
        --dataloader_persistent_workers false --use_cpu --optim adamw_torch --disable_tqdm true --output_dir {tmp_path}/out""".split()
    script = load_example("train")
    script.main([str(recipes / "smollm2-135m-dspine.yaml"), *options, "--dry_run"])
    printed = capsys.readouterr().out
    assert "peak_gb" in printed and "first block" in printed
    report = script.main([str(recipes / "smollm2-135m-dspine.yaml"), *options, "--max_steps", "3"])
    assert report["steps"] == 3 and report["evaluation"]["eval_greedy_requests"] == 6
    saved = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert saved["packing"]["documents"] == 12
    drafter = DSpineModel.from_pretrained(tmp_path / "out")
    assert drafter.dtype == torch.bfloat16 and drafter.config.mask_token_id == MASK_ID
    report = load_example("evaluate_drafter").main(
        f"""--target {tmp_path}/target --drafter tiny={tmp_path}/out --prompts {tmp_path}/data.parquet --num-prompts 4
        --max-new-tokens 12 --dtype float32 --batch-size 3 --device cpu --out {tmp_path}/evaluation.json""".split()
    )
    stored = report["drafters"]["tiny"]["T=0"]["stored_answers"]
    assert stored["compared"] == 4 and stored["different"] == 0


QWEN3 = {
    "4b": {"hidden_size": 2560, "intermediate_size": 9728},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288},
}


@pytest.mark.parametrize("size, parameters", [("4b", 4.02), ("8b", 8.19)])
def test_dry_run_of_large_targets_reads_no_weights(tmp_path, capsys, size, parameters):
    """Only `config.json` and the tokenizer are there."""
    pytest.importorskip("datasets")
    from transformers import Qwen3Config

    shape = {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    config = Qwen3Config(vocab_size=151936, tie_word_embeddings=size == "4b", **shape, **QWEN3[size])
    config.save_pretrained(tmp_path / "target")
    recipe = str(Path(__file__).parents[1] / "examples" / "recipes" / f"qwen3-{size}.yaml")
    options = f"--target {tmp_path}/target --use_cpu --bf16 false --dry_run --output_dir {tmp_path}/out".split()
    load_example("train").main([recipe, *options])
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines() if ": " in line)
    assert float(lines["target_parameters"].replace(",", "")) == pytest.approx(parameters * 1e9, rel=0.01)
    assert float(lines["peak_gb"]) > float(lines["target_gb"]) > 2 * parameters / 1.1
    assert not (tmp_path / "out").exists()
    # with data: counts, and the first document with its mask
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}]
    records = [{"messages": chat}] * 3 + [{"messages": chat[:1]}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    load_example("train").main([recipe, *options, "--data", f"{tmp_path}/data.jsonl"])
    printed = capsys.readouterr().out
    assert "left out no response" in printed and "assistant\n^[h]^[e]^[l]" in printed and "e][<|im_end|>]" in printed


RECIPES = Path(__file__).parents[1] / "examples" / "recipes"


def test_every_recipe_parses():
    from accelerate.commands.config.config_args import load_config_from_file

    from dspine.integrations.training import parse_arguments

    for path in sorted(RECIPES.glob("*.yaml")):
        if path.name.startswith("accelerate"):
            config = load_config_from_file(str(path))
            assert config.fsdp_config.get("fsdp_version") == (2 if "fsdp2" in path.name else None)
            continue
        drafter, data, loss, run, training = parse_arguments(
            [str(path), "--output_dir", "x", "--use_cpu", "--bf16", "false"]
        )
        assert drafter.block_size == 16 and isinstance(loss, LossArguments) and training.learning_rate > 0


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_accelerate_launch_on_two_gpus(tmp_path, sharded):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    target = tiny_target()
    target.to(torch.bfloat16).save_pretrained(tmp_path / "target")
    records = [{**record, "input_ids": record["input_ids"].tolist()} for record in answers(target, count=40)]
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "data.parquet")
    config = RECIPES / f"accelerate_{'fsdp2' if sharded else 'ddp'}.yaml"
    options = f"""--target {tmp_path}/target --data {tmp_path}/data.parquet --mask_token_id {MASK_ID} --num_hidden_layers 2
        --eval_data {tmp_path}/data.parquet --block_size 6 --transfer_rank 16 --tokens_per_batch 256 --max_anchors 30
        --per_device_train_batch_size 1 --bf16 true --max_steps 4 --report_to none --output_dir {tmp_path}/out""".split()
    launch = ["-m", "accelerate.commands.launch", "--config_file", str(config), "--num_processes", "2"]
    script = [str(RECIPES.parent / "train.py"), *options, *(["--shard_target"] if sharded else [])]
    done = subprocess.run([sys.executable, *launch, *script], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["steps"] == 4
    assert DSpineModel.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


@pytest.mark.parametrize("compile", [False, True])
def test_target_runner_matches_documents_alone(compile, monkeypatch):
    target = tiny_target()
    records = answers(target, count=6)
    data = PackedDataset(from_records(records), 256, 4)
    compiled = CompileCounter()  # one graph for all layers, run as it is
    compile_function = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile_function(f, backend=compiled, **options))
    torch.compiler.reset()
    runner = TargetRunner(target, [1, 3], compile=compile)
    row = {name: torch.from_numpy(array) for name, array in data.row(0).items()}
    taps = runner(row)
    assert compiled.frame_count == compile
    again, final = runner(row, final=True)
    assert torch.equal(taps, again) and compiled.frame_count == compile
    documents = data.documents(0)
    alone = target(torch.tensor(records[documents[0][0]]["input_ids"])[None], output_hidden_states=True)
    torch.testing.assert_close(final[:, : documents[0][2]], alone.hidden_states[-1], rtol=1e-4, atol=1e-5)
    assert len(target.get_decoder().layers) == target.config.num_hidden_layers
    for sequence, begin, end in data.documents(0):
        alone = target(torch.tensor(records[sequence]["input_ids"])[None], output_hidden_states=True).hidden_states
        wanted = torch.cat([alone[2], alone[4]], dim=-1)[0]
        torch.testing.assert_close(taps[0, begin:end], wanted, rtol=1e-4, atol=1e-5)
