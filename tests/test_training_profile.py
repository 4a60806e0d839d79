"""The profiling script on a shape that a CPU can do."""

import json
import signal

import pytest
from conftest import load_example


@pytest.fixture
def parts():
    return load_example("training_profile.parts")


@pytest.fixture
def script(parts):
    return load_example("profile_training")


def test_profile_of_a_tiny_shape(script, tmp_path):
    options = "--sections tiny --device cpu --no-compile --steps 1 --warmup 0 --table 2 --trainer-steps 1"
    report = script.main([*options.split(), "--out", str(tmp_path / "profile.json")])
    section = report["sections"]["tiny"]
    for name in ("dspine", "target", "trainer_dspine"):
        assert "error" not in section[name], section[name]
    assert section["target"]["layers"] == 6  # up to the last tap
    assert section["trainer_dspine"]["whole_step_ms"] > 0 and len(section["dspine"]["kernels"]) == 2
    assert json.loads((tmp_path / "profile.json").read_text()) == report


def test_profile_of_distances_and_of_a_part_out_of_time(script, parts, tmp_path, monkeypatch):
    out, slow, seen = tmp_path / "profile.json", parts.back_to_back, []

    def back_to_back(step, count, device):
        seen.append(json.loads(out.read_text())["sections"]["tiny"])
        if len(seen) == 2:
            signal.raise_signal(signal.SIGALRM)  # the clock runs out here, however fast the machine is
        return slow(step, count, device)

    monkeypatch.setattr(parts, "back_to_back", back_to_back)
    options = "--sections tiny --device cpu --no-compile --steps 1 --warmup 0 --table 0 --target-layers 0"
    options += " --part-limit 900 --drafters dspine-kl dflash dflash-kl"
    report = script.main([*options.split(), "--out", str(out)])
    section = report["sections"]["tiny"]
    for name in ("dspine-kl", "dflash-kl"):
        assert "error" not in section[name] and section[name]["step_back_to_back_ms"] > 0, section[name]
    # the figures it had stay, and were on disk before it ended
    assert section["dflash"]["error"] == "OutOfTime: ran past 900 s" and section["dflash"]["step"]["median_ms"] > 0
    assert seen[1]["dflash"]["step"] == section["dflash"]["step"]
    assert json.loads(out.read_text()) == report
