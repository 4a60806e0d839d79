"""Lets the target answer prompts, so that a drafter trains on the target's own words.

Work is cut into batches of prompts of similar length. Every batch becomes one parquet shard, written whole or not at all, so an
interrupted run is continued by starting it again with the same arguments.
"""

import gzip
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm


logger = logging.getLogger(__name__)


@dataclass
class Prompt:
    """A conversation up to the answer to be written (`messages`), and where it came from."""

    messages: list[dict]
    source: str = ""


@dataclass
class RegenerationSettings:
    """How answers are sampled; recorded in every row.

    Args:
        temperatures: prompt i is answered at `temperatures[i % len]`; 0 is greedy.
        thinking: passed to the chat template as `enable_thinking` if not None.
    """

    max_new_tokens: int = 512
    max_prompt_tokens: int = 1024
    temperatures: tuple[float, ...] = (0.0, 1.0)
    thinking: bool | None = None
    batch_size: int = 64
    seed: int = 0

    def fingerprint(self, prompts: list[Prompt], target_name: str) -> str:
        """Hash of everything that decides what is in which shard."""
        digest = hashlib.sha256(repr((self, target_name)).encode())
        for prompt in prompts:
            digest.update(json.dumps(prompt.messages).encode())
        return digest.hexdigest()[:16]


def read_prompts(path: str | Path) -> list[Prompt]:
    """Prompts from JSON lines (`.jsonl` or `.jsonl.gz`) with `messages`, or `prompt`, or `turns` (of which the first is asked).

    Raises:
        ValueError: a line has none of these keys.
    """
    opened = gzip.open(path, "rt") if str(path).endswith(".gz") else open(path)
    prompts = []
    with opened as lines:
        for number, line in enumerate(lines, 1):
            record = json.loads(line)
            if record.get("messages"):
                messages = record["messages"]
            elif record.get("prompt") or record.get("turns"):
                messages = [{"role": "user", "content": record.get("prompt") or record["turns"][0]}]
            else:
                raise ValueError(f"line {number} of {path} must have messages, prompt or turns, got {sorted(record)}")
            prompts.append(Prompt(messages, str(record.get("source", ""))))
    return prompts


def answer_with_transformers(target, tokenizer, settings: RegenerationSettings) -> Callable:
    """A batch answerer on `target.generate`: `answer(prompt_ids, temperature, seed) -> list of token lists` (end token included)."""

    def answer(prompt_ids: list[list[int]], temperature: float, seed: int) -> list[list[int]]:
        width = max(map(len, prompt_ids))
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompt_ids], device=target.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompt_ids], device=target.device)
        torch.manual_seed(seed)
        options = {"do_sample": False}
        if temperature > 0:
            options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        texts = target.generate(
            ids, attention_mask=mask, max_new_tokens=settings.max_new_tokens, pad_token_id=pad, **options
        )
        ends = target.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [ends])
        answers = []
        for row in texts[:, width:].tolist():
            stop = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
            answers.append(row[:stop])
        return answers

    return answer


def regenerate(
    prompts: Iterable[Prompt],
    tokenizer,
    answer: Callable,
    output_dir: str | Path,
    settings: RegenerationSettings,
    target_name: str,
    time_limit: float | None = None,
) -> dict[str, int]:
    """Answers all prompts into `output_dir/part-*.parquet` and returns counts.

    Columns: `input_ids`, `prompt_length`, `source`, `temperature`, `thinking`, `target`.

    Args:
        answer: see [`answer_with_transformers`].
        time_limit: seconds after which no further batch is begun.

    Raises:
        ValueError: `output_dir` holds shards of other prompts or settings.
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet

    prompts, output_dir, started = list(prompts), Path(output_dir), time.monotonic()
    output_dir.mkdir(parents=True, exist_ok=True)
    fingerprint, stamp = settings.fingerprint(prompts, target_name), output_dir / "fingerprint.txt"
    if stamp.exists() and stamp.read_text() != fingerprint:
        raise ValueError(f"{output_dir} holds answers to other prompts or with other settings; choose another folder")
    stamp.write_text(fingerprint)
    template = {} if settings.thinking is None else {"enable_thinking": settings.thinking}
    tasks, counts = {}, {"prompts": len(prompts), "too_long": 0, "answered": 0, "tokens": 0}
    for number, prompt in enumerate(prompts):
        ids = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=False, **template)
        if len(ids) > settings.max_prompt_tokens:
            counts["too_long"] += 1
            continue
        temperature = settings.temperatures[number % len(settings.temperatures)]
        tasks.setdefault(temperature, []).append((list(ids), prompt.source))
    batches = []
    for temperature, items in tasks.items():
        items.sort(key=lambda item: len(item[0]))
        batches += [
            (temperature, items[i : i + settings.batch_size]) for i in range(0, len(items), settings.batch_size)
        ]
    # long and short batches mixed, so that the progress bar's estimate is right from the start
    order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(settings.seed)).tolist()
    progress = tqdm(order, desc="answering", unit="batch")
    for number in progress:
        temperature, items = batches[number]
        shard = output_dir / f"part-{number:05d}.parquet"
        if not shard.exists():
            if time_limit is not None and time.monotonic() - started > time_limit:
                logger.warning("time limit reached; start again to continue")
                break
            answers = answer([ids for ids, _ in items], temperature, settings.seed + number)
            table = pa.table(
                {
                    "input_ids": pa.array([ids + new for (ids, _), new in zip(items, answers)], pa.list_(pa.int32())),
                    "prompt_length": pa.array([len(ids) for ids, _ in items], pa.int32()),
                    "source": [source for _, source in items],
                    "temperature": pa.array([temperature] * len(items), pa.float32()),
                    "thinking": pa.array([settings.thinking] * len(items), pa.bool_()),
                    "target": [target_name] * len(items),
                }
            )
            part = shard.with_suffix(".tmp")
            parquet.write_table(table, part, compression="zstd")
            part.rename(shard)
        table = parquet.read_table(shard, columns=["input_ids", "prompt_length"])
        counts["answered"] += len(table)
        counts["tokens"] += sum(map(len, table["input_ids"].to_pylist())) - sum(table["prompt_length"].to_pylist())
        progress.set_postfix(tokens=counts["tokens"])
    return counts


__all__ = ["Prompt", "RegenerationSettings", "answer_with_transformers", "read_prompts", "regenerate"]
