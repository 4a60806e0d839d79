"""Time per verification round of servers at fixed concurrency, in short windows that alternate between them."""

import asyncio
import json
import random
import statistics
import time

from sglang_client import Client


async def timed(client: Client, prompts: list[list[int]], new_tokens: int) -> dict:
    """All prompts at once, `new_tokens` tokens each: seconds until the last answer, tokens and rounds of all."""
    sampling = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
    began = time.perf_counter()
    replies = await asyncio.gather(*(client.generate(ids, sampling) for ids in prompts))
    seconds = time.perf_counter() - began
    metas = [reply["meta_info"] for reply in replies]
    return {
        "seconds": seconds,
        "tokens": sum(meta["completion_tokens"] for meta in metas),
        "rounds": sum(meta.get("spec_verify_ct") or 0 for meta in metas),
    }


def step_of(window: dict, empty: dict, concurrency: int) -> dict:
    """Seconds of one round (of one token where there are none) without what a request costs besides: prefill, transport.

    `empty` are the same requests with one new token, which the prefill gives.
    """
    seconds, rounds = window["seconds"] - empty["seconds"], window["rounds"] - empty["rounds"]
    tokens = window["tokens"] - empty["tokens"]
    steps = (rounds or tokens) / concurrency
    return {"seconds_per_step": seconds / steps, "accepted_length": tokens / rounds if rounds else 1.0}


class ReferenceKernel:
    """A matrix product of the output head's shape, timed between windows: what it takes tells how fast the GPU's clock is then.

    Timed with random rows and with equal ones: the GPU needs less power for the latter, and is faster where power is the limit. Does
    nothing where PyTorch or a GPU is missing.

    Args:
        rows: of the hidden states; many make the product depend on the clock and not on the memory.
        shape: width and vocabulary.
    """

    def __init__(self, rows: int, shape: tuple[int, int]):
        self.ready = False
        try:
            import torch

            if not torch.cuda.is_available():
                return
            self.torch = torch
            random_rows = torch.randn(rows, shape[0], device="cuda", dtype=torch.bfloat16)
            self.rows = {"random": random_rows, "equal": random_rows[:1].repeat(rows, 1)}
            self.b = torch.randn(shape[1], shape[0], device="cuda", dtype=torch.bfloat16)
            self.ready = True
            self()
        except (ImportError, RuntimeError) as error:
            print("no reference kernel:", error, flush=True)

    def __call__(self, repeats: int = 5) -> dict[str, float]:
        """Microseconds, the median of `repeats`, for each kind of rows; empty where nothing is timed."""
        if not self.ready:
            return {}
        torch, found = self.torch, {}
        for name, rows in self.rows.items():
            times = []
            for _ in range(repeats):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                torch.nn.functional.linear(rows, self.b)
                end.record()
                end.synchronize()
                times.append(1000 * start.elapsed_time(end))
            found[f"reference_microseconds_{name}_rows"] = statistics.median(times)
        return found


def rounds(args) -> dict:
    """Time per round of the first server against each other one, in short windows A B B A, so that clock and neighbours are alike."""
    order = random.Random(0)
    result = {"servers": dict(args.server), "prompt_tokens": args.prompt_tokens, "new_tokens": args.new_tokens}
    clients = {name: Client(url) for name, url in args.server}
    first, *others = clients
    # the last number given is that of all others
    repeats = {name: args.repeats[min(i, len(args.repeats) - 1)] for i, name in enumerate(others)}
    result |= {"repeats": repeats, "concurrency": {}}
    kernel = ReferenceKernel(480, tuple(args.reference_shape))

    def prompts(count):
        return [[order.randrange(100, args.vocabulary) for _ in range(args.prompt_tokens)] for _ in range(count)]

    async def window(name, concurrency, new_tokens):
        # new prompts every time: none may be found in the prefix cache
        empty = await timed(clients[name], prompts(concurrency), 1)
        whole = await timed(clients[name], prompts(concurrency), new_tokens)
        await asyncio.sleep(0.05)  # a server that schedules ahead has begun one more round
        return step_of(whole, empty, concurrency) | {"seconds_of_one_token": empty["seconds"]} | kernel()

    async def run():
        for concurrency in args.concurrency:
            for name in clients:  # warms up
                await window(name, concurrency, 16)
            windows = {name: [] for name in clients}
            ratios = {name: [] for name in others}
            for repeat in range(max(repeats.values())):
                for name in others:
                    if repeat >= repeats[name]:
                        continue
                    pair = (first, name) if repeat % 2 == 0 else (name, first)
                    found = {first: [], name: []}
                    for one in (*pair, *reversed(pair)):
                        found[one].append(await window(one, concurrency, args.new_tokens))
                    [windows[one].extend(values) for one, values in found.items()]
                    sums = {one: sum(value["seconds_per_step"] for value in values) for one, values in found.items()}
                    ratios[name].append(sums[first] / sums[name])
            figures = {
                name: {key: statistics.median(one[key] for one in ones) for key in ones[0]}
                for name, ones in windows.items()
            }
            for name, ones in windows.items():
                times = sorted(one["seconds_per_step"] for one in ones)
                figures[name] |= {"windows": len(ones), "range": [times[0], times[-1]]}
            for name, values in ratios.items():
                figures[first][f"over_{name}"] = statistics.median(values)
                figures[first][f"over_{name}_range"] = [min(values), max(values)]
            result["concurrency"][concurrency] = figures
            print(concurrency, json.dumps(figures), flush=True)
            args.output.write_text(json.dumps(result, indent=1) + "\n")  # a cut run keeps what it has

        [client.close() for client in clients.values()]

    asyncio.run(run())
    return result
