"""Where a round's GPU time goes, from a trace of SGLang's own profiler."""

import asyncio
import gzip
import json
import random
import re
import statistics
import time
from bisect import bisect
from collections import Counter
from pathlib import Path

from sglang_client import Client

from sglang_checks.rounds import timed


NORM = re.compile("rms_?norm", re.IGNORECASE)
RUNTIME = ("cuda_runtime", "cuda_driver")


def merged(events: list[dict]) -> float:
    """Microseconds in which at least one of the kernels ran."""
    total, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event["ts"]):
        end = event["ts"] + event["dur"]
        total += max(0.0, end - max(event["ts"], until))
        until = max(until, end)
    return total


def host_side(events: list[dict], launches: list[float]) -> dict:
    """The host's part of a round, from the trace's runtime calls between one draft graph's launch and the next.

    Returns:
        Medians: microseconds of a round, of it in waits (`...Synchronize`) and in all calls, how many calls, of each kind too, and
        how many operations of PyTorch; empty without runtime events.
    """
    calls = sorted((event for event in events if event.get("cat") in RUNTIME), key=lambda event: event["ts"])
    operations = sorted(event["ts"] for event in events if event.get("cat") == "cpu_op")
    found: dict[str, list[float]] = {}
    for begin, end in zip(launches, launches[1:]):
        inside = [event for event in calls if begin <= event["ts"] < end]
        waits = sum(event["dur"] for event in inside if "Synchronize" in event["name"])
        kinds = Counter(event["name"] for event in inside)
        one = {"round": end - begin, "waits": waits, "in_calls": sum(event["dur"] for event in inside)}
        one |= {"calls": len(inside), "operations": bisect(operations, end) - bisect(operations, begin)}
        one |= {f"calls {name}": count for name, count in kinds.most_common(8)}
        for name, value in one.items():
            found.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def breakdown(events: list[dict]) -> dict:
    """GPU time of one round from a trace's events: draft pass, decoding tail, verification, and what is between.

    A CUDA graph's kernels share the correlation of its launch. Of the two graphs in a round the draft's is the smaller. Its tail is
    what follows the last norm: the product with the output head and everything after it.

    Returns:
        Medians over rounds: `microseconds` from a part's first kernel to its last one's end, `running` of it in which a kernel ran,
        `kernels` launched; the `host`'s part; the longest kernels of every part.

    Raises:
        ValueError: the trace does not hold two kinds of graphs in turn.
    """
    groups: dict[int, list[dict]] = {}
    for event in events:
        if event.get("cat") == "kernel" and "correlation" in event.get("args", {}):
            groups.setdefault(event["args"]["correlation"], []).append(event)
    graphs = [sorted(group, key=lambda event: event["ts"]) for group in groups.values() if len(group) > 20]
    graphs.sort(key=lambda group: group[0]["ts"])
    if len(graphs) < 4:
        raise ValueError(f"the trace must hold several rounds of two graph launches, found {len(graphs)} launches")
    most = max(map(len, graphs))
    is_draft = [len(group) < 0.6 * most for group in graphs]
    everything = sorted((event for group in groups.values() for event in group), key=lambda event: event["ts"])

    def end(event):
        return event["ts"] + event["dur"]

    names = ("round", "draft", "tail", "verify", "rest")
    found = {kind: {name: [] for name in names} for kind in ("microseconds", "running", "kernels")}
    longest: dict[str, list[Counter]] = {name: [] for name in ("draft", "tail", "verify", "rest")}
    for i in range(len(graphs) - 2):
        if not (is_draft[i] and not is_draft[i + 1] and is_draft[i + 2]):
            continue
        draft, verify, following = graphs[i : i + 3]
        last_norm = max((k for k, event in enumerate(draft) if NORM.search(event["name"])), default=None)
        if last_norm is None:
            raise ValueError("the draft graph must hold a norm, by which its tail is told apart")
        begin, stop = draft[0]["ts"], following[0]["ts"]
        own = {id(event) for event in (*draft, *verify)}
        parts = {
            "round": [event for event in everything if begin <= event["ts"] < stop],
            "draft": draft[: last_norm + 1],
            "tail": draft[last_norm + 1 :],
            "verify": verify,
        }
        parts["rest"] = [event for event in parts["round"] if id(event) not in own]
        cut = end(draft[last_norm])
        spans = {"draft": cut - begin, "tail": max(map(end, draft)) - cut}
        spans["verify"] = max(map(end, verify)) - verify[0]["ts"]
        spans |= {"round": stop - begin, "rest": stop - begin - sum(spans.values())}
        for name in names:
            found["microseconds"][name].append(spans[name])
            found["running"][name].append(merged(parts[name]))
            found["kernels"][name].append(len(parts[name]))
        for name, counters in longest.items():
            counters.append(Counter())
            for event in parts[name]:
                counters[-1][event["name"][:60]] += event["dur"]
    if not found["microseconds"]["round"]:
        raise ValueError("the trace must hold draft and verification graphs in turn")
    result = {
        kind: {name: statistics.median(values) for name, values in parts.items()} for kind, parts in found.items()
    }
    result["rounds"] = len(found["microseconds"]["round"])
    for name, counters in longest.items():
        together = {key for counter in counters for key in counter}
        medians = Counter({key: statistics.median(counter[key] for counter in counters) for key in together})
        result[f"{name}_kernels"] = dict(medians.most_common(12))
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in RUNTIME and "correlation" in event.get("args", {})
    }
    calls, ahead = {}, {}
    for name, small in (("draft", True), ("verify", False)):
        firsts = [group[0] for group, is_small in zip(graphs, is_draft) if is_small == small]
        pairs = [(launched.get(one["args"]["correlation"]), one["ts"]) for one in firsts]
        calls[name] = [at for at, _ in pairs if at is not None]
        ahead[name] = [start - at for at, start in pairs if at is not None]
    result["host"] = host_side(events, calls["draft"])
    # from the host's launch to the GPU's start: long while the host runs ahead, a few microseconds where the GPU waits for it
    result["host"] |= {f"{name}_ahead": statistics.median(values) for name, values in ahead.items() if values}
    return result


def ratios(first: list[dict], other: list[dict]) -> dict:
    """Times of the first server over another's: `running` of every part, and verification kernel by kernel, which both do alike.

    Where all long kernels have one ratio, the GPU's clock differed; where only products do, their data or the power limit; where one
    does, its inputs. Breakdowns with an `error` are left out; empty where none is left.
    """
    good = [[one for one in found if "error" not in one] for found in (first, other)]
    if not all(good):
        return {}

    def median(found, kind, name):
        values = [one[kind][name] for one in found if name in one[kind]]
        return statistics.median(values) if values else None

    def over(kind):
        pairs = {name: [median(found, kind, name) for found in good] for name in good[0][0][kind]}
        return {name: a / b for name, (a, b) in pairs.items() if a is not None and b}

    return {"running": over("running"), "verify_kernels": over("verify_kernels")}


async def record(client: Client, prompts: list[list[int]], new_tokens: int, args, folder: Path) -> dict:
    """The breakdown of `--steps` steps under a load of all prompts again and again, by SGLang's profiler.

    Raises:
        ValueError: no trace was written, or it is none of rounds.
        OSError, RuntimeError: the server does not answer.
    """
    done = False

    async def load():  # until the trace is there: short answers may end before it has begun
        while not done:
            await timed(client, prompts, new_tokens)

    busy = asyncio.create_task(load())
    try:
        await asyncio.sleep(args.after)
        body = {"output_dir": str(folder), "num_steps": args.steps, "activities": ["CPU", "GPU"]}
        await client.json("/start_profile", body | {"with_stack": False, "record_shapes": False})
        began, files = time.monotonic(), []
        while not files and not busy.done():
            if time.monotonic() - began > args.patience:
                raise ValueError(f"no trace was written to {folder} within {args.patience:g} s")
            await asyncio.sleep(0.2)
            files = [path for path in folder.rglob("*.json.gz") if path.stat().st_size]
    finally:
        done = True
        await busy
    for attempt in range(40):
        try:
            with gzip.open(files[0], "rt") as trace:
                return breakdown(json.load(trace)["traceEvents"])
        except (EOFError, json.JSONDecodeError):  # still being written
            if attempt == 39:
                raise
            await asyncio.sleep(0.25)


def profile(args) -> dict:
    order, result = random.Random(1), {"servers": dict(args.server), "concurrency": {}}

    async def one(name, url, concurrency, repeat):
        client = Client(url, timeout=60.0)
        folder = (args.output.parent / f"trace-{args.output.stem}-{name}-{concurrency}-{repeat}").absolute()
        folder.mkdir(parents=True, exist_ok=True)
        prompts = [
            [order.randrange(100, args.vocabulary) for _ in range(args.prompt_tokens)] for _ in range(concurrency)
        ]
        try:
            return await record(client, prompts, args.new_tokens, args, folder)
        finally:
            client.close()

    for concurrency in args.concurrency:
        # there and back again: the first trace of a process is the most disturbed
        turns = [(server, repeat) for repeat in range(args.repeats) for server in args.server[:: 1 - 2 * (repeat % 2)]]
        figures = result["concurrency"].setdefault(concurrency, {name: [] for name, _ in args.server})
        for (name, url), repeat in turns:
            try:
                found = asyncio.run(one(name, url, concurrency, repeat))
            except (ValueError, OSError, RuntimeError, EOFError, IndexError) as error:
                found = {"error": f"{type(error).__name__}: {error}"}
            figures[name].append(found)
            print(concurrency, name, json.dumps(found), flush=True)
            args.output.write_text(json.dumps(result, indent=1) + "\n")  # a cut run keeps what it has
        first, *others = figures
        compared = {f"{first} over {name}": ratios(figures[first], figures[name]) for name in others}
        result.setdefault("ratios", {})[concurrency] = compared
        print(concurrency, json.dumps(compared), flush=True)
    return result
