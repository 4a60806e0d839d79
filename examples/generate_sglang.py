"""Answers of a target served by SGLang, as fast as its servers go, as token ids in parquet: training data for a drafter.

    python -m sglang.launch_server --model-path TARGET --port 30000 --max-running-requests 512 &
    python examples/generate_sglang.py --target TARGET --prompts prompts.jsonl.gz --url http://127.0.0.1:30000 \
        --output answers/ --time-limit 240

`examples/regenerate.py --server` works with any OpenAI-compatible server, but gets text and tokenises it again. This script asks
SGLang's native interface and keeps the very ids that were sampled. Columns: `input_ids`, `prompt_length`, `source`, `temperature`.

All prompts are answered at the first temperature, then all at the next. `--skip-existing FILE` leaves out what a file already holds
(the same prompt at the same temperature). Files are written as they fill up, each below `--max-file-mib`. After `--time-limit`
seconds no request is begun; those under way are waited for (`--grace`), so that long answers are not under-represented.
"""

import argparse
import asyncio
import gzip
import hashlib
import json
import random
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sglang_client import Client, Refused


def read_prompts(path: Path) -> list[tuple[str, str]]:
    """`(text, source)` of JSON lines with `prompt`, or `turns`, of which the first is asked.

    Raises:
        ValueError: a line has neither.
    """
    opened = gzip.open(path, "rt", encoding="utf-8") if str(path).endswith(".gz") else open(path, encoding="utf-8")
    with opened as lines:
        records = [json.loads(line) for line in lines if line.strip()]
    for number, record in enumerate(records, 1):
        if not (record.get("prompt") or record.get("turns")):
            raise ValueError(f"record {number} of {path} must have prompt or turns, got the keys {sorted(record)}")
    return [(record.get("prompt") or record["turns"][0], str(record.get("source", ""))) for record in records]


def prompt_key(ids: list[int], temperature: float) -> bytes:
    """What is the same prompt at the same temperature."""
    return hashlib.blake2b(f"{float(temperature):g}/{','.join(map(str, ids))}".encode(), digest_size=12).digest()


def existing_keys(paths: list[Path]) -> set[bytes]:
    """Keys of everything that parquet files of this layout hold."""
    import pyarrow.parquet as parquet

    keys = set()
    for path in paths:
        table = parquet.read_table(path, columns=["input_ids", "prompt_length", "temperature"])
        for batch in table.to_batches(max_chunksize=4096):
            columns = (batch[name].to_pylist() for name in ("input_ids", "prompt_length", "temperature"))
            keys |= {prompt_key(ids[:length], temperature) for ids, length, temperature in zip(*columns)}
    return keys


def encode(tokenizer, texts: list[str]) -> list[list[int]]:
    """Prompts under the chat template, as token ids."""
    rendered = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
        for text in texts
    ]
    return tokenizer(rendered, add_special_tokens=False).input_ids


class Writer:
    """Rows to parquet files of limited size, written beside the requests.

    Args:
        folder: for `answers-NN.parquet`.
        tokens_per_file: a file is closed once it holds so many.
    """

    def __init__(self, folder: Path, tokens_per_file: int):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.tokens_per_file = folder, tokens_per_file
        self.rows, self.tokens, self.files = [], 0, []
        self._pool = ThreadPoolExecutor(1)

    def add(self, ids: list[int], prompt_length: int, source: str, temperature: float) -> None:
        self.rows.append((ids, prompt_length, source, temperature))
        self.tokens += len(ids)
        if self.tokens >= self.tokens_per_file:
            self._flush()

    def _flush(self) -> None:
        rows, self.rows, self.tokens = self.rows, [], 0
        path = self.folder / f"answers-{len(self.files):02d}.parquet"
        self.files.append((path, self._pool.submit(write_table, path, rows)))

    def close(self) -> list[Path]:
        """Writes what is left; the files.

        Raises:
            OSError: a file could not be written.
        """
        if self.rows:
            self._flush()
        self._pool.shutdown()
        return [(done.result(), path)[1] for path, done in self.files]


def write_table(path: Path, rows: list[tuple]) -> None:
    """One parquet file, complete or not there."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as parquet

    widest = max(max(row[0]) for row in rows)
    dtype = np.uint16 if widest < 2**16 else np.int32
    offsets = np.cumsum([0] + [len(row[0]) for row in rows]).astype(np.int32)
    flat = np.concatenate([np.asarray(row[0], dtype=dtype) for row in rows])
    table = pa.table(
        {
            "input_ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat)),
            "prompt_length": pa.array([row[1] for row in rows], pa.int32()),
            "source": pa.array([row[2] for row in rows], pa.string()),
            "temperature": pa.array([row[3] for row in rows], pa.float32()),
        }
    )
    part = path.with_suffix(".tmp")
    parquet.write_table(table, part, compression="zstd", compression_level=6)
    part.rename(path)


def answer_of(reply: dict, end_ids: set[int]) -> list[int] | None:
    """Generated ids of SGLang's reply, the end token included; None if the request did not come to its end."""
    ids, reason = reply.get("output_ids"), (reply.get("meta_info") or {}).get("finish_reason") or {}
    if not ids or reason.get("type") not in ("stop", "length"):
        return None
    matched = reason.get("matched")
    if reason["type"] == "stop" and isinstance(matched, int) and matched in end_ids and ids[-1] != matched:
        ids = [*ids, matched]
    return ids


async def answer_all(clients, tasks, args, end_ids, writer, report=print) -> dict:
    """Feeds every server, as soon as it is ready, until the tasks or the time are used up.

    Requests are sent in bursts of `args.burst`: a server interrupts decoding for every prefill, so fewer and larger ones are faster.

    Args:
        tasks: `(prompt ids, source, temperature)`.

    Raises:
        RuntimeError: no server became ready.
    """
    queue, began = deque(tasks), None
    counts = {"answered": 0, "failed": 0, "tokens": 0, "unfinished": 0, "errors": {}, "servers_not_ready": []}

    async def one(client, task):
        ids, source, temperature = task
        sampling = {"temperature": temperature, "max_new_tokens": args.max_new_tokens}
        try:
            reply = await client.generate(ids, sampling)
            new = answer_of(reply, end_ids)
        except (Refused, OSError) as error:
            name = str(error)[:160]
            counts["errors"][name] = counts["errors"].get(name, 0) + 1
            new = None
        if new is None:
            counts["failed"] += 1
            return
        counts["answered"] += 1
        counts["tokens"] += len(new)
        writer.add(ids + new, len(ids), source, temperature)

    async def feed(client):
        nonlocal began
        if not await ready(client, args.wait):
            counts["servers_not_ready"].append(client.url)
            return
        began = began or time.monotonic()
        running: set[asyncio.Task] = set()
        while queue and time.monotonic() - began < args.time_limit:
            free = args.concurrency - len(running)
            if free < min(args.burst, args.concurrency):
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED, timeout=1.0)
                continue
            for _ in range(min(free, len(queue))):
                running.add(asyncio.create_task(one(client, queue.popleft())))
        left = args.time_limit + args.grace - (time.monotonic() - began)
        if running:
            _, running = await asyncio.wait(running, timeout=max(left, 0.01))
        counts["unfinished"] += len(running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def progress():
        before = 0
        while True:
            await asyncio.sleep(args.report_every)
            if began is not None:
                speed = (counts["tokens"] - before) / args.report_every
                seconds = time.monotonic() - began
                report(f"{seconds:.0f} s: {counts['answered']} answers, {speed:.0f} tokens/s, {len(queue)} to go")
                before = counts["tokens"]

    watcher = asyncio.create_task(progress())
    await asyncio.gather(*map(feed, clients))
    watcher.cancel()
    if began is None:
        raise RuntimeError(f"no server was ready after {args.wait:.0f} s: {', '.join(counts['servers_not_ready'])}")
    seconds = time.monotonic() - began
    return {
        **counts,
        "not_begun": len(queue),
        "seconds": seconds,
        "tokens_per_second": counts["tokens"] / max(seconds, 1e-9),
    }


def make_tasks(tokenizer, args) -> tuple[list[tuple[list[int], str, float]], dict]:
    """Everything to be answered, in order, and how many were left out."""
    prompts = read_prompts(args.prompts)[args.skip :][: args.limit]
    encoded = encode(tokenizer, [text for text, _ in prompts])
    known = existing_keys(args.skip_existing)
    counts = {
        "prompts": len(prompts),
        "too_long": sum(len(ids) > args.max_prompt_tokens for ids in encoded),
        "known": 0,
    }
    tasks, order = [], random.Random(args.seed)
    for temperature in args.temperatures:
        part = []
        for ids, (_, source) in zip(encoded, prompts):
            if len(ids) > args.max_prompt_tokens:
                continue
            key = prompt_key(ids, temperature)
            if key in known:
                # once: a temperature that is given twice asks for a second sample
                known.discard(key)
                counts["known"] += 1
                continue
            part.append((ids, source, temperature))
        order.shuffle(part)
        tasks += part
    return tasks, counts


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or Hub id; only its tokenizer is read")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with prompt or turns, may be .gz")
    parser.add_argument("--url", nargs="+", default=["http://127.0.0.1:30000"], help="one or more servers")
    parser.add_argument("--output", type=Path, required=True, help="folder")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--skip-existing", type=Path, nargs="*", default=[], help="parquet files of the same layout")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many prompts at the beginning")
    parser.add_argument("--limit", type=int, help="at most so many prompts")
    parser.add_argument("--max-new-tokens", type=int, default=384)
    parser.add_argument("--max-prompt-tokens", type=int, default=256)
    parser.add_argument("--concurrency", type=int, default=512, help="requests at a time for each server")
    parser.add_argument("--burst", type=int, default=64, help="requests are sent once so many fit")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds after which none is begun")
    parser.add_argument("--grace", type=float, default=15.0, help="seconds that requests under way are waited for")
    parser.add_argument("--max-file-mib", type=float, default=15.0)
    parser.add_argument("--report-every", type=float, default=5.0, help="seconds")
    parser.add_argument(
        "--wait",
        type=float,
        default=300.0,
        help="seconds to wait for a server to be ready, after which it is left out",
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


async def ready(client: Client, limit: float) -> bool:
    """Waits for a server; whether it was ready in time."""
    began = time.monotonic()
    while time.monotonic() - began < limit:
        try:
            await client.json("/health")
            return True
        except (Refused, OSError):
            await asyncio.sleep(0.5)
    return False


def main(argv: list[str] | None = None) -> dict:
    from transformers import AutoTokenizer

    args = parse_arguments(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    tasks, left_out = make_tasks(tokenizer, args)
    print(f"{len(tasks)} requests: {left_out}", flush=True)
    # sampled text takes up to 1.35 bytes a token when compressed
    writer = Writer(args.output, int(args.max_file_mib * 2**20 / 1.4))
    clients = [Client(url) for url in args.url]

    async def run():
        try:
            return await answer_all(
                clients, tasks, args, {tokenizer.eos_token_id}, writer, lambda text: print(text, flush=True)
            )
        finally:
            [client.close() for client in clients]

    try:
        counts = asyncio.run(run())
    finally:
        files = writer.close()
    counts |= left_out | {"files": {path.name: path.stat().st_size for path in files}}
    (args.output / "summary.json").write_text(json.dumps(counts, indent=1) + "\n")
    print(json.dumps(counts), flush=True)
    return counts


if __name__ == "__main__":
    main()
