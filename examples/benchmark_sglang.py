"""Throughput, latency and accepted length of a running SGLang server at fixed concurrency, written as JSON.

    python examples/serve_sglang.py --target TARGET --drafter DRAFTER --keep &
    python examples/benchmark_sglang.py --target TARGET --concurrency 1 8 32 64 --output dspine.json

At each concurrency that many requests are kept in flight for `--warm-up` and then `--seconds` more, over the prompts again and again;
what is counted falls into the latter, requests that lie across its borders by their share. Prompts are sent as token ids, and once
before everything, so that the server's prefix cache holds them all and every level measures decoding alike.

A server without a captured prefill (`--disable-prefill-cuda-graph`) spends milliseconds of host time on every prefill, however
short, and does not decode meanwhile. With a small target that is most of the time if every freed slot is filled at once: answers of
fifty rounds at 64 in flight free one in every round. So slots are filled `--burst` at a time (an eighth of the concurrency unless
given), which share a prefill; `in_flight` reports how many requests there were on average. `one_token_seconds` is what a request
for a single token takes alone: prefill and transport.

Prompts come from `--prompts`, a folder of `*.jsonl` files with `{"turns": [text, ...]}` lines, one file after the other in turn;
without it three built-in ones are repeated. Several servers (`--server plain=http://... dspine=http://...`) are measured in turn at
each concurrency, so that they meet the same machine.
"""

import argparse
import asyncio
import itertools
import json
import platform
import statistics
import sys
import time
from pathlib import Path

from serve_sglang import QUESTIONS, accepted_length
from sglang_client import Client


def load_prompts(folder: Path | None, count: int) -> list[str]:
    """Up to `count` different prompts, one from each file in turn."""
    if folder is None:
        return QUESTIONS[:count]
    # not `splitlines`, which also splits at separators that JSON allows inside a string
    files = [
        [json.loads(line)["turns"][0] for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        for path in sorted(folder.glob("*.jsonl"))
    ]
    if not files:
        raise ValueError(f"--prompts must be a folder with *.jsonl files, found none in {folder}")
    turns = itertools.chain.from_iterable(itertools.zip_longest(*files))
    return list(itertools.islice((text for text in turns if text is not None), count))


async def keep_busy(
    client: Client, prompts: list[list[int]], sampling: dict, concurrency: int, burst: int, seconds: float
) -> list[dict]:
    """Keeps `concurrency` requests in flight for `seconds`, over the prompts (token ids) again and again, then awaits the last ones.

    Free slots are filled when there are `burst` of them. Ends early once more requests have failed than there are slots.

    Returns:
        Per request `sent` and `answered` in seconds since the start, and `meta` of the answer or `error`; in order of their ends.
    """
    answers, running, order, began = [], set(), itertools.cycle(prompts), time.perf_counter()
    failed = 0

    async def ask(ids):
        nonlocal failed
        sent = time.perf_counter()
        try:
            answer = {"meta": (await client.generate(ids, sampling))["meta_info"]}
        except (OSError, RuntimeError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
            failed += 1
        answers.append(answer | {"sent": sent - began, "answered": time.perf_counter() - began})

    while (left := seconds - (time.perf_counter() - began)) > 0 and failed <= concurrency:
        free = concurrency - len(running)
        if free >= burst:
            running |= {asyncio.create_task(ask(next(order))) for _ in range(free)}
        _, running = await asyncio.wait(running, timeout=left, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.gather(*running)
    return answers


def summarise(answers: list[dict], begin: float, end: float) -> dict:
    """Figures of the window from `begin` to `end`.

    Tokens and rounds of a request count by the share of its time that lies in the window. Latency and accepted length are those of
    requests that ended in it; accepted length is pooled (tokens / rounds) and the mean of the requests' own.
    """
    good = [answer for answer in answers if "error" not in answer]
    sums = {"tokens": 0.0, "rounds": 0.0, "busy": 0.0}
    for answer in good:
        overlap = min(answer["answered"], end) - max(answer["sent"], begin)
        if overlap <= 0:
            continue
        share = overlap / (answer["answered"] - answer["sent"])
        sums["tokens"] += share * answer["meta"]["completion_tokens"]
        sums["rounds"] += share * (answer["meta"].get("spec_verify_ct") or 0)
        sums["busy"] += overlap
    ended = [answer for answer in good if begin <= answer["answered"] < end]
    latencies = sorted(answer["answered"] - answer["sent"] for answer in ended)
    seconds = end - begin
    figures = {
        "seconds": seconds,
        "requests": len(ended),
        "errors": len(answers) - len(good),
        "in_flight": sums["busy"] / seconds,
        "tokens_per_second": sums["tokens"] / seconds,
        "tokens_per_request": statistics.mean(a["meta"]["completion_tokens"] for a in ended) if ended else None,
        "latency_median": statistics.median(latencies) if latencies else None,
        "latency_p95": latencies[int(0.95 * (len(latencies) - 1))] if latencies else None,
    }
    drafted = [answer["meta"] for answer in ended if answer["meta"].get("spec_verify_ct")]
    if drafted:
        rounds = sum(meta["spec_verify_ct"] for meta in drafted)
        figures["accepted_length"] = sum(meta["completion_tokens"] - 1 for meta in drafted) / rounds
        figures["accepted_length_per_request"] = statistics.mean(map(accepted_length, drafted))
        # of one slot, prefills of others included
        figures["seconds_per_round"] = sums["busy"] / sums["rounds"]
    return figures


def named(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"must look like name=http://host:port, got {text!r}")
    return name, value


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or Hub id; only its tokenizer is read")
    parser.add_argument(
        "--server", type=named, nargs="+", default=[("server", "http://127.0.0.1:30000")], metavar="NAME=URL"
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--seconds", type=float, default=8.0, help="measured at each concurrency")
    parser.add_argument("--warm-up", type=float, default=2.0, help="seconds before them")
    parser.add_argument("--burst", type=int, help="slots filled at a time (default: an eighth of the concurrency)")
    parser.add_argument("--num-prompts", type=int, default=210, help="different ones")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--max-prompt-tokens", type=int, default=1024)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--ignore-eos", action="store_true", help="always generate --max-new-tokens tokens")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args(argv)


async def prepare(client: Client, prompts: list[list[int]], sampling: dict) -> dict:
    """Fills the server's prefix cache; what the server says about itself and how long a request for one token takes."""
    gate, sampling = asyncio.Semaphore(16), sampling | {"max_new_tokens": 1}

    async def one_token(ids):
        async with gate:
            began = time.perf_counter()
            await client.generate(ids, sampling)
            return time.perf_counter() - began

    await asyncio.gather(*map(one_token, prompts))
    alone = statistics.median([await one_token(ids) for ids in prompts[:20]])
    return {"facts": await server_facts(client), "one_token_seconds": alone, "runs": []}


async def measure(args: argparse.Namespace, prompts: list[list[int]], result: dict) -> None:
    """Adds figures to `result` and writes it after every concurrency: a run that is cut keeps what it has."""
    sampling = {"temperature": args.temperature, "top_p": args.top_p, "max_new_tokens": args.max_new_tokens}
    sampling["ignore_eos"] = args.ignore_eos
    clients = {name: Client(url) for name, url in args.server}
    servers = {name: await prepare(client, prompts, sampling) for name, client in clients.items()}
    result |= {"sampling": sampling, "prompts": len(prompts), "servers": servers}
    whole = args.warm_up + args.seconds
    for concurrency in args.concurrency:
        burst = min(concurrency, args.burst or max(1, concurrency // 8))
        for name, client in clients.items():
            answers = await keep_busy(client, prompts, sampling, concurrency, burst, whole)
            figures = {"concurrency": concurrency, "burst": burst, **summarise(answers, args.warm_up, whole)}
            print(name, json.dumps(figures), flush=True)
            errors = sorted({answer["error"] for answer in answers if "error" in answer})
            if errors:
                figures["error_texts"] = errors[:5]
            servers[name]["runs"].append(figures)
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    [client.close() for client in clients.values()]


async def server_facts(client: Client) -> dict:
    """What the server says about itself, as far as it concerns a measurement."""
    try:
        info = await client.json("/get_server_info") or {}
    except (OSError, RuntimeError) as error:
        return {"unknown": str(error)}
    names = ("version", "model_path", "dtype", "tp_size", "attention_backend", "max_running_requests", "load_format")
    names += ("speculative_algorithm", "speculative_draft_model_path", "speculative_num_draft_tokens")
    return {name: info[name] for name in names if name in info}


def main(argv: list[str] | None = None) -> None:
    from transformers import AutoTokenizer

    args = parse_arguments(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )[: args.max_prompt_tokens]
        for text in load_prompts(args.prompts, args.num_prompts)
    ]
    argv = sys.argv[1:] if argv is None else argv
    result = {"command": [Path(sys.argv[0]).name, *argv], "python": platform.python_version()}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    asyncio.run(measure(args, prompts, result))
    if any(figures["errors"] for one in result["servers"].values() for figures in one["runs"]):
        sys.exit("some requests failed; see error_texts in the output")


if __name__ == "__main__":
    main()
