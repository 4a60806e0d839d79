"""The benchmark of the kernels on a CPU: its arithmetic, and whole runs on toy sizes with the references in place of the kernels and a
clock that counts calls."""

import importlib
import json
import math
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, load_example

from dspine.modeling_dspine import reference_dspine as reference


pytest.importorskip("triton")
MODULES = "draft_pass first_calls floors output rounds serving shapes sweep timing training".split()
STORED = ROOT / "examples" / "results" / "kernels_h200.json"


@pytest.fixture
def parts():
    """Every module of `examples/kernel_benchmark/`."""
    return SimpleNamespace(**{name: load_example(f"kernel_benchmark.{name}") for name in MODULES})


@pytest.fixture
def script(parts):
    return load_example("benchmark_kernels")


def bytes_of(*tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# ---- arithmetic -----------------------------------------------------------------------------------------------------------------


def test_work_of_an_injection_is_its_tensors(parts):
    shape = SimpleNamespace(d=64, r=8, K=4, V=100, B=6)
    work = parts.floors.serving_work(shape, 3)
    x, feature, down, up, square = (
        torch.empty(size, dtype=torch.bfloat16) for size in ((18, 64), (18, 8), (8, 64), (64, 16), (64, 8))
    )
    # the stream in and out, the features, the three matrices; every element of a matrix meets every slot
    assert work["injection"]["bytes"] == bytes_of(x, x, feature, down, up, square)
    assert work["injection"]["flops"] == 2 * 18 * (down.numel() + up.numel() + square.numel())
    assert work["select_candidates"] == {"bytes": bytes_of(torch.empty(3, 5, 100, dtype=torch.bfloat16)), "flops": 0}
    scores, tokens = torch.empty(3, 5, 4, 4, dtype=torch.bfloat16), torch.empty(3, 5, 4, dtype=torch.int32)
    assert work["walk_transition_cache"] == {"bytes": bytes_of(scores, tokens), "flops": 0}
    twice = parts.floors.serving_work(shape, 6)
    assert twice["transition_cache"]["flops"] == 2 * work["transition_cache"]["flops"]
    assert parts.floors.backward_work(shape, 18)["flops"] == 2 * work["injection"]["flops"]


@pytest.mark.parametrize(("flops", "bound"), [(1e6, 2.0), (8e9, 8.0)], ids=["memory", "arithmetic"])
def test_time_against_the_floor(parts, flops, bound):
    ceilings = {"copy_bytes_per_s": 4e12, "matmul_flops_per_s": 1e15}
    found = parts.floors.against_floor(16.0, {"bytes": 8_000_000, "flops": flops}, ceilings)
    assert found["us"] == 16 and found["memory_floor_us"] == pytest.approx(2)
    assert found["arithmetic_floor_us"] == pytest.approx(flops / 1e9)
    assert found["times_floor"] == pytest.approx(16 / bound)
    assert found["achieved_TB_per_s"] == pytest.approx(0.5)
    assert found["achieved_TFLOP_per_s"] == pytest.approx(flops / 16e6)


def test_times_are_medians_in_microseconds(parts, monkeypatch):
    clock = SimpleNamespace(ms=0.0)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock.ms

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return end.at - self.at

    calls = {"quick": 0, "slow": 0}

    def launch(name, ms):
        def run():
            calls[name] += 1
            # two of nine rounds are disturbed, which a median does not see
            clock.ms += ms * (10 if 404 < calls[name] < 805 else 1)

        return run

    monkeypatch.setattr(torch.cuda, "Event", Event)
    functions = {"quick": launch("quick", 0.01), "slow": launch("slow", 2.0)}
    us = parts.timing.interleaved_times(functions, rounds=9, target_ms=4)
    assert us["quick"] == pytest.approx(10) and us["slow"] == pytest.approx(2000)
    # as many calls as fill the time asked for, from two to two hundred
    assert calls["slow"] == 4 + 9 * 2 and calls["quick"] == 4 + 9 * 200

    graph = SimpleNamespace(replay=functions["quick"])
    monkeypatch.setattr(parts.timing, "capture", lambda function, unroll: graph)
    calls["quick"] = 805
    assert parts.timing.graph_times({"x": None}, unroll=4, rounds=3)["x"] == pytest.approx(2.5)


def test_backward_is_what_both_take_less_the_forward(parts, monkeypatch):
    monkeypatch.setattr(parts.training, "capture", lambda function, gradients: SimpleNamespace(replay=function))
    monkeypatch.setattr(parts.training, "interleaved_times", lambda graphs, **how: {"forward": 3.0, "both": 10.0})
    assert parts.training.training_times(None, [], []) == {"forward": 3.0, "backward": 7.0}


# ---- the command ----------------------------------------------------------------------------------------------------------------


def test_arguments(script, capsys):
    args = script.parse_arguments(["--output", "x.json"])
    assert args.batches == [1, 8, 32, 64] and args.budget == 210 and not (args.sweep or args.tiny or args.first_calls)
    with pytest.raises(SystemExit) as stopped:
        script.main(["--help"])
    assert stopped.value.code == 0 and "--rival" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        script.main([])
    assert "--output" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_needs_a_gpu(script, tmp_path):
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        script.main(["--output", str(tmp_path / "x.json")])
    assert not list(tmp_path.iterdir())


class Toy:
    """What a run on a CPU stands in for: tensors, operations, graphs and the clock."""

    def __init__(self, monkeypatch, parts, script):
        self.graphs = 0
        modules = [script, *vars(parts).values()]
        for name in ("normal", "kernel_operations", "capture", "interleaved_times", "graph_times"):
            for module in modules:
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, getattr(self, name))
        sizes = {"d": 64, "intermediate": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "V": 300, "r": 16}
        shape = SimpleNamespace(**sizes, verifier_layers=2, B=6, K=4, L=2, context=8, training_blocks=4)
        monkeypatch.setattr(script, "make_shape", lambda tiny: shape)
        self.shape = shape
        monkeypatch.setattr(script, "measure_first_calls", lambda report, *_: report.update(first_call={"a": 1.0}))
        monkeypatch.setattr(torch, "compile", lambda function, **how: function)
        monkeypatch.setattr(torch._dynamo, "reset", lambda: None)
        for name in ("is_available", "get_device_name", "synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, {"is_available": lambda: True}.get(name, lambda: "toy"))
        monkeypatch.setattr(torch.profiler, "profile", lambda activities: Profile())

    def normal(self, *shape, scale=0.02, mean=0.0):
        return torch.empty(shape, dtype=torch.bfloat16).normal_(mean, scale)

    def kernel_operations(self):
        return SimpleNamespace(**reference.REFERENCES)

    def capture(self, function, unroll=1, gradients=False):
        with torch.set_grad_enabled(gradients):
            function()
        self.graphs += 1
        return SimpleNamespace(replay=lambda: None)

    def interleaved_times(self, launches, **how):
        """Some microseconds for each, in the order given."""
        return {name: 100.0 + i for i, name in enumerate(launches)}

    def graph_times(self, functions, unroll=1, **how):
        for function in functions.values():
            self.capture(function)
        return self.interleaved_times(functions)


class Profile:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False

    def key_averages(self):
        return [SimpleNamespace(key=key, device_time_total=us) for key, us in (("a", 3), ("b" * 90, 30), ("a", 6))]


@pytest.fixture
def toy(monkeypatch, parts, script):
    # what timing a backward sets for its process
    with torch._functorch.config.patch(donated_buffer=torch._functorch.config.donated_buffer):
        yield Toy(monkeypatch, parts, script)


def keys(value, depth=4):
    """The names in a report, without those of batches, since other runs have others."""
    if not isinstance(value, dict) or not depth:
        return None
    return {name if not name.isdigit() else "N": keys(part, depth - 1) for name, part in value.items()}


def test_whole_run_has_the_figures_of_the_stored_one(script, toy, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out, image = tmp_path / "deep" / "x.json", tmp_path / "x.png"
    script.main(["--output", str(out), "--tiny", "--batches", "1", "2", "--plot", str(image), "--budget", "1e9"])
    report, stored = json.loads(out.read_text()), json.loads(STORED.read_text())
    assert report["errors"] == {} and list(out.parent.iterdir()) == [out] and image.stat().st_size > 1000
    for name in ("shape", "serving", "ceilings", "rounds"):
        # the walk is compiled at batch 1 only
        there = stored[name] if name != "serving" else {"1": stored[name]["1"]}
        here = report[name] if name != "serving" else {"1": report[name]["1"]}
        assert keys(here) == keys(there), name
    assert report.keys() == stored.keys() and report["training"].keys() == stored["training"].keys()
    serving = report["serving"]["1"]
    us = serving["us"]
    assert us["injections_in_draft"] == us["draft_with_injections"] - us["draft"] == 1
    assert serving["injections_share"] == 1 / 100 and serving["tail_share"] == us["tail"] / 100
    floor = serving["floors"]["injection"]
    assert floor["us"] == 1 / toy.shape.L and floor["times_floor"] > 0
    assert serving["agreement"]["tokens_equal"] and serving["agreement"]["injection_relative_error"] < 0.02
    assert report["rounds"]["2"]["extra"] == pytest.approx(1 / 100)
    assert report["training"]["kernels_us"] == {"b" * 80: 10, "a": 3}
    assert {"serving_1", "eager_2", "compiled_2", "rounds", "plot"} <= report["section_s"].keys()
    shown = capsys.readouterr().out
    assert "five injections 1.0 us = 1.00%" in shown and "errors: none" in shown


def test_sections_that_fail_leave_the_others(script, toy, parts, tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("no room")

    monkeypatch.setattr(script, "measure_ceilings", fail)
    monkeypatch.setattr(script, "measure_training", fail)
    out = tmp_path / "x.json"
    monkeypatch.setattr(script, "measure_rounds", lambda report, *_: report.update(seen=json.loads(out.read_text())))
    script.main(["--output", str(out), "--tiny", "--batches", "1"])
    report = json.loads(out.read_text())
    # without ceilings there are no floors; the times are kept
    assert report["errors"].keys() == {"ceilings", "serving_1", "training"}
    assert "RuntimeError: no room" in report["errors"]["training"]
    assert report["serving"]["1"]["us"]["draft"] == 100 and "eager_1" in report["section_s"]
    assert "training" in report["seen"]["section_s"], "on disk after every section"
    assert "training failed: RuntimeError: no room" in capsys.readouterr().out


def test_sweep_names_winners(script, toy, tmp_path, monkeypatch):
    from dspine.kernels import injection, launch

    before = injection.forward_config, launch._has_dependent_launch
    spent = iter([50.0, 40.0, 30.0, 60.0] + [70.0] * 99)
    monkeypatch.setattr(toy, "interleaved_times", lambda functions, **how: {name: next(spent) for name in functions})
    monkeypatch.setattr(
        sys.modules["kernel_benchmark.sweep"], "training_times", lambda *_, **how: {"forward": 1.0, "backward": 2.0}
    )
    out = tmp_path / "x.json"
    script.main(["--sweep", "--output", str(out), "--tiny", "--batches", "1"])
    report = json.loads(out.read_text())
    assert report["errors"] == {} and report["shape"]["L"] == toy.shape.L == 2
    found = report["sweep"]["injection, batch 1"]
    # per injection: a run goes through sixteen layers
    assert found["us"]["table"] == 50 / 16 and found["winner"] == "32 channels"
    assert found["us"]["32 channels"] == 30 / 16 and max(found["relative_error"].values()) < 0.02
    assert report["sweep"]["training, forward and backward"]["parts"] == [{"forward": 1.0, "backward": 2.0}] * 3
    assert (injection.forward_config, launch._has_dependent_launch) == before


def test_rival_is_the_other_folders_code(parts, tmp_path, monkeypatch):
    kernels = importlib.import_module("dspine.kernels.walk_transition_cache")
    folder = tmp_path / "kernels"
    folder.mkdir()
    operators = []
    for name in ("injection", "select_candidates", "transition_cache", "walk_transition_cache"):
        function = "gated_adjacent_injection" if name == "injection" else name
        register = f'custom_op("dspine::{function}")'
        (folder / f"{name}.py").write_text(
            f"import rival_seen\nrival_seen.{register}\n\n\ndef {function}():\n    return {name!r}\n"
        )
    seen = types.ModuleType("rival_seen")
    seen.custom_op = operators.append
    monkeypatch.setitem(sys.modules, "rival_seen", seen)
    try:
        rival = parts.sweep.import_rival(folder)
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "rival_kernels"]:
            del sys.modules[name]
    assert rival.gated_adjacent_injection() == "injection" and rival.select_candidates() == "select_candidates"
    assert rival.walk_transition_cache is not kernels.walk_transition_cache
    assert operators and all(name.startswith("dspine_rival::") for name in operators)


def test_first_calls_come_from_a_process_of_its_own(parts, monkeypatch):
    first_calls, seen = parts.first_calls, {}

    def run(command, env, timeout, **how):
        seen.update(command=command, cache=env["TRITON_CACHE_DIR"], timeout=timeout)
        path = command[command.index("--output") + 1]
        with open(path, "w") as file:
            json.dump({"walk, 16 slots": 0.5}, file)

    monkeypatch.setattr(first_calls.subprocess, "run", run)
    report = {}
    first_calls.measure_first_calls(report, None, SimpleNamespace(tiny=True))
    assert report == {"first_call": {"walk, 16 slots": 0.5}}
    script = str(ROOT / "examples" / "benchmark_kernels.py")
    assert seen["command"][1:3] == [script, "--first-calls"] and seen["command"][-1] == "--tiny"
    assert "dspine-first-" in seen["cache"] and seen["timeout"] < math.inf
    args = load_example("benchmark_kernels").parse_arguments(seen["command"][2:])
    assert args.first_calls and args.tiny, "the command is one that the script takes"


def test_table_of_the_stored_report(parts, capsys):
    parts.output.print_table(json.loads(STORED.read_text()))
    shown = capsys.readouterr().out
    assert "NVIDIA H200: copy 4.25 TB/s" in shown and "batch 64: draft pass" in shown and "errors: none" in shown


def test_shapes(parts):
    small, large = parts.shapes.make_shape(True), parts.shapes.make_shape(False)
    assert vars(small).keys() == vars(large).keys() and vars(large) == json.loads(STORED.read_text())["shape"]
    for shape in (small, large):
        assert shape.heads % shape.kv_heads == 0 and shape.K <= shape.V
