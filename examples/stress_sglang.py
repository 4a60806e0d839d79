"""Load and faults against a running SGLang server: does it survive, does memory come back, are answers still right.

    python examples/serve_sglang.py --target TARGET --drafter DRAFTER --keep &
    python examples/stress_sglang.py --requests 10000 --concurrency 64 --vocabulary 49152 --output stress.json

Requests of random lengths, greedy and sampled, are mixed with faults: aborts by id, clients that leave (while streaming or while
waiting), prompts longer than the context, malformed bodies. A canary set of greedy requests is asked alone before, among the load,
and after it. Asked alone, texts must stay those of before; among the load, batches of other sizes round differently, so texts may part at
near-ties: `--tie-check FOLDER` (the target, in fp32) decides whether all that parted did so where two tokens are nearly equal. In the
end the server must be idle and its KV pool empty, as it was at the beginning.
Exit status 1 if anything failed; the JSON says what.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

from sglang_client import Client, Refused


# share of requests of each kind; the rest are ordinary ones
FAULTS = {"abort": 0.06, "leave-stream": 0.05, "leave": 0.05, "too-long": 0.03, "malformed": 0.04}

MALFORMED = [
    b"",
    b"{",
    b"[1, 2, 3]",
    b'{"input_ids": "text", "sampling_params": {}}',
    b'{"input_ids": [5, 6], "sampling_params": {"temperature": -1}}',
    b'{"input_ids": [5, 6], "sampling_params": {"temperature": "hot"}}',
    b'{"input_ids": [], "sampling_params": {"max_new_tokens": 4}}',
    b'{"sampling_params": {"max_new_tokens": 4}}',
    b"\xff\xfe\x00",
]


async def pool_of(client: Client) -> dict:
    """The KV pool's state: tokens in use by requests, size, and requests at work, over all data-parallel ranks."""
    loads = (await client.json("/v1/loads"))["loads"]
    names = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_total_num_tokens")
    return {name: sum(load.get(name, 0) for load in loads) for name in names}


async def idle_pool(client: Client, limit: float) -> tuple[dict, bool]:
    """The pool's state once nothing runs and the prefix cache is flushed, and whether that came about in `limit` seconds."""
    began, state = time.monotonic(), {}
    while time.monotonic() - began < limit:
        state = await pool_of(client)
        if not state["num_running_reqs"] and not state["num_waiting_reqs"]:
            try:
                await client.json("/flush_cache", {})
                await asyncio.sleep(0.3)
                state = await pool_of(client)
            except Refused as error:  # it still holds something
                state["flush_refused"] = error.text
            else:
                if not state["num_used_tokens"]:
                    return state, True
        await asyncio.sleep(0.5)
    return state, False


class Load:
    """The requests of one run.

    Args:
        client: of the server.
        args: see `parse_arguments`.
        canaries: `[(prompt, answer)]`.
    """

    def __init__(self, client: Client, args, canaries):
        self.client, self.args, self.canaries = client, args, canaries
        self.random = random.Random(args.seed)
        self.outcomes: Counter = Counter()
        self.unexpected: list[str] = []
        self.parted: list[tuple[list[int], list[int], list[int]]] = []
        self.latencies: list[float] = []
        self.tokens = self.canaries_asked = self.serial = 0

    def prompt(self, low: int = 1, high: int | None = None) -> list[int]:
        # lengths over the whole range, short ones more often
        high = high or self.args.max_prompt_tokens
        length = min(high, max(low, int(low * (high / low) ** self.random.random())))
        return [self.random.randrange(10, self.args.vocabulary) for _ in range(length)]

    def sampling(self) -> dict:
        choice = self.random.random()
        tokens = max(1, int(self.args.max_new_tokens ** self.random.random()))
        if choice < 0.5:
            return {"temperature": 0.0, "max_new_tokens": tokens}
        sampled = {"temperature": self.random.choice((0.5, 0.7, 1.0, 1.3)), "max_new_tokens": tokens}
        if choice < 0.75:
            sampled["top_p"] = self.random.choice((0.5, 0.9, 0.95))
        if choice < 0.65:
            sampled["top_k"] = self.random.choice((1, 5, 50))
        return sampled

    async def run(self) -> None:
        """All requests, `concurrency` at a time."""
        left = self.args.requests
        ends = time.monotonic() + self.args.time_limit

        async def work():
            nonlocal left
            while left > 0 and time.monotonic() < ends:
                left -= 1
                await self.one()

        await asyncio.gather(*(work() for _ in range(self.args.concurrency)))
        self.outcomes["not sent"] = max(left, 0)

    async def one(self) -> None:
        """One request of a random kind, whose outcome is counted."""
        draw, kind = self.random.random(), "ordinary"
        for name, share in FAULTS.items():
            draw -= share
            if draw < 0:
                kind = name
                break
        else:
            if self.canaries and self.random.random() < self.args.canary_share:
                kind = "canary"
        try:
            outcome = await getattr(self, kind.replace("-", "_"))()
        except Refused as error:
            outcome = f"refused {error.status}"
            self.unexpected.append(f"{kind}: {error}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            outcome = type(error).__name__
            self.unexpected.append(f"{kind}: {type(error).__name__}: {error}")
        self.outcomes[f"{kind}: {outcome}"] += 1

    async def ordinary(self) -> str:
        prompt, sampling = self.prompt(), self.sampling()
        began = time.monotonic()
        reply = await self.client.generate(prompt, sampling)
        self.latencies.append(time.monotonic() - began)
        return self.checked(reply, sampling)

    def checked(self, reply: dict, sampling: dict) -> str:
        ids, reason = reply["output_ids"], reply["meta_info"]["finish_reason"]["type"]
        self.tokens += len(ids)
        if not 1 <= len(ids) <= sampling["max_new_tokens"]:
            raise ValueError(f"{len(ids)} tokens where at most {sampling['max_new_tokens']} were asked for")
        if not all(0 <= token < self.args.vocabulary for token in ids):
            raise ValueError(
                f"a token outside the vocabulary: {[t for t in ids if not 0 <= t < self.args.vocabulary]}"
            )
        if reason not in ("stop", "length") or (reason == "length" and len(ids) != sampling["max_new_tokens"]):
            raise ValueError(f"finish reason {reason!r} after {len(ids)} of {sampling['max_new_tokens']} tokens")
        return "answered"

    async def canary(self) -> str:
        prompt, wanted = self.random.choice(self.canaries)
        reply = await self.client.generate(prompt, self.args.canary_sampling)
        self.canaries_asked += 1
        if reply["output_ids"] != wanted:
            self.parted.append((prompt, wanted, reply["output_ids"]))
            return "another text"
        return "same text"

    async def abort(self) -> str:
        """Aborted by id shortly after it was sent; it may have ended before."""
        self.serial += 1
        rid = f"stress-{self.args.seed}-{self.serial}"
        sampling = self.sampling() | {"max_new_tokens": self.args.max_new_tokens, "ignore_eos": True}
        task = asyncio.create_task(self.client.generate(self.prompt(), sampling, rid=rid))
        await asyncio.sleep(self.random.uniform(0, self.args.patience))
        await self.client.json("/abort_request", {"rid": rid})
        try:
            reply = await task
        except Refused as error:
            if "abort" in error.text.lower():
                return "aborted"  # a request that had not begun is answered with a status
            raise
        return "aborted" if reply["meta_info"]["finish_reason"]["type"] == "abort" else "had ended"

    async def leave_stream(self) -> str:
        """A client that leaves while it is sent tokens."""
        return await self.gone(True)

    async def leave(self) -> str:
        """A client that leaves while it waits for the whole answer."""
        return await self.gone(False)

    async def gone(self, stream: bool) -> str:
        sampling = self.sampling() | {"max_new_tokens": self.args.max_new_tokens, "ignore_eos": True}
        body = json.dumps({"input_ids": self.prompt(), "sampling_params": sampling, "stream": stream}).encode()
        reader, writer = await self.client.connect()
        try:
            writer.write(self.client.head("POST", "/generate", len(body)) + body)
            await writer.drain()
            if stream:
                async with asyncio.timeout(self.client.timeout):
                    await reader.readuntil(b"data:")
            await asyncio.sleep(self.random.uniform(0, self.args.patience))
        finally:
            writer.transport.abort()
        return "left"

    async def too_long(self) -> str:
        """A prompt, or a prompt and answer together, beyond the context: must be refused, not cut."""
        length = self.args.context_length + self.random.randrange(0, 64)
        whole = self.random.random() < 0.5
        prompt = [self.random.randrange(10, self.args.vocabulary) for _ in range(length if whole else 8)]
        return await self.must_refuse(
            json.dumps({"input_ids": prompt, "sampling_params": {"max_new_tokens": 4 if whole else length}}).encode()
        )

    async def malformed(self) -> str:
        # SGLang answers some of these with status 500; it must refuse them in some way and live on
        return await self.must_refuse(self.random.choice(MALFORMED), 600)

    async def must_refuse(self, body: bytes, below: int = 500) -> str:
        status, text = await self.client.raw("POST", "/generate", body)
        if not 400 <= status < below:
            raise ValueError(f"status {status} for {body[:60]!r}: {text[:120]!r}")
        return f"refused {status}"


async def ask_canaries(client: Client, args, prompts) -> list[list[int]]:
    """Each canary alone, one after the other: always the same batch."""
    return [(await client.generate(prompt, args.canary_sampling))["output_ids"] for prompt in prompts]


def tie_gaps(folder: str, parted) -> list[float]:
    """The fp32 target's logit gap between both tokens where each pair of texts parts; infinite where one merely ends."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    gaps = []
    for prompt, wanted, got in parted:
        at = next((i for i, (a, b) in enumerate(zip(wanted, got)) if a != b), None)
        if at is None:
            gaps.append(float("inf"))
            continue
        with torch.inference_mode():
            logits = target(torch.tensor([prompt + wanted[:at]], device=device)).logits[0, -1]
        gaps.append(float((logits[wanted[at]] - logits[got[at]]).abs()))
    return gaps


async def stress(args) -> dict:
    """The whole run; see the module's docstring."""
    client = Client(args.url, args.timeout)
    order = random.Random(args.seed + 1)
    prompts = [
        [order.randrange(10, args.vocabulary) for _ in range(order.randrange(4, 96))] for _ in range(args.canaries)
    ]
    info = await client.json("/server_info")
    if args.context_length is None:
        args.context_length = int(info.get("context_length") or 2048)
    before, clean = await idle_pool(client, args.settle)
    failures = [] if clean else [f"the server was not idle at the beginning: {before}"]
    alone = await ask_canaries(client, args, prompts)
    await idle_pool(client, args.settle)  # a prompt found in the prefix cache is computed in another shape
    again = await ask_canaries(client, args, prompts)
    load = Load(client, args, list(zip(prompts, alone)))
    began = time.monotonic()
    await load.run()
    seconds = time.monotonic() - began
    await asyncio.sleep(args.linger)
    after, clean = await idle_pool(client, args.settle)
    if not clean:
        failures.append(f"the KV pool did not become empty: {after}")
    if after.get("max_total_num_tokens") != before.get("max_total_num_tokens"):
        failures.append(f"the KV pool changed its size: {before} became {after}")
    final = await ask_canaries(client, args, prompts)
    changed = [part for texts in (again, final) for part in zip(prompts, alone, texts) if part[1] != part[2]]
    if changed and not args.tie_check:
        failures.append(f"{len(changed)} canaries asked alone were answered in another way later")
    load.parted += changed
    if load.unexpected:
        failures.append(f"{len(load.unexpected)} requests ended in a way they must not")
    client.close()
    counts = Counter()
    for name, count in load.outcomes.items():
        counts[name.split(":")[0]] += count
    gaps = None
    if load.parted and args.tie_check:
        gaps = sorted(tie_gaps(args.tie_check, load.parted))
        if gaps[-1] > 0.5:
            failures.append(f"{sum(gap > 0.5 for gap in gaps)} canaries parted at more than a near-tie")
    latencies = sorted(load.latencies)
    return {
        "passed": not failures,
        "failures": failures,
        "requests": args.requests,
        "concurrency": args.concurrency,
        "seconds": seconds,
        "kinds": dict(counts),
        "outcomes": dict(sorted(load.outcomes.items())),
        "unexpected": load.unexpected[:20],
        "output_tokens": load.tokens,
        "latency_median": statistics.median(latencies) if latencies else None,
        "latency_p99": latencies[int(0.99 * (len(latencies) - 1))] if latencies else None,
        "canaries": {
            "asked": load.canaries_asked,
            "changed_alone": len(changed),
            "parted": len(load.parted),
            "tie_gaps": gaps and {"median": gaps[len(gaps) // 2], "largest": gaps[-1]},
            # for a check elsewhere
            "parted_texts": load.parted[:200] if gaps is None else [],
        },
        "pool_before": before,
        "pool_after": after,
        "server": {name: info.get(name) for name in ("version", "tp_size", "speculative_algorithm", "context_length")},
    }


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, required=True, help="prompts are random token ids below this")
    parser.add_argument("--max-prompt-tokens", type=int, default=600)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--context-length", type=int, help="default: what the server says")
    parser.add_argument("--canaries", type=int, default=16)
    parser.add_argument("--canary-tokens", type=int, default=48)
    parser.add_argument("--canary-share", type=float, default=0.05, help="of the ordinary requests")
    parser.add_argument("--tie-check", metavar="FOLDER", help="the target, to judge canaries whose text parted")
    parser.add_argument("--patience", type=float, default=0.3, help="seconds until a client aborts or leaves, at most")
    parser.add_argument("--linger", type=float, default=6.0, help="seconds for the server to notice who has left")
    parser.add_argument("--settle", type=float, default=30.0, help="seconds for the server to become idle")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one answer")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds after which none is sent")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    args.canary_sampling = {"temperature": 0.0, "max_new_tokens": args.canary_tokens}
    return args


def main(argv: list[str] | None = None) -> dict:
    args = parse_arguments(argv)
    try:
        result = asyncio.run(stress(args))
    except (OSError, Refused) as error:
        # the server is gone or does not answer at all
        result = {"passed": False, "failures": [f"the server cannot be used: {type(error).__name__}: {error}"]}
    result["command"] = [Path(sys.argv[0]).name, *(sys.argv[1:] if argv is None else argv)]
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    shown = {name: result[name] for name in ("passed", "failures", "seconds", "kinds") if name in result}
    print(json.dumps(shown, indent=1), flush=True)
    return result


if __name__ == "__main__":
    sys.exit(0 if main()["passed"] else 1)
