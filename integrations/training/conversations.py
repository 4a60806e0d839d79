"""Conversations in, token sequences with a response mask out.

`load_sequences` reads a file, a Hub dataset or a `datasets.Dataset`, recognises its columns, and renders conversations through the
target's own chat template. Nothing is dropped silently: what cannot be used is counted by reason in `TokenSequences.report`, which
the packing continues and `report_table` prints.
"""

import glob
import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .data import TokenSequences, from_records, main_reason


logger = logging.getLogger(__name__)

# what ShareGPT-like files call the speakers; a template knows the names on the right
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
ROLES |= {"model": "assistant", "function": "tool", "observation": "tool"}
FORMATS = "input_ids (token sequences), messages, conversations (ShareGPT) or instruction and output (Alpaca)"


class LeftOut(ValueError):
    """A conversation that cannot be used: `reason` is counted, `detail` explains its first occurrence."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


def detect_format(columns: Iterable[str]) -> str:
    """`"tokens"`, `"messages"`, `"sharegpt"` or `"alpaca"`, from column names.

    Raises:
        ValueError: none of them.
    """
    columns = set(columns)
    if "input_ids" in columns:
        return "tokens"
    if "messages" in columns:
        return "messages"
    if "conversations" in columns or "conversation" in columns:
        return "sharegpt"
    if {"instruction", "output"} <= columns:
        return "alpaca"
    raise ValueError(f"the data must have columns {FORMATS}, got {sorted(columns)}")


def to_messages(record: dict, kind: str) -> list[dict]:
    """A record as `[{"role": ..., "content": ...}, ...]`; further keys of a turn (`reasoning_content`, `tool_calls`) are kept.

    Raises:
        LeftOut: not a conversation.
    """
    if kind == "alpaca":
        question = "\n\n".join(part for part in (record["instruction"], record.get("input")) if part)
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": record["output"] or ""}]
        return [{"role": "system", "content": record["system"]}, *turns] if record.get("system") else turns
    turns = record.get("messages") if kind == "messages" else record.get("conversations", record.get("conversation"))
    if turns is None or not all(isinstance(turn, dict) for turn in turns):
        raise LeftOut("not_a_conversation")
    messages = []
    for turn in turns:
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if not isinstance(role, str):
            raise LeftOut("not_a_conversation")
        # columns of `datasets` hold None where a turn lacks a key that another one has
        rest = {k: v for k, v in turn.items() if k not in ("role", "from", "content", "value") and v is not None}
        messages.append({"role": ROLES.get(role, role), "content": "" if content is None else content, **rest})
    return messages


def has_content(message: dict) -> bool:
    content = message["content"]
    return bool(message.get("tool_calls")) or bool(content.strip() if isinstance(content, str) else content)


@dataclass
class ConversationEncoder:
    """Renders conversations with a chat template and marks what the assistant says.

    A template with `{% generation %}` marks it itself. With any other one an assistant turn is what the template adds to the
    conversation before it, rendered with the generation prompt; white space after the end-of-turn token is not part of it. Where a
    template writes earlier turns otherwise once the conversation goes on (Qwen3 drops their thinking), each assistant turn becomes a
    sequence of its own, which is what serving will see.

    Args:
        tokenizer: the target's, a fast one (character offsets are needed).
        thinking: passed to the template as `enable_thinking` if not None.
        last_turn_only: only the last assistant turn is a response.

    Raises:
        ValueError: the tokenizer has no chat template or no offsets.
    """

    tokenizer: object
    thinking: bool | None = None
    last_turn_only: bool = False
    options: dict = field(init=False)
    marks_itself: bool = field(init=False)

    def __post_init__(self):
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(
                "the target's tokenizer must have a chat template to read conversations, got none; give data with input_ids instead"
            )
        if not self.tokenizer.is_fast:
            raise ValueError(
                f"the tokenizer must be a fast one (it gives character offsets), got {type(self.tokenizer).__name__}"
            )
        self.options = {} if self.thinking is None else {"enable_thinking": self.thinking}
        template = self.tokenizer.get_chat_template()
        self.marks_itself = re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None
        if self.thinking is not None and "enable_thinking" not in template:
            logger.warning("thinking is set, but the chat template does not use enable_thinking")

    def render(self, messages: list[dict], prompt: bool = False, tools=None) -> str:
        """The text of a conversation, with the generation prompt at its end if `prompt`."""
        return self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=prompt, **self.options
        )

    def encode(self, messages: list[dict], tools=None) -> list[tuple[list[int], list[bool], str | None]]:
        """Sequences `(input_ids, loss_mask, note)` of one conversation, usually one; `note` names something to be counted.

        Raises:
            LeftOut: it cannot be used.
        """
        spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not spoken:
            raise LeftOut("no_response")
        if self.last_turn_only:
            spoken = spoken[-1:]
        if not all(has_content(messages[i]) for i in spoken):
            raise LeftOut("empty_response")
        messages = messages[: spoken[-1] + 1]  # what follows the last answer trains nothing
        try:
            return self._encode(messages, spoken, tools)
        except LeftOut:
            raise
        except Exception as error:  # whatever a template raises or stumbles over
            raise LeftOut("template_error", f"{type(error).__name__}: {error}") from error

    def _encode(self, messages, spoken, tools):
        if self.marks_itself:
            encoded = self.tokenizer.apply_chat_template(
                messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True, **self.options
            )
            mask = np.asarray(encoded["assistant_masks"], dtype=bool)
            if not mask.any():
                raise LeftOut("no_response_tokens", "the template's generation block marks nothing")
            if self.last_turn_only:
                begins = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
                mask[: begins[-1]] = False
            return [(list(encoded["input_ids"]), mask.tolist(), None)]
        full = self.render(messages, tools=tools)
        spans = []
        for i in spoken:
            before = self.render(messages[:i], prompt=True, tools=tools)
            after = full if i == len(messages) - 1 else self.render(messages[: i + 1], tools=tools)
            spans.append((before, after.rstrip()))
        if all(full.startswith(after) and after.startswith(before) for before, after in spans):
            return [self._tokenize(full[: len(spans[-1][1])], [(len(b), len(a)) for b, a in spans])]
        sequences = []
        for before, after in spans:
            if not after.startswith(before):
                raise LeftOut("no_response_tokens", "the answered conversation does not begin with the one asked")
            ids, mask, _ = self._tokenize(after, [(len(before), len(after))])
            sequences.append((ids, mask, "split_by_turn"))
        return sequences

    def _tokenize(self, text: str, spans: list[tuple[int, int]]):
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        begins, ends = np.asarray(encoded["offset_mapping"]).reshape(-1, 2).T
        mask, note = np.zeros(len(begins), dtype=bool), None
        for begin, end in spans:
            mask |= (begins >= begin) & (begins < end)
            if ((begins < begin) & (ends > begin)).any():
                note = "token_across_border"  # in serving prompt and answer are tokenised apart
        if not mask.any():
            raise LeftOut("no_response_tokens", "the template adds nothing for the assistant's turn")
        return list(encoded["input_ids"]), mask.tolist(), note


def read_dataset(source, split: str = "train"):
    """A `datasets.Dataset` from a file (`.json`, `.jsonl`, `.parquet`, also gzipped), a folder of them or of `save_to_disk`, a Hub
    id (`org/name`, or `org/name:configuration`), or a dataset as it is.

    Raises:
        ValueError: a file of another kind, or a `DatasetDict` without the split.
    """
    import datasets

    if isinstance(source, (str, Path)):
        path = Path(source)
        if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            source = datasets.load_from_disk(str(path))
        elif path.is_file():
            suffix = re.search(r"\.(jsonl?|parquet)(\.gz)?$", path.name)
            if suffix is None:
                raise ValueError(f"{path} must be a .json, .jsonl or .parquet file")
            kind = suffix[1].replace("jsonl", "json")
            source = datasets.load_dataset(kind, data_files=str(path), split="train")
        else:
            name, _, configuration = str(source).partition(":")
            source = datasets.load_dataset(name, configuration or None, split=split)
    if isinstance(source, dict):
        if split not in source:
            raise ValueError(f"the data must have a split {split!r}, got {sorted(source)}")
        source = source[split]
    return source


def _records(dataset):
    """Rows as dicts with arrays; pandas in batches is by far the fastest way out of a `datasets.Dataset`."""
    for batch in dataset.with_format("pandas").iter(10_000):
        yield from batch.to_dict("records")


def encode_conversations(dataset, encoder: ConversationEncoder, workers: int | None = None) -> TokenSequences:
    """All conversations of a `datasets.Dataset`; the report counts `conversations`, `left_out_<reason>` and notes.

    Raises:
        ValueError: not one can be used; the message names the main reason and its first occurrence.
    """
    import datasets

    kind = detect_format(dataset.column_names)
    features = datasets.Features(
        {
            "input_ids": datasets.List(datasets.Value("int32")),
            "loss_mask": datasets.List(datasets.Value("bool")),
            "source": datasets.Value("string"),
            "note": datasets.Value("string"),
            "detail": datasets.Value("string"),
        }
    )

    def encode(batch):
        result = {name: [] for name in features}

        def add(*values):
            for name, value in zip(result, values):
                result[name].append(value)

        names = list(batch)
        for values in zip(*batch.values()):
            record = dict(zip(names, values))
            source = str(record.get("source") or "")
            try:
                tools = record.get("tools") or None
                for ids, mask, note in encoder.encode(to_messages(record, kind), tools):
                    add(ids, mask, source, note or "", "")
            except LeftOut as error:
                add([], [], source, f"left_out_{error.reason}", error.detail)
        return result

    encoded = dataset.map(
        encode,
        batched=True,
        num_proc=workers,
        remove_columns=dataset.column_names,
        features=features,
        desc="chat template",
    )
    report, examples = Counter(conversations=len(dataset)), {}
    for note, detail in zip(encoded["note"], encoded["detail"]):
        if note:
            report[note] += 1
            if note.startswith("left_out"):
                examples.setdefault(note, detail)
    for reason, detail in examples.items():
        logger.warning(f"{report[reason]} conversations {reason}" + (f", the first: {detail}" if detail else ""))
    kept = [i for i, note in enumerate(encoded["note"]) if not note.startswith("left_out")]
    if not kept:
        reason = main_reason(report)
        detail = f" ({examples[reason]})" if examples.get(reason) else ""
        raise ValueError(f"no conversation can be trained on, mostly because of {reason}{detail}, got {dict(report)}")
    columns = ["input_ids", "loss_mask", "source"]
    result = from_records(_records(encoded.select(kept).select_columns(columns)))
    result.report = report
    return result


def expand_sources(sources) -> list:
    """Sources with patterns (`answers/*.parquet`) and folders of parquet files replaced by the files, sorted by name.

    Files are read one by one: those of different runs may store their columns in different types.

    Raises:
        ValueError: a pattern that no file matches.
    """
    several = isinstance(sources, Sequence) and not isinstance(sources, str)
    expanded = []
    for source in sources if several else [sources]:
        if isinstance(source, (str, Path)) and glob.has_magic(str(source)) and not Path(source).exists():
            files = sorted(glob.glob(str(source), recursive=True))
            if not files:
                raise ValueError(f"the data must exist, got {source!r}, which matches no file")
            expanded += files
        elif isinstance(source, (str, Path)) and Path(source).is_dir() and not list(Path(source).glob("*.json")):
            expanded += sorted(map(str, Path(source).glob("*.parquet"))) or [source]
        else:
            expanded.append(source)
    return expanded


def load_sequences(
    sources,
    tokenizer=None,
    split: str = "train",
    thinking: bool | None = None,
    last_turn_only: bool = False,
    workers: int | None = None,
) -> TokenSequences:
    """Token sequences from whatever [`read_dataset`] reads, conversations or token ids, told apart by their columns.

    Args:
        sources: one or several files, patterns of file names, folders, Hub ids or `datasets.Dataset` objects.
        tokenizer: the target's; only conversations need it.
        split: of Hub datasets.
        thinking, last_turn_only: see [`ConversationEncoder`].
        workers: processes that render and tokenise.

    Raises:
        ValueError: unknown columns, conversations without a tokenizer, or nothing usable.
    """
    result, encoder = TokenSequences(), None
    for source in expand_sources(sources):
        dataset = read_dataset(source, split)
        if detect_format(dataset.column_names) == "tokens":
            keep = ("input_ids", "prompt_length", "loss_mask", "assistant_masks", "source")
            kept = [name for name in keep if name in dataset.column_names]
            result += from_records(_records(dataset.select_columns(kept)))
            if "thinking" in dataset.column_names:
                result.thinking |= {bool(value) for value in dataset.unique("thinking") if value is not None}
            continue
        if tokenizer is None:
            raise ValueError("conversations need the target's tokenizer, got none; put it into the target's folder")
        encoder = encoder or ConversationEncoder(tokenizer, thinking, last_turn_only)
        result += encode_conversations(dataset, encoder, workers)
    return result


def report_table(report: Counter) -> str:
    """The counts of `TokenSequences.report` or `PackedDataset.report`, one a line, what was left out at the end."""
    width = max(map(len, report), default=0)
    ordered = sorted(report.items(), key=lambda item: item[0].startswith("left_out"))
    return "\n".join(f"  {name.replace('_', ' '):<{width}} {count:>12,}" for name, count in ordered)


__all__ = [
    "ConversationEncoder",
    "LeftOut",
    "detect_format",
    "encode_conversations",
    "expand_sources",
    "load_sequences",
    "read_dataset",
    "report_table",
    "to_messages",
]
