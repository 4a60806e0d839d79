"""The script that compares decoding settings: its rows, and what it writes. The ablation test runs it whole."""

import json
from types import SimpleNamespace

import pytest
from conftest import load_example


def test_every_row_changes_one_setting():
    config = SimpleNamespace(num_candidates=16, refinement_guidance=0.1)
    assert load_example("tune_decoding").settings(config, [4], [0.0, 0.25]) == {
        "candidates-4": {"num_candidates": 4, "refinement_guidance": 0.1},
        "guidance-0": {"num_candidates": 16, "refinement_guidance": 0.0},
        "guidance-0.25": {"num_candidates": 16, "refinement_guidance": 0.25},
    }


def test_the_best_guidance_is_written(tmp_path):
    script = load_example("tune_decoding")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "dspine", "refinement_guidance": 0.0}))
    lengths = {"candidates-4": 9.0, "guidance-0": 4.0, "guidance-0.25": 4.2, "guidance-0.5": 4.1}
    # the first set decides
    result = {
        name: {"eval_greedy_accepted_length_per_request": value, "eval_t1_accepted_length_per_request": -value}
        for name, value in lengths.items()
    }
    assert script.write_best(tmp_path, result) == 0.25
    assert json.loads((tmp_path / "config.json").read_text()) == {"model_type": "dspine", "refinement_guidance": 0.25}


@pytest.mark.parametrize(
    "options, message",
    [
        ("--candidates 4 --write", "--write needs --guidances"),
        ("--guidances 0.1 --write", "folder with config.json"),
        ("--guidances -0.1", "at least 0"),
        ("", "nothing to compare"),
    ],
)
def test_commands_without_sense_are_refused(options, message, capsys):
    with pytest.raises(SystemExit):
        load_example("tune_decoding").main(["--target", "t", "--drafter", "d", "--eval-data", "a=b", *options.split()])
    assert message in capsys.readouterr().err
