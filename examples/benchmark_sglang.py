"""Throughput, latency and accepted length of a running SGLang server at fixed concurrency, written as JSON.

    python examples/serve_sglang.py --target TARGET --drafter DRAFTER --keep &
    python examples/benchmark_sglang.py --target TARGET --concurrency 1 8 32 64 --output dspine.json

At each concurrency that many requests are kept in flight, over the prompts again and again, for `--warm-up` seconds and then `--seconds`
that count; what is still running is then aborted. Requests that lie across the borders of such a window count by their share. Prompts
are sent as token ids, and once before everything, so that the server's prefix cache holds them all and every level measures decoding
alike. Several servers (`--server plain=http://... dspine=http://...`) take turns, there and back, `--windows` times each, so that they
meet the same machine: a figure is the median of its windows, with their range.

A server without a captured prefill (`--disable-prefill-cuda-graph`) spends milliseconds of host time on every prefill, however
short, and does not decode meanwhile. So slots are filled `--burst` at a time (a quarter of the concurrency unless given), which share a
prefill, and `--min-answer` keeps only prompts whose answers are long: those of so many tokens in the first server's answers, which must
end by themselves or at `--max-new-tokens`. (Going on behind the end token would make answers long, too, but their repetitions are
easily drafted.) `prefill_share_at_most` is what the prefills of a window took of it, counted by bursts, if each took as long as a burst of
one-token requests takes an idle server, transport included.

A server's tokens per second for one slot are accepted length by seconds per round, so a speed-up is the product of two: `accepted_length`
(1 without a drafter) over that of the first server, and the first server's `seconds_per_round` (per token without a drafter) over its own.
Each is in `over_first`.

Prompts come from `--prompts`, a folder of `*.jsonl` files with `{"turns": [text, ...]}` lines, one file after the other in turn;
without it three built-in ones are repeated.
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

from serve_sglang import QUESTIONS
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
    """Keeps `concurrency` requests in flight for `seconds`, over the prompts (token ids) again and again, then aborts the last ones.

    Free slots are filled when there are `burst` of them. Ends early once more requests have failed than there are slots.

    Returns:
        Per request `sent` and `answered` in seconds since the start, `burst` (which filling it belongs to), and `meta` of the answer or
        `error`; in order of their ends.
    """
    answers, running, order, began = [], set(), itertools.cycle(prompts), time.perf_counter()
    failed = bursts = 0

    async def ask(ids, number):
        nonlocal failed
        sent = time.perf_counter()
        try:
            answer = {"meta": (await client.generate(ids, sampling))["meta_info"]}
        except (OSError, RuntimeError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
            failed += 1
        answers.append(answer | {"burst": number, "sent": sent - began, "answered": time.perf_counter() - began})

    while (left := seconds - (time.perf_counter() - began)) > 0 and failed <= concurrency:
        free = concurrency - len(running)
        if free >= burst:
            running |= {asyncio.create_task(ask(next(order), bursts)) for _ in range(free)}
            bursts += 1
        _, running = await asyncio.wait(running, timeout=left, return_when=asyncio.FIRST_COMPLETED)
    try:
        await client.json("/abort_request", {"rid": "", "abort_all": True})
    except (OSError, RuntimeError):
        pass  # they end by themselves, later
    await asyncio.gather(*running)
    return answers


def summarise(answers: list[dict], begin: float, end: float) -> dict:
    """Figures of the window from `begin` to `end`.

    Tokens and rounds of a request count by the share of its time that lies in the window, aborted ones included. `requests` and latency
    are of those that ended in it by themselves. Rounds of a server without a drafter are its tokens.
    """
    good = [answer for answer in answers if "error" not in answer]
    drafted = any(answer["meta"].get("spec_verify_ct") for answer in good)
    sums = {"tokens": 0.0, "rounds": 0.0, "busy": 0.0}
    for answer in good:
        overlap = min(answer["answered"], end) - max(answer["sent"], begin)
        if overlap <= 0:
            continue
        share = overlap / (answer["answered"] - answer["sent"])
        # the first token is the prefill's; a request aborted while it waited has none
        tokens = max(0, answer["meta"]["completion_tokens"] - 1)
        sums["tokens"] += share * tokens
        sums["rounds"] += share * (answer["meta"].get("spec_verify_ct", 0) if drafted else tokens)
        sums["busy"] += overlap
    ended = [
        answer
        for answer in good
        if begin <= answer["answered"] < end and (answer["meta"].get("finish_reason") or {}).get("type") != "abort"
    ]
    seconds = end - begin
    rounds = sums["rounds"] or float("nan")
    return {
        "requests": len(ended),
        "errors": len(answers) - len(good),
        "bursts": len({answer["burst"] for answer in answers if begin <= answer["sent"] < end}),
        "in_flight": sums["busy"] / seconds,
        "tokens_per_second": sums["tokens"] / seconds,
        "accepted_length": sums["tokens"] / rounds,
        # of one slot, prefills of others included
        "seconds_per_round": sums["busy"] / rounds,
        "tokens_per_request": [answer["meta"]["completion_tokens"] for answer in ended],
        "latencies": [answer["answered"] - answer["sent"] for answer in ended],
    }


def together(windows: list[dict], seconds: float, burst_seconds: float) -> dict:
    """Figures of one server's windows of `seconds` each at one concurrency: medians, the range of what varies, requests pooled.

    Args:
        burst_seconds: what a burst of one-token requests takes an idle server.
    """
    figures = {
        name: statistics.median(one[name] for one in windows)
        for name in ("in_flight", "tokens_per_second", "accepted_length", "seconds_per_round")
    }
    for name in ("tokens_per_second", "seconds_per_round"):
        figures[f"{name}_range"] = [pick(one[name] for one in windows) for pick in (min, max)]
    figures["prefill_share_at_most"] = statistics.median(one["bursts"] for one in windows) * burst_seconds / seconds
    latencies, tokens = (
        sorted(sum((one[name] for one in windows), [])) for name in ("latencies", "tokens_per_request")
    )
    return figures | {
        "windows": len(windows),
        "requests": len(latencies),
        "errors": sum(one["errors"] for one in windows),
        "tokens_per_request": statistics.mean(tokens) if tokens else None,
        "latency_median": statistics.median(latencies) if latencies else None,
        "latency_p95": latencies[int(0.95 * (len(latencies) - 1))] if latencies else None,
    }


def over_first(figures: dict, first: dict) -> dict:
    """How much faster than the first server, and of what that is made."""
    return {
        "tokens_per_second": figures["tokens_per_second"] / first["tokens_per_second"],
        "accepted_length": figures["accepted_length"] / first["accepted_length"],
        "rounds_per_second": first["seconds_per_round"] / figures["seconds_per_round"],
        "in_flight": figures["in_flight"] / first["in_flight"],
    }


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
    parser.add_argument("--windows", type=int, default=3, help="of each server at each concurrency")
    parser.add_argument("--seconds", type=float, default=2.5, help="of a window")
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds before each")
    parser.add_argument("--burst", type=int, help="slots filled at a time (default: a quarter of the concurrency)")
    parser.add_argument("--num-prompts", type=int, default=210, help="different ones")
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument(
        "--min-answer", type=int, default=0, help="tokens, of the first server's answers to the prompts kept"
    )
    parser.add_argument("--max-prompt-tokens", type=int, default=1024)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--ignore-eos", action="store_true", help="always generate --max-new-tokens tokens")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args(argv)


async def one_token(client: Client, prompts: list[list[int]], sampling: dict) -> float:
    """Seconds that one-token requests for all prompts take together."""
    began = time.perf_counter()
    await asyncio.gather(*(client.generate(ids, sampling | {"max_new_tokens": 1}) for ids in prompts))
    return time.perf_counter() - began


async def with_long_answers(client: Client, prompts: list[list[int]], sampling: dict, least: int) -> list[list[int]]:
    """The prompts whose answers have at least `least` tokens.

    Raises:
        ValueError: there are none.
    """
    gate = asyncio.Semaphore(64)

    async def is_long(ids):
        async with gate:
            return (await client.generate(ids, sampling))["meta_info"]["completion_tokens"] >= least

    kept = [ids for ids, long in zip(prompts, await asyncio.gather(*map(is_long, prompts))) if long]
    if not kept:
        raise ValueError(f"--min-answer must leave a prompt, none of {len(prompts)} has an answer of {least} tokens")
    return kept


async def measure(args: argparse.Namespace, prompts: list[list[int]], result: dict) -> None:
    """Adds figures to `result` and writes it after every concurrency: a run that is cut keeps what it has."""
    sampling = {"temperature": args.temperature, "top_p": args.top_p, "max_new_tokens": args.max_new_tokens}
    sampling["ignore_eos"] = args.ignore_eos
    clients = {name: Client(url) for name, url in args.server}
    first = next(iter(clients))
    if args.min_answer:
        prompts = await with_long_answers(clients[first], prompts, sampling, args.min_answer)
    servers = {}
    for name, client in clients.items():
        for begin in range(0, len(prompts), 16):  # fills the prefix cache
            await one_token(client, prompts[begin : begin + 16], sampling)
        alone = statistics.median([await one_token(client, [ids], sampling) for ids in prompts[:10]])
        servers[name] = {"facts": await server_facts(client), "one_token_seconds": alone, "runs": []}
    result |= {"sampling": sampling, "prompts": len(prompts), "min_answer": args.min_answer, "servers": servers}
    result |= {"seconds": args.seconds, "warm_up": args.warm_up}
    whole, order = args.warm_up + args.seconds, list(clients)
    for concurrency in args.concurrency:
        burst = min(concurrency, args.burst or max(1, concurrency // 4))
        windows, errors, burst_seconds = {name: [] for name in clients}, {name: set() for name in clients}, {}
        for name, client in clients.items():
            some = list(itertools.islice(itertools.cycle(prompts), burst))
            burst_seconds[name] = statistics.median([await one_token(client, some, sampling) for _ in range(5)])
        for turn in range(args.windows):
            for name in order[:: 1 - 2 * (turn % 2)]:
                # all servers meet the same prompts in a turn, and others in the next
                shift = turn * len(prompts) // args.windows
                own = prompts[shift:] + prompts[:shift]
                answers = await keep_busy(clients[name], own, sampling, concurrency, burst, whole)
                windows[name].append(summarise(answers, args.warm_up, whole))
                errors[name] |= {answer["error"] for answer in answers if "error" in answer}
        for name, found in windows.items():
            figures = {"concurrency": concurrency, "burst": burst, "burst_seconds": burst_seconds[name]}
            figures |= together(found, args.seconds, burst_seconds[name])
            if errors[name]:
                figures["error_texts"] = sorted(errors[name])[:5]
            servers[name]["runs"].append(figures)
            if name != first:
                figures["over_first"] = over_first(figures, servers[first]["runs"][-1])
            print(name, json.dumps(figures), flush=True)
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
