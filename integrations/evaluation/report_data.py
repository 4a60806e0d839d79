"""What a report is made of: summaries of benchmark runs and of training runs, read from their files, and what their parts are called."""

import json
from dataclasses import dataclass
from pathlib import Path


NAMES = {"target": "target alone", "prompt_lookup": "prompt lookup"}
SET_NAMES = {
    "gsm8k": "GSM8K",
    "math500": "MATH-500",
    "humaneval": "HumanEval",
    "mbpp": "MBPP",
    "livecodebench": "LiveCodeBench",
    "mt-bench": "MT-Bench",
    "arena-hard-v2": "Arena-Hard",
}
# slots reached less often than this say nothing
FEWEST_ROUNDS = 20


@dataclass
class Run:
    """A results folder's summary, under the name it has in the report."""

    name: str
    summary: dict

    @property
    def cells(self) -> list[dict]:
        return self.summary["cells"]

    @property
    def is_served(self) -> bool:
        return self.summary["settings"].get("backend") == "sglang"

    @property
    def is_crowded(self) -> bool:
        """Whether processes shared devices: lengths and texts are as they would be alone, times are not."""
        versions = self.summary["versions"]
        return versions.get("processes", 1) > versions.get("devices", versions.get("processes", 1))

    def drafters(self, temperature: float | None = None, block_size: int | None = None) -> list[dict]:
        return [
            cell
            for cell in self.cells
            if cell["kind"] == "drafter"
            and cell.get("mean_of_sets")
            and temperature in (None, cell["temperature"])
            and block_size in (None, cell["block_size"])
        ]

    def ranked(self, temperature: float | None = None, block_size: int | None = None) -> list[dict]:
        """The drafters' cells, the longest accepted first."""
        cells = self.drafters(temperature, block_size)
        return sorted(cells, key=lambda cell: -cell["mean_of_sets"]["accepted_length"])

    @property
    def temperatures(self) -> list[float]:
        return sorted({cell["temperature"] for cell in self.cells})

    @property
    def main_block_size(self) -> int | None:
        """The block size that the main comparison uses: the largest that most drafters have."""
        sizes = [cell["block_size"] for cell in self.drafters()]
        return max(sizes, key=lambda size: (sizes.count(size), size or 0), default=None)


def load_run(path: str | Path, name: str | None = None) -> Run:
    """A results folder or its `summary.json`.

    Raises:
        FileNotFoundError: there is no summary; the message says how to get one.
        ValueError: the file is no summary of a benchmark run.
    """
    path = Path(path)
    file = path / "summary.json" if path.is_dir() or not path.suffix else path
    if not file.is_file():
        raise FileNotFoundError(
            f"no {file.name} in {file.parent}: examples/benchmark.py writes it at the end of a run"
        )
    summary = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(summary, dict) or "cells" not in summary or "settings" not in summary:
        raise ValueError(f"{file} is no summary of examples/benchmark.py: it has no cells")
    return Run(name or file.parent.resolve().name, summary)


def load_training(path: str | Path) -> dict:
    """`metrics.json` of a training run, or the folder it is in.

    Raises:
        FileNotFoundError, ValueError: it is not there, or is something else.
    """
    path = Path(path)
    file = path / "metrics.json" if path.is_dir() else path
    report = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(report, dict) or "log" not in report:
        raise ValueError(f"{file} is no metrics.json of examples/train.py: it has no log")
    return report


def shown(method: str) -> str:
    """A method's name for the reader."""
    return NAMES.get(method, method)


__all__ = ["FEWEST_ROUNDS", "NAMES", "SET_NAMES", "Run", "load_run", "load_training", "shown"]
