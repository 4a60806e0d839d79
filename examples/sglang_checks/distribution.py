"""Short sampled continuations of servers, compared with the first server's by two-sample chi-square tests."""

import asyncio
import time
from collections import Counter

from sglang_client import Client

from sglang_checks.chi_square import fisher, two_sample_test


# The beginning of the answer is given, so that the tokens tested are in the middle of a text, where drafts are accepted; open ones, so
# that many continuations are left at low temperature too
DISTRIBUTION_PROMPTS = [
    ("Tell me a story about a dog.", "Once upon a time, in a small village, there lived a"),
    ("Tell me a story about the sea.", "The old sailor looked at the"),
    ("Give me three names for a new cafe.", 'Here are three names for a new cafe: "'),
    ("Write a poem about autumn.", "The leaves are"),
]


class Sampler:
    """Collects continuations of one server. Every request mixes all cases (a prompt at a setting) and a greedy row of every prompt.

    Args:
        cases: `(prompt, sampling parameters)` pairs; the greedy rows take the first pair of each prompt.
        rows: of every case in one request.
    """

    def __init__(self, client: Client, cases: list[tuple[list[int], dict]], rows: int):
        self.client, self.cases, self.rows = client, cases, rows
        self.sampled = [Counter() for _ in cases]
        self.greedy: dict[tuple, Counter] = {tuple(prompt): Counter() for prompt, _ in cases}
        self.taken = 0

    async def work(self, samples: int, until: float):
        """Asks until `samples` of every case are there or on their way, or the time is over."""
        while self.taken < samples and time.monotonic() < until:
            size = min(self.rows, samples - self.taken)
            self.taken += size
            plans = [(i, prompt, sampling) for i, (prompt, sampling) in enumerate(self.cases) for _ in range(size)]
            first = {tuple(prompt): sampling for prompt, sampling in reversed(self.cases)}
            plans += [(None, list(prompt), one | {"temperature": 0.0}) for prompt, one in first.items()]
            replies = await self.client.generate([one[1] for one in plans], [one[2] for one in plans])
            for (case, prompt, _), reply in zip(plans, replies):
                counter = self.greedy[tuple(prompt)] if case is None else self.sampled[case]
                counter[tuple(reply["output_ids"])] += 1


def compare_samples(one: Counter, other: Counter, depth: int) -> list[dict]:
    """Tests of the first 1, 2, ... `depth` tokens together."""
    results = []
    for length in range(1, depth + 1):
        cut = [Counter(), Counter()]
        for whole, part in zip((one, other), cut):
            for ids, count in whole.items():
                part[ids[:length]] += count
        results.append(two_sample_test(*cut))
    return results


def tests_of(cases: list[dict], depth: int) -> dict:
    """Decision on one server's cases against the first's: `tests` of each case hold one p-value per number of tokens."""
    # tests of one prompt are of one sample; across prompts they are independent
    together = [fisher([case["tests"][i]["p"] for case in cases]) for i in range(depth)]
    smallest = min(test["p"] for case in cases for test in case["tests"])
    # the first token is the prefill's; the decision is on all tokens together
    passed = together[-1] > 0.01 and smallest * len(cases) * depth > 0.01
    return {"p_by_depth": together, "smallest_p": smallest, "tests": len(cases) * depth, "passed": passed}


def distribution(args) -> dict:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    prompts = []
    for question, begun in DISTRIBUTION_PROMPTS:
        message = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False) + begun
        prompts.append((begun, tokenizer(text, add_special_tokens=False).input_ids))
    cases, names = [], []
    for temperature, top_p in args.settings:
        sampling = {"temperature": temperature, "top_p": top_p, "max_new_tokens": args.tokens, "ignore_eos": True}
        cases += [(ids, sampling) for _, ids in prompts]
        names += [(f"temperature={temperature:g}, top_p={top_p:g}", begun) for begun, _ in prompts]

    async def run():
        clients = {name: Client(url) for name, url in args.server}
        samplers = {name: Sampler(client, cases, args.rows) for name, client in clients.items()}
        until = time.monotonic() + args.time_limit
        try:
            work = (one.work(args.samples, until) for one in samplers.values() for _ in range(args.in_flight))
            await asyncio.gather(*work)
        finally:
            [client.close() for client in clients.values()]
        return samplers

    began = time.monotonic()
    found = asyncio.run(run())
    if not all(one.taken for one in found.values()):
        raise ValueError(f"--time-limit of {args.time_limit:g} s must leave time for samples of every server")
    (_, reference), *others = found.items()
    result = {"servers": dict(args.server), "sampling_seconds": time.monotonic() - began, "passed": True}
    result |= {"samples": {name: one.taken for name, one in found.items()}, "against_first": {}}
    for name, other in others:
        settings: dict[str, list[dict]] = {}
        for i, (setting, begun) in enumerate(names):
            pair = (reference.sampled[i], other.sampled[i])
            tests = compare_samples(*pair, args.tokens)
            greedy = [one.greedy[tuple(cases[i][0])] for one in (reference, other)]
            case = {
                "prompt": begun,
                "tests": tests,
                "distinct": list(map(len, pair)),
                "greedy_rows_differ": sum(greedy[1].values()) - max(greedy[1].values()),
                "greedy_equal": greedy[0].most_common(1)[0][0] == greedy[1].most_common(1)[0][0],
            }
            settings.setdefault(setting, []).append(case)
            print(name, setting, [f"{test['p']:.3f}" for test in tests], case["distinct"], flush=True)
        result["against_first"][name] = {}
        for setting, found_cases in settings.items():
            decision = tests_of(found_cases, args.tokens)
            result["against_first"][name][setting] = decision | {"prompts": found_cases}
            result["passed"] &= decision["passed"]
            p = [f"{one:.4f}" for one in decision["p_by_depth"]]
            print(
                f"{name} {setting} together {p} smallest {decision['smallest_p']:.4f} {decision['passed']}", flush=True
            )
    print("samples of each case", result["samples"], "passed", result["passed"], flush=True)
    return result
