"""Token sequences in, packed rows out.

A training sequence is a prompt and the target's own answer as token ids. `load_sequences` (in `conversations.py`) reads them,
`PackedDataset` packs whole sequences into rows of one fixed length and draws the anchors. Both count what they leave out
(`PackedDataset.report`).
"""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from .masks import pad_to_tiles


logger = logging.getLogger(__name__)


@dataclass
class TokenSequences:
    """Sequences with the positions that count as response. `loss_mask[i]` is True on response tokens; `sources` is optional,
    `report` counts what reading them left out, `thinking` holds the thinking modes that the data says it was generated with."""

    input_ids: list[np.ndarray] = field(default_factory=list)
    loss_mask: list[np.ndarray] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    report: Counter = field(default_factory=Counter)
    thinking: set[bool] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.input_ids)

    def every(self, limit: int | None) -> "TokenSequences":
        """At most `limit` sequences, evenly spaced, so that files sorted by source keep their mixture."""
        if not limit or limit >= len(self):
            return self
        chosen = [i * len(self) // limit for i in range(limit)]
        parts = ([values[i] for i in chosen] for values in (self.input_ids, self.loss_mask, self.sources))
        return TokenSequences(*parts, self.report, self.thinking)

    def __iadd__(self, other: "TokenSequences") -> "TokenSequences":
        self.input_ids += other.input_ids
        self.loss_mask += other.loss_mask
        self.sources += other.sources
        self.report.update(other.report)
        self.thinking |= other.thinking
        return self


def main_reason(report: Counter) -> str:
    """The most frequent `left_out_...` of a report."""
    left_out = {name: count for name, count in report.items() if name.startswith("left_out")}
    return max(left_out, key=left_out.get, default="no data")


def from_records(records: Iterable[dict]) -> TokenSequences:
    """Records (or a `datasets.Dataset`) with `input_ids` and either `prompt_length` or `loss_mask` (or `assistant_masks`).

    Raises:
        ValueError: a record has neither, or the mask's length is not that of the ids.
    """
    result = TokenSequences()
    for number, record in enumerate(records):
        ids = np.asarray(record["input_ids"], dtype=np.int64)
        mask = record.get("loss_mask", record.get("assistant_masks"))
        if mask is not None:
            mask = np.asarray(mask, dtype=bool)
        elif record.get("prompt_length") is not None:
            mask = np.arange(len(ids)) >= int(record["prompt_length"])
        else:
            raise ValueError(
                f"record {number} must have prompt_length or loss_mask beside input_ids, got columns {sorted(record)}"
            )
        if len(mask) != len(ids):
            raise ValueError(
                f"loss_mask of record {number} must have {len(ids)} entries like input_ids, got {len(mask)}"
            )
        result.input_ids.append(ids)
        result.loss_mask.append(mask)
        result.sources.append(str(record.get("source", "")))
    return result


def anchor_positions(loss_mask: np.ndarray, document_starts: np.ndarray) -> np.ndarray:
    """Row indices that can be anchors: response tokens followed by another response token of the same document."""
    follows = loss_mask[:-1] & loss_mask[1:] & (document_starts[:-1] == document_starts[1:])
    return np.flatnonzero(follows)


def draw_anchors(eligible: np.ndarray, count: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """`count` distinct anchors in ascending order, and which of them are real.

    The eligible positions are cut into `count` runs of (almost) equal length and one is drawn from each, so every document gets
    its share of anchors in proportion to its response, step by step and not just on average. With fewer eligible positions than
    `count` all are taken and the last one is repeated, marked as padding.
    """
    if len(eligible) >= count:
        borders = np.arange(count + 1) * len(eligible) // count
        chosen = borders[:-1] + (generator.random(count) * np.diff(borders)).astype(np.int64)
        return eligible[chosen], np.ones(count, dtype=bool)
    last = eligible[-1:] if len(eligible) else np.zeros(1, dtype=np.int64)
    padded = np.concatenate([eligible, np.repeat(last, count - len(eligible))])
    return padded, np.arange(count) < len(eligible)


class PackedDataset(Dataset):
    """Rows of `tokens_per_row` tokens holding whole sequences back to back, padded at the end.

    `dataset[row]` and `dataset[(epoch, row)]` give one row with anchors drawn from (seed, epoch, row) alone, hence the same in any
    worker, process or resumed run. Keys:

        input_ids, position_ids, document_starts `[L]` int64: `document_starts[i]` is the row index where token i's document
            begins; the padding is a document of its own without response.
        loss_mask `[L]` bool: response tokens.
        anchors `[A]` int64 ascending, anchor_mask `[A]` bool: False where there were too few positions.

    Args:
        sequences: what to pack.
        tokens_per_row: L, rounded up to a multiple of 128.
        num_anchors: A.
        max_length: sequences are cut here (default: L).
        mask_token_id: counted if it occurs in the data, where it would be mistaken for an empty slot.

    Raises:
        ValueError: nothing usable is left; the message holds the counts.
    """

    def __init__(
        self,
        sequences: TokenSequences,
        tokens_per_row: int,
        num_anchors: int,
        max_length: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        mask_token_id: int | None = None,
        pad_token_id: int = 0,
    ):
        self.length, self.num_anchors, self.seed = pad_to_tiles(tokens_per_row), num_anchors, seed
        self.pad_token_id = pad_token_id
        max_length = min(max_length or self.length, self.length)
        self.sequences = sequences
        self.report = Counter(sequences.report)
        self.report["sequences"] = len(sequences)
        order = np.random.default_rng(seed).permutation(len(sequences)) if shuffle else np.arange(len(sequences))
        self.rows: list[list[tuple[int, int]]] = []  # per row: (sequence, tokens used)
        used = self.length
        for index in order.tolist():
            size = self._usable(index, max_length, mask_token_id)
            if not size:
                continue
            if used + size > self.length:
                self.rows.append([])
                used = 0
            self.rows[-1].append((index, size))
            used += size
            self.report["tokens"] += size
        self.report["rows"] = len(self.rows)
        if not self.rows:
            raise ValueError(
                f"no sequence can be trained on, mostly because of {main_reason(self.report)}, got {dict(self.report)}"
            )
        logger.info(
            f"packed rows: {dict(self.report)}, {self.report['tokens'] / len(self.rows) / self.length:.1%} full"
        )

    def _usable(self, index: int, max_length: int, mask_token_id: int | None) -> int:
        """Tokens of a sequence to keep, 0 to leave it out; counts why."""
        ids, mask = self.sequences.input_ids[index], self.sequences.loss_mask[index]
        if not mask.any():
            self.report["left_out_empty_response"] += 1
            return 0
        size = min(len(ids), max_length)
        if not mask[:size].any():
            self.report["left_out_prompt_too_long"] += 1
            return 0
        if not (mask[: size - 1] & mask[1:size]).any():
            self.report["left_out_response_too_short"] += 1
            return 0
        self.report["cut_too_long"] += size < len(ids)
        if mask_token_id is not None and (ids[:size] == mask_token_id).any():
            self.report["contains_mask_token"] += 1
        self.report["documents"] += 1
        self.report["response_tokens"] += int(mask[:size].sum())
        return size

    def __len__(self) -> int:
        return len(self.rows)

    def documents(self, row: int) -> list[tuple[int, int, int]]:
        """(sequence, first index, end index) of the documents of a row."""
        result, at = [], 0
        for index, size in self.rows[row]:
            result.append((index, at, at + size))
            at += size
        return result

    def row(self, row: int) -> dict[str, np.ndarray]:
        """The row's arrays without anchors."""
        ids = np.full(self.length, self.pad_token_id, dtype=np.int64)
        loss_mask = np.zeros(self.length, dtype=bool)
        end = sum(size for _, size in self.rows[row])
        starts = np.full(self.length, end, dtype=np.int64)
        for index, begin, stop in self.documents(row):
            ids[begin:stop] = self.sequences.input_ids[index][: stop - begin]
            loss_mask[begin:stop] = self.sequences.loss_mask[index][: stop - begin]
            starts[begin:stop] = begin
        return {
            "input_ids": ids,
            "position_ids": np.arange(self.length) - starts,
            "document_starts": starts,
            "loss_mask": loss_mask,
        }

    def __getitem__(self, key: int | tuple[int, int]) -> dict[str, torch.Tensor]:
        epoch, row = key if isinstance(key, tuple) else (0, key)
        arrays = self.row(row)
        generator = np.random.default_rng((self.seed, epoch, row))
        eligible = anchor_positions(arrays["loss_mask"], arrays["document_starts"])
        arrays["anchors"], arrays["anchor_mask"] = draw_anchors(eligible, self.num_anchors, generator)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


class EpochSampler(Sampler):
    """Yields (epoch, row) in an order drawn from (seed, epoch), so that anchors change every epoch whatever the worker."""

    def __init__(self, rows: int, seed: int = 0):
        self.rows, self.seed, self.epoch = rows, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.rows

    def __iter__(self):
        order = np.random.default_rng((self.seed, self.epoch)).permutation(self.rows)
        return iter([(self.epoch, row) for row in order.tolist()])


def single_row(features: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collator: the row itself, without a batch dimension.

    Raises:
        ValueError: more than one row per device.
    """
    if len(features) != 1:
        raise ValueError(
            f"per_device_train_batch_size must be 1, since a row already packs tokens_per_row tokens, got {len(features)}"
        )
    return features[0]


__all__ = [
    "EpochSampler",
    "PackedDataset",
    "TokenSequences",
    "anchor_positions",
    "draw_anchors",
    "from_records",
    "main_reason",
    "single_row",
]
