"""The notebook runs from top to bottom, on the tiny target here and (slow) on the real one, and is stored without outputs."""

import json
import os
from pathlib import Path

import pytest
from conftest import load_example


NOTEBOOK = Path(__file__).parents[1] / "examples" / "train_and_push.ipynb"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def run(steps=None):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    load_example("push_to_hub")
    names = {"__name__": "__main__"}
    for number, cell in enumerate(CELLS):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
        if steps is not None and "steps" in names:
            names["steps"] = steps
    pushed = {path.name for path in (names["folder"] / "pushed").iterdir()}
    assert {"config.json", "model.safetensors", "README.md", "modeling_dspine.py"} <= pushed
    return names


def test_notebook_on_a_tiny_target(monkeypatch, tmp_path):
    monkeypatch.setenv("DSPINE_TINY", "1")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names = run()
    assert names["after"]["eval_accepted_length"] > names["before"]["eval_accepted_length"] + 0.3


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("DSPINE_SLOW") != "1", reason="takes two minutes on two cores; run with DSPINE_SLOW=1"
)
def test_notebook_on_the_real_target(monkeypatch, tmp_path, smollm2_target):
    monkeypatch.delenv("DSPINE_TINY", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run(steps=5)  # that it learns is seen above; a step takes seconds here


def test_notebook_holds_no_outputs():
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CELLS)
    assert os.path.expanduser("~") not in NOTEBOOK.read_text()
