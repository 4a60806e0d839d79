"""The profiling script on a shape that a CPU can do."""

import json

from conftest import load_example


def test_profile_of_a_tiny_shape(tmp_path):
    options = "--sections tiny --device cpu --no-compile --steps 1 --warmup 0 --table 2 --trainer-steps 1"
    report = load_example("profile_training").main([*options.split(), "--out", str(tmp_path / "profile.json")])
    section = report["sections"]["tiny"]
    for name in ("dspine", "target", "trainer_dspine"):
        assert "error" not in section[name], section[name]
    assert section["target"]["layers"] == 6  # up to the last tap
    assert section["trainer_dspine"]["whole_step_ms"] > 0 and len(section["dspine"]["kernels"]) == 2
    assert json.loads((tmp_path / "profile.json").read_text()) == report
