"""The ablation driver: rows as processes of the training script, skipped when finished, resumed when cut, and the table."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
from conftest import load_example
from test_training_trainer import answers
from tiny_models import MASK_ID, tiny_target


def test_every_row_is_accepted_by_the_training_script(tmp_path):
    from dspine.configuration_dspine import DSpineConfig
    from dspine.integrations.training import drafter_config, parse_arguments

    script = load_example("ablations")
    target = tiny_target()
    for name in script.ROWS:
        args = script_arguments(tmp_path)
        command = script.train_command(name, args, 60)
        drafter, _, _, run, training = parse_arguments([*command[2:], "--use_cpu", "--bf16", "false"])
        assert run.resume and run.time_limit == 60 and training.max_steps == 6 and training.eval_steps == 3
        drafter.transfer_rank = min(drafter.transfer_rank, target.config.hidden_size)
        assert isinstance(drafter_config(drafter, target.config), DSpineConfig)
    assert script.BASELINE in script.ROWS


def script_arguments(folder) -> Namespace:
    recipe = str(Path(__file__).parents[1] / "examples" / "recipes" / "smollm2-135m-dspine.yaml")
    fields = {
        "target": "t",
        "data": ["a.parquet"],
        "eval_data": ["greedy=b.parquet"],
        "out": str(folder),
        "recipe": recipe,
    }
    fields |= {"steps": 6, "seed": 0, "evaluations": 2, "train_args": [], "tolerance": 0.01}
    return Namespace(**fields)


def test_table_says_what_is_converged_and_what_is_gained(tmp_path):
    script, args = load_example("ablations"), script_arguments(tmp_path)
    for name, lengths, steps in (("dflash", (1.9, 2.0), 6), ("dspine", (2.495, 2.5), 6), ("rank-64", (2.3, 2.2), 4)):
        evaluation = {"eval_greedy_accepted_length": lengths[-1], "eval_greedy_slot_1_acceptance": 0.5}
        log = [{"step": 3, "loss": 4.0, "loss_refined": 3.0}]
        log += [{"step": 3 * i + 3, "eval_greedy_accepted_length": value} for i, value in enumerate(lengths)]
        report = {"log": log, "packing": {"tokens": 100, "rows": 2}, "evaluation": evaluation, "steps": steps}
        report |= {"max_steps": 6, "train_seconds": 1.0, "drafter_parameters": 10}
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.json").write_text(json.dumps(report))
    rows = script.collect(args)["rows"]
    assert [rows[name]["converged"] for name in ("dspine", "dflash", "rank-64")] == [True, False, False]
    assert rows["dspine"]["tokens_seen"] == 300
    written = (tmp_path / "ablations.md").read_text().splitlines()
    assert "+25.0%" in written[2] and "yes (+0.2%)" in written[2] and "no (+5.3%)" in written[3]
    assert len(written) == 5


@pytest.mark.slow
def test_rows_run_are_skipped_and_give_a_table(tmp_path, capfd):
    pandas = pytest.importorskip("pandas")
    target = tiny_target()
    target.save_pretrained(tmp_path / "target")
    pandas.DataFrame([{**record, "source": "tiny"} for record in answers(target, count=12)]).to_parquet(
        tmp_path / "data.parquet"
    )
    words = f"""--target_dtype float32 --mask_token_id {MASK_ID} --num_hidden_layers 2 --block_size 6 --transfer_rank 8
        --tokens_per_batch 256 --max_anchors 30 --bf16 false --compile_drafter false --compile_target false
        --dataloader_num_workers 0 --dataloader_persistent_workers false --use_cpu --optim adamw_torch""".split()
    options = f"""--target {tmp_path}/target --data {tmp_path}/dat*.parquet --eval-data greedy={tmp_path}/data.parquet --out {tmp_path}/out
        --rows dspine dflash --steps 4 --evaluations 2 --candidates 2 4 --guidances 0.5 --row-minimum 1 --margin 5""".split()
    options += ["--gpus", "", *(f"--train-args={word}" for word in words)]
    script = load_example("ablations")
    report = script.main(options)
    assert set(report["rows"]) == {"dspine", "dflash", "candidates-2", "candidates-4", "guidance-0.5"}
    assert report["rows"]["dspine"]["steps"] == 4 and len(report["rows"]["dspine"]["curve"]["greedy"]) == 2
    assert not list((tmp_path / "out" / "dspine").glob("checkpoint-*"))
    capfd.readouterr()
    assert script.main(options)["rows"] == report["rows"]
    assert capfd.readouterr().out.count("finished before") == 2
