"""The profile of training steps: its clocks, limits, shapes and losses, without a step of a model."""

import json
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, load_example


@pytest.fixture
def parts():
    """Every module of `examples/training_profile/`."""
    names = "clocks limits parts shapes steps".split()
    return SimpleNamespace(**{name: load_example(f"training_profile.{name}") for name in names})


@pytest.fixture
def script(parts):
    return load_example("profile_training")


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves only when told."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: now.seconds)
    return now


CPU = torch.device("cpu")


# ---- clocks ---------------------------------------------------------------------------------------------------------------------


def test_milliseconds_of_timed_calls_only(parts, clock):
    spent = iter([9.0, 5.0, 0.25, 0.125, 4.0])

    def step():
        clock.seconds += next(spent)

    assert parts.clocks.milliseconds(step, 3, 2, CPU) == {"median_ms": 250, "min_ms": 125, "max_ms": 4000}
    assert next(spent, None) is None


def test_calls_back_to_back(parts, clock):
    spent = iter([1.0, 0.5, 0.25, 0.25])

    def step():
        clock.seconds += next(spent)

    assert parts.clocks.back_to_back(step, 4, CPU) == 500


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kernels_of_a_profile(parts, device):
    """Figures are by step, of the device asked for; the sum is over all kernels, also those not listed."""
    kinds = torch.autograd.DeviceType
    kind, other = (kinds.CUDA, kinds.CPU) if device == "cuda" else (kinds.CPU, kinds.CUDA)
    field = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"

    def event(key, us, count, kind=kind, **more):
        return SimpleNamespace(key=key, count=count, device_type=kind, **{field: us}, **more)

    events = [
        event("short", 2000, 4),
        event("x" * 150, 6000, 6),
        event("other", 9e9, 1, kind=other),
        event("step", 9e9, 1, is_user_annotation=True),
        event("shortest", 1000, 2, is_user_annotation=False),
    ]
    found = parts.clocks.kernels(SimpleNamespace(key_averages=lambda: events), 2, 2, torch.device(device))
    assert found == {
        "busy_ms": 4.5,
        "kernels": [
            {"name": "x" * 120, "ms_per_step": 3.0, "calls_per_step": 3.0},
            {"name": "short", "ms_per_step": 1.0, "calls_per_step": 2.0},
        ],
    }


def test_whole_steps_are_timed_between_warmup_and_profile(parts, clock):
    watch = parts.parts.StepClock(warmup=2, steps=3, profiled=1, device=CPU)
    entered = []
    watch.profile = SimpleNamespace(
        __enter__=lambda: entered.append(clock.seconds), __exit__=lambda *_: entered.append(clock.seconds)
    )
    for step, seconds in enumerate([9.0, 9.0, 0.5, 0.25, 0.75, 2.0], start=1):
        clock.seconds += seconds
        watch.on_step_end(None, SimpleNamespace(global_step=step), None)
    assert watch.milliseconds == 500 and entered == [19.5, 21.5] and watch.end + watch.profiled == 6


# ---- limits ---------------------------------------------------------------------------------------------------------------------


def test_time_limit_ends_a_part_and_is_put_back(parts):
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(parts.limits.OutOfTime, match="ran past 900 s"), parts.limits.time_limit(900):
        # not caught by what catches errors
        try:
            signal.raise_signal(signal.SIGALRM)
        except Exception:
            pytest.fail("the end of time is no error")
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL)[0] == 0
    with parts.limits.time_limit(0):
        assert signal.getsignal(signal.SIGALRM) is before


def test_attempts_keep_figures_and_errors(parts, clock, capsys):
    saved = []

    def part(result, save, more, fails):
        result["step"] = more
        clock.seconds += 2
        if fails:
            raise ValueError("x" * 600)

    for fails in (False, True):
        result = {}
        parts.limits.attempt(part, result, lambda result=result: saved.append(dict(result)), 0, 7, fails)
        assert saved[-1] == result and result["step"] == 7 and result["seconds"] == 2
    assert "error" not in saved[0] and saved[1]["error"] == "ValueError: " + "x" * 500
    assert "Traceback" in capsys.readouterr().err


# ---- shapes and losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen3-8b", "tiny"])
def test_drafters_of_every_shape(parts, name):
    section = parts.shapes.SHAPES[name]
    shape = SimpleNamespace(target=section["target"], overrides=section["drafter"], block_size=16)
    ours, plain = (parts.shapes.Shape.config(shape, kind) for kind in ("dspine-kl", "dflash-kl"))
    assert ours.injection and ours.refinement and not (plain.injection or plain.refinement)
    for config in (ours, plain):
        assert config.hidden_size == section["target"].hidden_size and config.block_size == 16
        assert config.num_hidden_layers == 5 and max(config.target_layer_ids) < section["target"].num_hidden_layers - 1
    assert ours.transfer_rank == section["drafter"]["transfer_rank"]
    assert section["anchors"] <= section["tokens"] and section["document"] <= section["tokens"]


def test_small_shape_is_the_one_that_was_trained(parts):
    trained = json.loads((ROOT / "examples" / "smollm2-135m-dspine" / "config.json").read_text())
    target = parts.shapes.SHAPES["smollm2-135m"]["target"]
    for field in ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads"):
        assert getattr(target, field) == trained[field], field


def test_rows_and_states_of_a_shape(parts):
    args = SimpleNamespace(device="cpu", block_size=8)
    shape = parts.shapes.Shape("tiny", args)
    # documents stay whole: five of 100 tokens in a row of 512
    assert len(shape.rows(3)) == 3 and shape.row["loss_mask"].sum() == 5 * 75
    assert shape.row["input_ids"].shape == (512,) and shape.row["input_ids"].max() < 300
    assert shape.states(2).shape == (1, 512, 128) and shape.final().shape == (1, 512, 64)
    assert shape.taps().shape[-1] == 64 * len(shape.config("dflash").target_layer_ids)
    assert not any(part.weight.requires_grad for part in (shape.embed, shape.head))


def test_distance_is_named_after_the_hyphen(parts):
    args = SimpleNamespace(cross_entropy="auto")
    plain, kl = (parts.steps.loss_arguments(kind, args) for kind in ("dspine", "dflash-kl"))
    assert plain.distance == "none" and kl.distance == "kl" and kl.refined_weight == 0 != plain.refined_weight
    with pytest.raises(ValueError, match="distance"):
        parts.steps.loss_arguments("dspine-far", args)


# ---- the command ----------------------------------------------------------------------------------------------------------------


def test_help_and_refusals(script, capsys):
    with pytest.raises(SystemExit) as stopped:
        script.main(["--help"])
    shown = capsys.readouterr().out
    assert stopped.value.code == 0 and "--part-limit" in shown and "smollm2-135m" in shown
    for options in (["--sections", "huge"], ["--drafters", "eagle"]):
        with pytest.raises(SystemExit):
            script.main(options)
        assert "invalid choice" in capsys.readouterr().err


def test_parts_and_their_order_in_the_file(script, tmp_path, monkeypatch, capsys):
    seen, out = [], tmp_path / "profile.json"

    def part(name):
        def run(result, save, *arguments):
            kind = arguments[0] if isinstance(arguments[0], str) else None
            seen.append((name, kind))
            result["kernels"] = [{"name": "k", "ms_per_step": 1.0, "calls_per_step": 2.0}]
            save()
            if kind == "dflash":
                raise RuntimeError("no room")
            result["ms"] = 1.5

        return run

    for name in ("time_step", "time_target", "time_trainer"):
        monkeypatch.setattr(script, name, part(name))
    options = "--sections tiny --device cpu --drafters dflash speculators --trainer-steps 2 --target-layers 1"
    report = script.main([*options.split(), "--out", str(out)])
    assert json.loads(out.read_text()) == report and [p.name for p in tmp_path.iterdir()] == ["profile.json"]
    section = report["sections"]["tiny"]
    assert (section["tokens"], section["anchors"], section["block_size"]) == (512, 16, 16)
    # their trainer is not ours to time
    kinds = ["dflash", "speculators"]
    assert seen == [("time_step", kind) for kind in kinds] + [("time_target", None), ("time_trainer", "dflash")]
    assert list(section)[3:] == [*kinds, "target", "trainer_dflash"]
    assert section["dflash"]["error"] == "RuntimeError: no room" and section["dflash"]["kernels"]
    assert section["target"]["ms"] == 1.5 and "error" in section["trainer_dflash"]
    shown = capsys.readouterr().out
    assert "1.000 ms    2.0 x k" in shown and '"kernels"' not in shown


def test_limited_target_keeps_its_width(parts):
    shape = SimpleNamespace(target=parts.shapes.SHAPES["tiny"]["target"], device=CPU, dtype=torch.float32)
    target = parts.parts.make_target(shape, 3)
    assert target.config.num_hidden_layers == len(target.model.layers) == 3
    assert target.config.hidden_size == shape.target.hidden_size and shape.target.num_hidden_layers == 8
