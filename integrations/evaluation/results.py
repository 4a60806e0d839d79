"""Results of a benchmark run: one JSON line per request, written so that a killed run loses at most the request in hand, and their
summary.

A folder holds `run.json` (the settings and versions), `results-<rank>.jsonl` (the requests) and `summary.json`. A request is skipped
when its key is there already. Settings that change results must stay the same in a folder; drafters, sets, temperatures and block
sizes may be added to it.
"""

import hashlib
import json
import os
from collections import defaultdict
from pathlib import Path

from .acceptance import gain, mean_over_sets, summarise


# what identifies a request's result: equal keys, equal results (up to the clock)
KEY = ("method", "fingerprint", "dataset", "index", "prompt", "temperature", "block_size", "seed", "concurrency")
# what makes a cell of the scoreboard
CELL = ("backend", "method", "temperature", "block_size", "concurrency")


def assisted_name(drafter: str) -> str:
    """What a drafter is called in Transformers' own assisted generation."""
    return f"{drafter} in Transformers' loop"


def settings_hash(settings: dict) -> str:
    """Twelve hex digits of settings, independent of their order."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:12]


def fingerprint(folder: str | Path) -> str:
    """Twelve hex digits of a checkpoint folder's configuration and weights, so that a retrained drafter is not taken for the old one."""
    digest = hashlib.sha256()
    folder = Path(folder)
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        if path.is_file():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:12]


def read_lines(path: Path) -> list[dict]:
    """All whole records of a file; a line cut off by a crash is left out."""
    records = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").split("\n"):
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict):
                records.append(record)
    return records


def write_json(path: Path, value) -> None:
    """Writes beside the file and renames, so that a reader or a crash never sees half of it."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value, indent=1, default=str), encoding="utf-8")
    temporary.replace(path)


class ResultStore:
    """The results folder of a run as one process sees it.

    Args:
        folder: made if it is not there.
        settings: what every result depends on; compared with the folder's.
        rank: of this process, which writes a file of its own.

    Raises:
        ValueError: the folder holds results of other settings; the message names what differs.
    """

    def __init__(self, folder: str | Path, settings: dict, rank: int = 0):
        self.folder, self.rank = Path(folder), rank
        self.folder.mkdir(parents=True, exist_ok=True)
        self.hash = settings_hash(settings)
        run = self.folder / "run.json"
        if run.is_file():
            old = json.loads(run.read_text(encoding="utf-8")).get("settings", {})
            new = json.loads(json.dumps(settings, default=str))
            differ = [
                f"{k}: {old.get(k)!r} there, {new.get(k)!r} now"
                for k in sorted({*old, *new})
                if old.get(k) != new.get(k)
            ]
            if differ:
                raise ValueError(
                    f"{self.folder} holds results of other settings ({'; '.join(differ)}); choose another folder"
                )
        self.path = self.folder / f"results-{rank}.jsonl"
        self.done = {self.key(record) for record in self.records()}
        self._file = None

    @staticmethod
    def key(record: dict) -> tuple:
        return tuple(record.get(name) for name in KEY)

    def records(self) -> list[dict]:
        """All records in the folder, of every process and earlier run, once each."""
        found = {}
        for path in sorted(self.folder.glob("results-*.jsonl")):
            for record in read_lines(path):
                if record.get("settings") == self.hash:
                    found[self.key(record)] = record
        return list(found.values())

    def add(self, *records: dict) -> None:
        """Appends records and waits once until they are on disk."""
        if self._file is None:
            # a line that a crash cut off must not swallow the next one
            cut = self.path.is_file() and self.path.stat().st_size and not self.path.read_bytes().endswith(b"\n")
            self._file = self.path.open("a", encoding="utf-8")
            if cut:
                self._file.write("\n")
        self._file.write("".join(json.dumps(record | {"settings": self.hash}) + "\n" for record in records))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done.update(map(self.key, records))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _rounds(record: dict) -> list[int]:
    """Round lengths; of a server that only counts its rounds, lengths of the right sum and number (their slots mean nothing)."""
    if record.get("accepted_lengths") is not None:
        return record["accepted_lengths"]
    if record.get("rounds"):
        # the token of the prefill belongs to no round
        share, rest = divmod(max(record["new_tokens"] - 1, record["rounds"]), record["rounds"])
        return [share + 1] * rest + [share] * (record["rounds"] - rest)
    return []


def _speed(records: list[dict]) -> dict:
    """Tokens per second: of all tokens over all seconds, and of the requests that ran at the same time over the wall clock."""
    tokens = sum(record["new_tokens"] for record in records)
    seconds = sum(record["seconds"] for record in records)
    walls = {}
    for record in records:
        if record.get("wall_seconds") is not None:
            walls[(record["dataset"], record["seed"])] = (record["wall_seconds"], record["wall_tokens"])
    if walls:
        wall, served = (sum(part) for part in zip(*walls.values()))
        return {"tokens_per_second": served / wall, "tokens_per_second_of_a_request": tokens / seconds}
    return {"tokens_per_second": tokens / seconds if seconds else None}


def summarise_records(records: list[dict], num_resamples: int = 1000, confidence: float = 0.95) -> dict:
    """The scoreboard of a run.

    Returns:
        `cells`: per backend, method, temperature, block size and concurrency, the means over sets, `sets` with every set's numbers, all
            slots' acceptance, tokens per second, and the speed-up over the target alone and over prompt lookup measured on the same
            requests in the same run.
        `gains`: every drafter against every other one at the same temperature and block size, on the requests both have.
    """
    groups: dict[tuple, list[dict]] = defaultdict(list)
    for record in records:
        groups[tuple(record.get(name) for name in CELL)].append(record)
    options = {"num_resamples": num_resamples, "confidence": confidence}
    cells, by_request = [], {}
    for key in sorted(groups, key=str):
        part = groups[key]
        cell = dict(zip(CELL, key)) | {"kind": part[0]["kind"], "requests": len(part), **_speed(part)}
        cell["new_tokens"] = sum(record["new_tokens"] for record in part)
        cell["batch_size"] = part[0].get("batch_size")
        cell["label"] = part[0].get("label") or part[0]["method"]
        exact = [record["exactness"] for record in part if record.get("exactness")]
        if exact:
            gaps = [e["gap"] for e in exact if e.get("gap") is not None]
            cell["exactness"] = {
                "compared": len(exact),
                "equal": sum(e["equal"] for e in exact),
                "faults": sum(bool(e.get("fault")) for e in exact),
                "largest_gap": max(gaps, default=0.0),
            }
        sets: dict[str, dict] = defaultdict(dict)
        for record in part:
            sets[record["dataset"]][(record["index"], record["seed"])] = record
        rounds = {name: {k: _rounds(r) for k, r in rows.items()} for name, rows in sorted(sets.items())}
        known = all(record.get("accepted_lengths") is not None for record in part)
        limit = key[CELL.index("block_size")]
        cell["sets"] = {}
        for name, rows in sorted(sets.items()):
            entry = {"requests": len(rows), **_speed(list(rows.values()))}
            if any(rounds[name].values()):
                entry |= summarise(list(rounds[name].values()), limit if known else None, **options)
            cell["sets"][name] = entry
        having = {name: list(rows.values()) for name, rows in rounds.items() if any(rows.values())}
        if having:
            cell["mean_of_sets"] = mean_over_sets(having, **options)
            everything = summarise(
                [row for rows in having.values() for row in rows], limit if known else None, **options
            )
            if not known:
                everything = {name: value for name, value in everything.items() if not name.startswith("slot_")}
            cell["all"] = everything
        cells.append(cell)
        by_request[key] = (cell, sets, rounds)
    _add_speed_ups(by_request)
    gains = []
    drafted = [(key, cell, rounds) for key, (cell, _, rounds) in by_request.items() if cell["kind"] == "drafter"]
    for key, cell, rounds in drafted:
        for other_key, other, other_rounds in drafted:
            same = all(cell[name] == other[name] for name in CELL if name != "method")
            if key == other_key or not same:
                continue
            try:
                value = gain(rounds, other_rounds, **options)
            except ValueError:
                continue
            where = {name: cell[name] for name in CELL if name != "method"}
            gains.append({"method": cell["method"], "over": other["method"], **where, **value})
    return {"cells": cells, "gains": gains}


def _add_speed_ups(by_request: dict) -> None:
    """`speed_up` of every cell over baselines of the same backend, temperature and concurrency, on the requests that both have."""
    for cell, sets, _ in by_request.values():
        cell["speed_up"] = {}
        for base, base_sets, _ in by_request.values():
            if base["kind"] not in ("target", "prompt_lookup", "assisted") or base is cell:
                continue
            if base["kind"] == "assisted" and base["method"] != assisted_name(cell["method"]):
                continue
            if any(base[name] != cell[name] for name in ("backend", "temperature", "concurrency", "batch_size")):
                continue
            ours, theirs = [], []
            for name, rows in sets.items():
                for request in rows.keys() & base_sets.get(name, {}).keys():
                    ours.append(rows[request])
                    theirs.append(base_sets[name][request])
            speeds = [_speed(records)["tokens_per_second"] if records else None for records in (ours, theirs)]
            if all(speeds):
                cell["speed_up"][base["kind"]] = speeds[0] / speeds[1]


__all__ = [
    "CELL",
    "KEY",
    "ResultStore",
    "assisted_name",
    "fingerprint",
    "read_lines",
    "settings_hash",
    "summarise_records",
    "write_json",
]
