"""The backend that sends prompts to running servers and times their answers."""

import json
import sys
import time
from collections import defaultdict

from tqdm import tqdm
from transformers import AutoTokenizer

from benchmarking.inputs import name_of_target, named, request_fields
from benchmarking.work import part_of
from dspine.integrations.evaluation import ResultStore, Server
from dspine.integrations.evaluation.decoding import prompt_seed


class ServerRun:
    """Running servers, each with its own drafter (or none); every concurrency sends all prompts of a set at once."""

    def __init__(self, args):
        self.args = args
        self.tokenizer = AutoTokenizer.from_pretrained(args.target, trust_remote_code=args.trust_remote_code)
        self.servers = {name: Server(url, args.server_api) for name, url in named(args.server).items()}
        self.info = {name: server.info() for name, server in self.servers.items()}

    def settings(self) -> dict:
        names = ("backend", "max_new_tokens", "thinking", "server_api")
        return {name: getattr(self.args, name) for name in names} | {"target": name_of_target(self.args.target)}

    def described(self) -> dict:
        return self.info

    def run(self, store: ResultStore, prompts: list, deadline: float) -> bool:
        args, sets = self.args, defaultdict(list)
        prompts = part_of(prompts, args.rank, args.world)
        for prompt in prompts:
            sets[prompt.dataset].append(prompt)
        plan = [
            (temperature, seed, concurrency, rows, name)
            for temperature in args.temperatures
            for seed in (args.seeds if temperature > 0 else args.seeds[:1])
            for rows in sets.values()
            for concurrency in args.concurrency
            for name in self.servers
        ]
        plan = [
            part
            for part in plan
            if any(store.key(self.record(part[4], prompt, *part[:3])) not in store.done for prompt in part[3])
        ]
        for name in {part[4] for part in plan}:
            self.servers[name].load(prompts[: max(args.concurrency)], max(args.concurrency), args.warmup_tokens)
        total = sum(len(part[3]) for part in plan)
        with tqdm(total=total, desc="requests", unit="request", disable=args.rank > 0, file=sys.stderr) as bar:
            for temperature, seed, concurrency, rows, name in plan:
                if time.monotonic() > deadline:
                    return False
                server = self.servers[name]
                server.flush_cache()
                seeds = [prompt_seed(seed, prompt) % 2**31 for prompt in rows]
                answers, wall = server.load(rows, concurrency, args.max_new_tokens, temperature, seeds, bar.update)
                tokens = sum(answer.new_tokens for answer in answers)
                for prompt, answer in zip(rows, answers):
                    record = self.record(name, prompt, temperature, seed, concurrency, answer)
                    store.add(record | {"wall_seconds": wall, "wall_tokens": tokens})
        return True

    def record(self, name, prompt, temperature, seed, concurrency, answer=None) -> dict:
        speculative = {k: v for k, v in self.info[name].items() if k.startswith("speculative_")}
        block_size = speculative.get("speculative_num_draft_tokens")
        record = {
            "backend": "sglang" if self.args.server_api == "sglang" else "openai",
            "method": name,
            "kind": "target" if name == "target" else "drafter",
            "block_size": block_size,
            "fingerprint": json.dumps(speculative, sort_keys=True) if speculative else None,
            **request_fields(prompt, temperature, seed, concurrency),
        }
        if answer is not None:
            record |= {
                "batch_size": None,
                "prompt_tokens": len(prompt.input_ids),
                "new_tokens": answer.new_tokens,
                "seconds": answer.seconds,
                "rounds": answer.rounds,
                "accepted_lengths": answer.accepted_lengths,
                "rank": self.args.rank,
            }
        return record
