"""Short sampled continuations of servers, compared with the first server's, and with the distribution that the target's logits give.

How `distribution` decides, fixed before anything is sampled. A cell is a prompt at a setting and a number of tokens, its test the
two-sample chi-square test of the first so many tokens together. If in the first sample p times the number of cells is below 0.01 for a
cell (Bonferroni), its setting is sampled afresh for the rest of the time, and the check fails if there p times the number of suspected
cells is below 0.01 for one of them. Two equal distributions fail once in 10,000 runs.

With enough samples any two kernels differ, so each test also gives `distance`, the chi-square distance of the distributions as far as it
exceeds chance, with its standard error. Rounding in float16 makes 0.0001 for every token of SmolLM2-135M, up to 0.0003 for some.
"""

import asyncio
import gzip
import json
import math
import time
from collections import Counter
from pathlib import Path

from sglang_client import Client

from sglang_checks.chi_square import chi_square_tail, two_sample_test


LEVEL = 0.01

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
        test = two_sample_test(*cut)
        n, m = test["samples"]
        results.append(test | distance(test["chi_square"], test["freedom"], n * m / (n + m)))
    return results


def distance(chi_square: float, freedom: int, samples: float) -> dict:
    """What a chi-square statistic exceeds its expectation by, per sample, and the standard error of that."""
    return {"distance": (chi_square - freedom) / samples, "distance_error": math.sqrt(2 * freedom) / samples}


def cell_text(names: list[tuple[str, str]], cell: tuple[int, int]) -> str:
    """A cell for readers: setting, beginning, number of tokens."""
    i, depth = cell
    return f"{', '.join(names[i])}, {depth} tokens"


def suspects(tests: dict) -> dict:
    """The tests (cell to test) whose p is below `LEVEL` after Bonferroni's correction."""
    return {cell: test for cell, test in tests.items() if test["p"] * len(tests) < LEVEL}


async def sample(servers: list, cases: list, goal: int, seconds: float, args) -> dict[str, Sampler]:
    """Samples of all cases from every server at the same time."""
    clients = {name: Client(url) for name, url in servers}
    samplers = {name: Sampler(client, cases, args.rows) for name, client in clients.items()}
    until = time.monotonic() + seconds
    try:
        await asyncio.gather(*(one.work(goal, until) for one in samplers.values() for _ in range(args.in_flight)))
    finally:
        [client.close() for client in clients.values()]
    return samplers


def distribution(args) -> dict:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    cases, names = [], []
    for temperature, top_p in args.settings:
        sampling = {"temperature": temperature, "top_p": top_p, "max_new_tokens": args.tokens, "ignore_eos": True}
        for question, begun in DISTRIBUTION_PROMPTS[: args.num_prompts]:
            message = [{"role": "user", "content": question}]
            text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False) + begun
            cases.append((tokenizer(text, add_special_tokens=False).input_ids, sampling))
            names.append((f"temperature={temperature:g}, top_p={top_p:g}", begun))

    began = time.monotonic()
    found = asyncio.run(sample(args.server, cases, args.samples, args.first_share * args.time_limit, args))
    if not all(one.taken for one in found.values()):
        raise ValueError(f"--time-limit of {args.time_limit:g} s must leave time for samples of every server")
    (_, reference), *others = found.items()
    result = {"servers": dict(args.server), "rule": f"Bonferroni at {LEVEL}, and again in a fresh sample"}
    result |= {"samples": {name: one.taken for name, one in found.items()}, "against_first": {}}
    suspected = {}
    for name, other in others:
        settings, tests = {}, {}
        for i, (setting, begun) in enumerate(names):
            pair = (reference.sampled[i], other.sampled[i])
            found_tests = compare_samples(*pair, args.tokens)
            tests |= {(i, depth): test for depth, test in enumerate(found_tests, 1)}
            greedy = [one.greedy[tuple(cases[i][0])] for one in (reference, other)]
            case = {
                "prompt": begun,
                "tests": found_tests,
                "distinct": list(map(len, pair)),
                "greedy_rows_differ": sum(greedy[1].values()) - max(greedy[1].values()),
                "greedy_equal": greedy[0].most_common(1)[0][0] == greedy[1].most_common(1)[0][0],
            }
            settings.setdefault(setting, []).append(case)
            print(name, setting, [f"{test['p']:.4f}" for test in found_tests], case["distinct"], flush=True)
        suspected[name] = suspects(tests)
        result["against_first"][name] = {
            "cells": len(tests),
            "smallest_p": min(test["p"] for test in tests.values()),
            "suspected": [cell_text(names, cell) for cell in suspected[name]],
            "settings": settings,
        }
    result["sampling_seconds"] = time.monotonic() - began
    again = sorted({names[i][0] for cells in suspected.values() for i, _ in cells})
    if again:
        repeat(args, cases, names, again, suspected, args.time_limit - result["sampling_seconds"], result)
    for name, one in result["against_first"].items():
        one["passed"] = not one.get("suspected_again", one["suspected"])
        print(name, "suspected", one["suspected"], "again", one.get("suspected_again"), "passed", one["passed"])
    result["passed"] = all(one["passed"] for one in result["against_first"].values())
    store(args.output, names, cases, found)
    print("samples of each case", result["samples"], "passed", result["passed"], flush=True)
    return result


def repeat(args, cases, names, settings: list[str], suspected: dict, seconds: float, result: dict) -> None:
    """Samples the cases of some settings afresh and tests the suspected cells alone; adds to `result`."""
    kept = [i for i, (setting, _) in enumerate(names) if setting in settings]
    servers = [pair for i, pair in enumerate(args.server) if i == 0 or suspected[pair[0]]]
    print("once more:", settings, f"for {seconds:.0f} s", flush=True)
    found = asyncio.run(sample(servers, [cases[i] for i in kept], 4 * args.samples, max(seconds, 1.0), args))
    result["samples_again"] = {name: one.taken for name, one in found.items()}
    if not all(result["samples_again"].values()):
        return  # what is suspected stays so
    reference = found[args.server[0][0]]
    for name, _ in servers[1:]:
        tests = {}
        for i, depth in suspected[name]:
            pair = (reference.sampled[kept.index(i)], found[name].sampled[kept.index(i)])
            tests[i, depth] = compare_samples(*pair, args.tokens)[depth - 1]
        texts = {cell: cell_text(names, cell) for cell in tests}
        result["against_first"][name]["tests_again"] = {texts[cell]: test for cell, test in tests.items()}
        result["against_first"][name]["suspected_again"] = [texts[cell] for cell in suspects(tests)]
    store(args.output, [names[i] for i in kept], [cases[i] for i in kept], found, "-again")


# ---- against the target's own logits --------------------------------------------------------------------------------------


def store(output: Path, names, cases, found: dict[str, Sampler], suffix: str = "") -> None:
    """All samples, for `exact`."""
    described = [
        {
            "setting": setting,
            "begun": begun,
            "prompt": prompt,
            **{key: sampling[key] for key in ("temperature", "top_p")},
        }
        for (setting, begun), (prompt, sampling) in zip(names, cases)
    ]
    samples = {
        name: [[[*ids, count] for ids, count in counter.items()] for counter in one.sampled]
        for name, one in found.items()
    }
    with gzip.open(output.with_name(f"{output.stem}{suffix}-samples.json.gz"), "wt") as file:
        json.dump({"cases": described, "samples": samples}, file)


def allowed(logits, temperature: float, top_p: float, margin: float):
    """What may follow, from logits `[V]`: probabilities of tokens certainly within top-p `[V]` (normalised, 0 elsewhere), and those
    certainly outside `[V]` (bool). Rounding decides about the tokens between, which change the others' probabilities all alike."""
    import torch

    probs = torch.softmax(logits.double() / temperature, -1)
    if top_p >= 1:
        return probs, torch.zeros_like(probs, dtype=torch.bool)
    ordered, order = probs.sort(descending=True)
    before = ordered.cumsum(-1) - ordered
    inside = torch.zeros_like(probs, dtype=torch.bool).scatter(0, order, before < top_p - margin)
    outside = torch.zeros_like(probs, dtype=torch.bool).scatter(0, order, before > top_p + margin)
    return torch.where(inside, probs, 0.0) / probs[inside].sum(), outside


def goodness_of_fit(counts: Counter, probs, outside, least: float = 5.0) -> dict:
    """Chi-square test of tokens (id to count) against probabilities `[V]`; cells with less than `least` expected are pooled."""
    inside = {token: count for token, count in counts.items() if probs[token] > 0}
    total = sum(inside.values())
    expected = probs * total
    big = expected >= least
    cells = [(inside.get(token, 0), float(expected[token])) for token in big.nonzero()[:, 0].tolist()]
    rest = (total - sum(got for got, _ in cells), float(expected[~big].sum()))
    if rest[1] >= least:
        cells.append(rest)
    elif cells:  # too little for a cell of its own
        cells[-1] = (cells[-1][0] + rest[0], cells[-1][1] + rest[1])
    wrong = sum(count for token, count in counts.items() if outside[token])
    statistic = sum((got - want) ** 2 / want for got, want in cells)
    return {"chi_square": statistic, "freedom": max(0, len(cells) - 1), "samples": total, "outside_top_p": wrong}


def exact(args) -> dict:
    """Stored samples of every server against the target's probabilities in float32 (Transformers), token by token.

    Given the tokens before it, each token has a known distribution, so every beginning that occurs often gives a test, and their
    statistics add up. A server's kernels round: DFLASH's or a plain server's `distance` tells how far that reaches.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with gzip.open(args.samples, "rt") as file:
        stored = json.load(file)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).to(args.device).eval()
    known: dict[tuple, torch.Tensor] = {}
    together = {name: {} for name in stored["samples"]}
    for i, case in enumerate(stored["cases"]):
        following = {name: {} for name in stored["samples"]}
        for name, of_cases in stored["samples"].items():
            for *ids, count in of_cases[i]:
                for depth, token in enumerate(ids):
                    following[name].setdefault(tuple(ids[:depth]), Counter())[token] += count
        nodes = {
            begun for one in following.values() for begun, counts in one.items() if sum(counts.values()) >= args.least
        }
        prompt = case["prompt"]
        new = sorted((begun for begun in nodes if (*prompt, *begun) not in known), key=len)
        for depth in sorted({len(begun) for begun in new}):
            same = [begun for begun in new if len(begun) == depth]
            for first in range(0, len(same), args.batch_size):
                part = same[first : first + args.batch_size]
                ids = torch.tensor([[*prompt, *begun] for begun in part], device=args.device)
                with torch.no_grad():
                    logits = target(ids, use_cache=False, logits_to_keep=1).logits[:, -1].cpu()
                known |= {(*prompt, *begun): one for begun, one in zip(part, logits)}
        for begun in nodes:
            probs, outside = allowed(known[(*prompt, *begun)], case["temperature"], case["top_p"], args.margin)
            for name, counts in following.items():
                if sum(counts.get(begun, Counter()).values()) < args.least:
                    continue
                fit = goodness_of_fit(counts[begun], probs, outside)
                keys = (case["setting"], f"{case['setting']}, token {len(begun) + 1}")
                for key in (*keys, f"{case['setting']}, {case['begun']}"):
                    sums = together[name].setdefault(key, Counter())
                    sums.update(fit)
                    sums["beginnings"] += 1
    result = {"dtype": "float32", "least": args.least, "margin": args.margin, "servers": {}}
    for name, found in together.items():
        result["servers"][name] = {
            key: dict(sums)
            | {"p": chi_square_tail(sums["chi_square"], sums["freedom"])}
            | distance(sums["chi_square"], sums["freedom"], max(1, sums["samples"]))
            for key, sums in found.items()
        }
        for key, one in result["servers"][name].items():
            print(
                f"{name} {key}: p {one['p']:.4f}, distance {one['distance']:.5f} +- {one['distance_error']:.5f}",
                one["outside_top_p"],
                flush=True,
            )
    return result
