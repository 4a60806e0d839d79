"""Lets the target answer prompts, so that a drafter trains on the target's own words.

Work is cut into batches of prompts of similar length. Every batch becomes one parquet shard, written whole or not at all, so an
interrupted run is continued by starting it again with the same arguments.
"""

import gzip
import hashlib
import http.client
import json
import logging
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import DynamicCache

from dspine.modeling_dspine.generation_dspine import without_attention_plans

from .conversations import ConversationEncoder


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


@dataclass
class Task:
    """A prompt ready to be answered: its conversation and the token ids that the target is given."""

    messages: list[dict]
    prompt_ids: list[int]
    source: str = ""


def answer_with_transformers(target, tokenizer, settings: RegenerationSettings, segment: int = 128) -> Callable:
    """An answerer on `target.generate`: `answer(tasks, temperature, seed)` gives a list of token lists, end token included.

    Every `segment` tokens the rows that have ended leave the batch and its cache, so that one long answer does not make all others
    cost until its end.
    """
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ends = target.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])

    @without_attention_plans()
    def answer(tasks: list[Task], temperature: float, seed: int) -> list[list[int]]:
        prompts = [task.prompt_ids for task in tasks]
        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=target.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=target.device)
        torch.manual_seed(seed)
        options = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        if temperature > 0:
            options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        rows, cache = list(range(len(prompts))), DynamicCache(config=target.config)
        answers: list[list[int]] = [[] for _ in prompts]
        while rows:
            left = settings.max_new_tokens - (ids.shape[1] - width)
            begin = ids.shape[1]
            ids = target.generate(
                ids,
                attention_mask=mask,
                past_key_values=cache,
                max_new_tokens=min(segment, left),
                pad_token_id=pad,
                **options,
            )
            going = []
            for i, new in enumerate(ids[:, begin:].tolist()):
                stop = next((n + 1 for n, token in enumerate(new) if token in ends), None)
                answers[rows[i]] += new[:stop]
                if stop is None and ids.shape[1] - width < settings.max_new_tokens:
                    going.append(i)
            if len(going) < len(rows):
                rows = [rows[i] for i in going]
                kept = torch.tensor(going, dtype=torch.long, device=ids.device)
                ids, mask = ids[kept], mask[kept]
                if going:
                    cache.batch_select_indices(kept)
            mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
        return answers

    return answer


class ServerError(RuntimeError):
    """The server cannot be used: unreachable after all retries, or it refuses every request of this kind."""


def answer_with_server(
    url: str,
    encoder: ConversationEncoder,
    settings: RegenerationSettings,
    model: str | None = None,
    concurrency: int = 64,
    retries: int = 6,
    timeout: float = 600.0,
    api_key: str | None = None,
) -> Callable:
    """An answerer on the chat completions of an OpenAI-compatible server (SGLang, vLLM, ...).

    The server returns text. Its token ids are made by rendering the answered conversation with the chat template and tokenising what
    it adds to the prompt; they can differ from the ids that the target sampled, since different ids can spell the same text.
    An answer that was cut off by `max_new_tokens` gets no end-of-turn token. Thinking goes to the server as
    `chat_template_kwargs.enable_thinking`, and the thoughts that it reports apart (`reasoning_content`) are part of the answer.

    Args:
        url: of the server, with or without `/v1`.
        model: name in requests; default: the first one that the server lists.
        concurrency: requests at a time.
        retries: of a request after connection errors, time-outs and statuses 408, 409, 429 and 5xx, waiting twice as long each time.
        timeout: seconds for one answer.

    Returns:
        `answer(tasks, temperature, seed)`: token lists, None for a prompt that the server refuses (statuses 400, 413, 422).

    Raises:
        ServerError: (also in `answer`) a request fails for good.
    """
    base = url.rstrip("/").removesuffix("/v1") + "/v1"
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})

    def request(path: str, body: dict | None = None) -> dict:
        data = None if body is None else json.dumps(body).encode()
        for attempt in range(retries + 1):
            try:
                with urllib.request.urlopen(
                    urllib.request.Request(base + path, data, headers), timeout=timeout
                ) as reply:
                    return json.load(reply)
            except urllib.error.HTTPError as error:
                text = error.read().decode(errors="replace")[:300]
                if error.code in (400, 413, 422):
                    raise ValueError(text) from error
                problem = f"status {error.code}: {text}"
                if error.code not in (408, 409, 429) and error.code < 500:
                    raise ServerError(f"{base}{path} refuses requests ({problem})") from error
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
                problem = f"{type(error).__name__}: {error}"
            if attempt < retries:
                time.sleep(min(30.0, 0.5 * 2**attempt) * (0.5 + random.random() / 2))
        raise ServerError(f"{base}{path} gave no answer after {retries + 1} attempts ({problem})")

    name = model or request("/models")["data"][0]["id"]
    refusals = []

    def ask(task: Task, temperature: float, seed: int) -> list[int] | None:
        body = {
            "model": name,
            "messages": task.messages,
            "temperature": temperature,
            "top_p": 1.0,
            "max_tokens": settings.max_new_tokens,
            "seed": seed,
        }
        if settings.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": settings.thinking}
        try:
            choice = request("/chat/completions", body)["choices"][0]
        except ValueError as error:
            refusals.append(str(error))
            if len(refusals) == 1:
                logger.warning(f"the server refuses a prompt: {error}")
            return None
        return answer_ids(encoder, task.messages, choice)

    def answer(tasks: list[Task], temperature: float, seed: int) -> list[list[int] | None]:
        with ThreadPoolExecutor(concurrency) as pool:
            futures = [pool.submit(ask, task, temperature, seed + i) for i, task in enumerate(tasks)]
            try:
                return [future.result() for future in futures]
            except ServerError:
                pool.shutdown(cancel_futures=True)
                raise

    return answer


def answer_ids(encoder: ConversationEncoder, messages: list[dict], choice: dict) -> list[int] | None:
    """Token ids of a chat completion's `choice`: what the chat template adds to the prompt for it. None if it is empty."""
    reply = choice["message"]
    content, thoughts = reply.get("content") or "", reply.get("reasoning_content") or reply.get("reasoning")
    if not content.strip() and not thoughts:
        return None
    finished = choice.get("finish_reason") == "stop"
    turn = {"role": "assistant", "content": content} | ({"reasoning_content": thoughts} if thoughts else {})
    before, after = encoder.render(messages, prompt=True), encoder.render([*messages, turn]).rstrip()
    if not after.startswith(before):
        # the template rewrites what it asked: the text itself, and the end-of-turn token
        after = before + content + (encoder.tokenizer.eos_token if finished else "")
    elif not finished:
        last = (content if content.strip() else thoughts).strip()
        after = after[: after.rfind(last) + len(last)]
    return encoder.tokenizer(after[len(before) :], add_special_tokens=False).input_ids


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
        answer: see [`answer_with_transformers`] and [`answer_with_server`].
        time_limit: seconds after which no further batch is begun.

    Raises:
        ValueError: `output_dir` holds shards of other prompts or settings.
        ServerError: the server cannot be used; what is answered so far is kept.
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
    by_temperature: dict[float, list[Task]] = {}
    counts = {"prompts": len(prompts), "too_long": 0, "answered": 0, "unanswered": 0, "tokens": 0}
    for number, prompt in enumerate(prompts):
        ids = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=False, **template)
        if len(ids) > settings.max_prompt_tokens:
            counts["too_long"] += 1
            continue
        temperature = settings.temperatures[number % len(settings.temperatures)]
        by_temperature.setdefault(temperature, []).append(Task(prompt.messages, list(ids), prompt.source))
    batches = []
    for temperature, tasks in by_temperature.items():
        tasks.sort(key=lambda task: len(task.prompt_ids))
        batches += [
            (temperature, tasks[i : i + settings.batch_size]) for i in range(0, len(tasks), settings.batch_size)
        ]
    # long and short batches mixed, so that the progress bar's estimate is right from the start
    order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(settings.seed)).tolist()
    progress = tqdm(order, desc="answering", unit="batch")
    for number in progress:
        temperature, tasks = batches[number]
        shard = output_dir / f"part-{number:05d}.parquet"
        if not shard.exists():
            if time_limit is not None and time.monotonic() - started > time_limit:
                logger.warning("time limit reached; start again to continue")
                break
            answers = answer(tasks, temperature, settings.seed + number * settings.batch_size)
            done = [(task, new) for task, new in zip(tasks, answers) if new]
            table = pa.table(
                {
                    "input_ids": pa.array([task.prompt_ids + new for task, new in done], pa.list_(pa.int32())),
                    "prompt_length": pa.array([len(task.prompt_ids) for task, _ in done], pa.int32()),
                    "source": pa.array([task.source for task, _ in done], pa.string()),
                    "temperature": pa.array([temperature] * len(done), pa.float32()),
                    "thinking": pa.array([settings.thinking] * len(done), pa.bool_()),
                    "target": pa.array([target_name] * len(done), pa.string()),
                }
            )
            part = shard.with_suffix(".tmp")
            parquet.write_table(table, part, compression="zstd")
            part.rename(shard)
        table = parquet.read_table(shard, columns=["input_ids", "prompt_length"])
        counts["answered"] += len(table)
        counts["unanswered"] += len(tasks) - len(table)
        counts["tokens"] += sum(map(len, table["input_ids"].to_pylist())) - sum(table["prompt_length"].to_pylist())
        progress.set_postfix(tokens=counts["tokens"])
    return counts


__all__ = [
    "Prompt",
    "RegenerationSettings",
    "ServerError",
    "Task",
    "answer_ids",
    "answer_with_server",
    "answer_with_transformers",
    "read_prompts",
    "regenerate",
]
