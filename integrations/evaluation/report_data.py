"""What a report is made of: summaries of benchmark runs, of training runs and of ablations, read from their files and named for readers."""

import json
from dataclasses import dataclass
from pathlib import Path


# what methods of a run are called on the page, unless the caller says otherwise
LABELS = {
    "target": "target alone",
    "prompt_lookup": "prompt lookup",
    "dspine": "DSpine",
    "small": "DSpine small",
    "dflash": "DFlash",
    "dflash2": "DFlash 2",
    "dspark": "DSpark",
    "domino": "Domino",
}
LINKED = "in every layer, each slot reads what its left neighbour predicts; each choice takes the token chosen before it into account"
PARALLEL = "all slots in parallel; none knows what the others propose"
# how drafters propose that were trained elsewhere or with parts switched off: by the kind of a peer, else by the name in the run
WAYS = {
    "dflash": PARALLEL,
    "dflash2": "as DFlash, with convolutions across slots and a head that scores pairs of neighbouring tokens",
    "dspark": "as DFlash, then each slot's scores are corrected by the token chosen before it",
    "domino": "as DFlash, then a small recurrent network reads the tokens chosen so far and corrects each slot's scores",
}
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
# what two drafters must share to be compared
PLACE = ("temperature", "block_size", "concurrency")


@dataclass
class Goal:
    """A gain in accepted length that `ours` should reach over the best of `others`, e.g. 0.25."""

    ours: str
    others: tuple[str, ...]
    share: float


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
        return self.summary["settings"].get("backend", "transformers") != "transformers"

    @property
    def is_crowded(self) -> bool:
        """Whether processes shared devices: lengths and texts are as they would be alone, times are not."""
        versions = self.summary["versions"]
        return versions.get("processes", 1) > versions.get("devices", versions.get("processes", 1))

    @property
    def device(self) -> str:
        return self.summary["versions"].get("device", "an unnamed machine")

    @property
    def temperatures(self) -> list[float]:
        return sorted({cell["temperature"] for cell in self.cells})

    @property
    def block_sizes(self) -> list[int | None]:
        return sorted({cell["block_size"] for cell in self.drafters()}, key=lambda size: -(size or 0))

    @property
    def main_block_size(self) -> int | None:
        """The block size that the main comparison uses: the largest that most drafters have."""
        sizes = [cell["block_size"] for cell in self.drafters()]
        return max(sizes, key=lambda size: (sizes.count(size), size or 0), default=None)

    @property
    def lowest_temperature(self) -> float:
        """The lowest one at which a drafter was measured."""
        return min(cell["temperature"] for cell in self.drafters())

    def drafters(self, temperature: float | None = None, block_size: int | None = None) -> list[dict]:
        return [
            cell
            for cell in self.cells
            if cell["kind"] == "drafter"
            and cell.get("mean_of_sets")
            and temperature in (None, cell["temperature"])
            and block_size in (None, cell["block_size"])
        ]

    def gains(self, cell: dict) -> list[dict]:
        """What a cell gains over all others in the same place, the nearest first."""
        parts = [g for g in self.summary.get("gains", []) if all(g[n] == cell[n] for n in ("method", *PLACE))]
        return sorted(parts, key=lambda part: part["accepted_length"])

    def ranked(self, temperature: float | None = None, block_size: int | None = None) -> list[dict]:
        """The drafters' cells at the lowest load, the longest accepted first.

        In a run that was cut, drafters have different prompts: which of two is ahead is decided on those that both have.
        """
        cells = self.drafters(temperature, block_size)
        lowest = min((cell["concurrency"] or 0 for cell in cells), default=0)
        cells = [cell for cell in cells if (cell["concurrency"] or 0) == lowest]
        wins = {id(cell): sum(part["accepted_length"] > 0 for part in self.gains(cell)) for cell in cells}
        return sorted(
            cells, key=lambda c: (-(c["block_size"] or 0), -wins[id(c)], -c["mean_of_sets"]["accepted_length"])
        )

    def sets(self, cells: list[dict]) -> list[str]:
        """Names of the cells' sets, in the order of the page."""
        names = {name for cell in cells for name in cell["sets"]}
        return [n for n in SET_NAMES if n in names] + sorted(names - set(SET_NAMES))


def read_json(file: Path, key: str, source: str) -> dict:
    """A JSON object that has `key`.

    Raises:
        FileNotFoundError, ValueError: it is not there, or is something else; the message says what writes it.
    """
    if not file.is_file():
        raise FileNotFoundError(f"no {file.name} in {file.parent}: {source} writes it at the end of a run")
    value = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(value, dict) or key not in value:
        raise ValueError(f"{file} is not written by {source}: it has no {key}")
    return value


def load_run(path: str | Path, name: str | None = None, labels: dict[str, str] | None = None) -> Run:
    """A results folder or its `summary.json`, with methods called as on the page.

    Raises:
        FileNotFoundError, ValueError: see [`read_json`].
    """
    labels, path = LABELS | (labels or {}), Path(path)
    file = path / "summary.json" if path.is_dir() or not path.suffix else path
    summary = read_json(file, "cells", "examples/benchmark.py")
    for part in [*summary["cells"], *summary.get("gains", [])]:
        for key in ("method", "over"):
            if key in part:
                drafter, *rest = part[key].partition(" in Transformers' loop")
                part[key] = labels.get(drafter, drafter) + "".join(rest)
    # what a drafter is does not depend on what the page calls it
    drafters = (summary.get("drafters") or {}).items()
    summary["drafters"] = {labels.get(k, k): {"kind": k} | v for k, v in drafters}
    return Run(name or file.parent.resolve().name, summary)


def load_training(path: str | Path, labels: dict[str, str] | None = None) -> dict:
    """`metrics.json` of a training run, or the folder it is in, with the drafter called as on the page.

    Raises:
        FileNotFoundError, ValueError: see [`read_json`].
    """
    path, labels = Path(path), LABELS | (labels or {})
    report = read_json(path / "metrics.json" if path.is_dir() else path, "log", "examples/train.py")
    return report | {"name": labels.get(report["name"], report["name"])}


def given_to(report: dict) -> tuple[dict, int]:
    """The arguments of a training run, and how many batches make one of its steps."""
    parts = report.get("arguments", {})
    given = {k: v for name in ("data", "loss", "training") for k, v in parts.get(name, {}).items()}
    return given, given.get("gradient_accumulation_steps", 1) * given.get("world_size", 1)


def tokens_seen(report: dict) -> int | None:
    """Tokens of a training run, prompts and padding included; None if its `metrics.json` does not say."""
    given, batches = given_to(report)
    tokens = given.get("tokens_per_batch")
    return tokens and tokens * batches * report["steps"]


def load_ablations(path: str | Path) -> dict:
    """`ablations.json` of `examples/ablations.py`.

    Raises:
        FileNotFoundError, ValueError: see [`read_json`].
    """
    return read_json(Path(path), "rows", "examples/ablations.py")


__all__ = [
    "FEWEST_ROUNDS",
    "LABELS",
    "LINKED",
    "PARALLEL",
    "PLACE",
    "SET_NAMES",
    "WAYS",
    "Goal",
    "Run",
    "given_to",
    "load_ablations",
    "load_run",
    "load_training",
    "tokens_seen",
]
