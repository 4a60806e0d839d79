"""Measures what an SGLang server with a DSpine drafter must hold: same texts, same distribution, accepted length, time per round.

The servers must be running (see `serve_sglang.py`); each check asks them over HTTP and writes one JSON file:

    prepare       checkpoints for the other checks: a DFlash drafter in SGLang's layout, padded heads, shapes with dummy weights
    parity        greedy texts of the benchmarks from every server, compared with the first server's
    hf            the same prompts with Transformers: are differences near-ties, is the accepted length the same
    walk          the served texts again, teacher-forced through Transformers: the accepted length that each text must have had
    layers        draft passes stored by `record_sglang.py` against the drafter in Transformers, layer by layer
    distribution  short sampled continuations of servers, compared with the first's by two-sample chi-square tests
    rounds        time per verification round of servers at fixed concurrency, in short windows that alternate between them
    profile       where a round's GPU time goes, from a trace of SGLang's own profiler

    python examples/check_sglang.py parity --server plain=http://127.0.0.1:30000 dspine=http://127.0.0.1:31000 \
        --target TARGET --bench-dir bench/ --output parity.json

`prepare`, `hf`, `walk` and `layers` need this package's model and run without SGLang; the others need neither.
"""

import argparse
import asyncio
import gzip
import json
import math
import random
import re
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

from sglang_client import Client


# ---- texts ----------------------------------------------------------------------------------------------------------------


def benchmark_prompts(tokenizer, folder: Path, count: int, max_prompt_tokens: int) -> dict[str, list[list[int]]]:
    """The first `count` prompts (first turns, under the chat template) of every `*.jsonl` that are short enough, as token ids."""
    sets = {}
    for path in sorted(folder.glob("*.jsonl")):
        chosen = []
        # not `splitlines`, which also splits at separators that JSON allows inside a string
        for line in path.read_text(encoding="utf-8").split("\n"):
            if not line.strip() or len(chosen) == count:
                continue
            message = [{"role": "user", "content": json.loads(line)["turns"][0]}]
            text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False).input_ids
            if len(ids) <= max_prompt_tokens:
                chosen.append(ids)
        if chosen:
            sets[path.stem] = chosen
    if not sets:
        raise ValueError(f"--bench-dir must hold *.jsonl files with prompts, found none in {folder}")
    return sets


def first_difference(a: list[int], b: list[int]) -> int | None:
    """The first position at which two texts differ, None if one is the beginning of the other and both have one length."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def lengths_of(texts: list[dict]) -> dict:
    """Accepted length of answers with `tokens` (how many) and `rounds`: pooled, and the mean of the requests' own."""
    used = [text for text in texts if text["rounds"]]
    if not used:
        return {}
    # the token of the prefill belongs to no round
    pooled = sum(text["tokens"] - 1 for text in used) / sum(text["rounds"] for text in used)
    means = [(text["tokens"] - 1) / text["rounds"] for text in used]
    return {"accepted_length": pooled, "accepted_length_per_request": statistics.mean(means), "requests": len(used)}


def summary_of(sets: dict[str, list[dict]]) -> dict:
    """Accepted lengths by set, over all requests, and as the mean of the sets."""
    by_set = {name: lengths_of(texts) for name, texts in sets.items()}
    measured = [part for part in by_set.values() if part]
    if not measured:
        return {"sets": by_set}
    keys = ("accepted_length", "accepted_length_per_request")
    mean = {key: statistics.mean(part[key] for part in measured) for key in keys}
    return {"all": lengths_of(sum(sets.values(), [])), "mean_of_sets": mean, "sets": by_set}


async def ask_all(client: Client, sets: dict, sampling: dict, concurrency: int) -> dict[str, list[dict]]:
    """Every prompt once, `concurrency` at a time."""
    gate = asyncio.Semaphore(concurrency)

    async def ask(ids):
        async with gate:
            reply = await client.generate(ids, sampling)
        meta = reply["meta_info"]
        return {
            "ids": reply["output_ids"],
            "tokens": meta["completion_tokens"],
            "rounds": meta.get("spec_verify_ct") or 0,
        }

    async def ask_set(prompts):
        return await asyncio.gather(*map(ask, prompts))

    answers = await asyncio.gather(*map(ask_set, sets.values()))
    return dict(zip(sets, answers))


def parity(args) -> dict:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    sets = benchmark_prompts(tokenizer, args.bench_dir, args.num_prompts, args.max_prompt_tokens)
    sampling = {"temperature": 0.0, "max_new_tokens": args.max_new_tokens}

    async def run():
        names = [name for name, _ in args.server]
        clients = [Client(url) for _, url in args.server]
        found = await asyncio.gather(
            *(ask_all(client, sets, sampling, args.concurrency) for client in clients), return_exceptions=True
        )
        [client.close() for client in clients]
        return dict(zip(names, found))

    found = asyncio.run(run())
    failed = {name: f"{type(one).__name__}: {one}" for name, one in found.items() if isinstance(one, BaseException)}
    texts = {name: one for name, one in found.items() if name not in failed}
    result = {"servers": dict(args.server), "max_new_tokens": args.max_new_tokens, "failed": failed, "figures": {}}
    reference = texts.get(args.server[0][0])
    for name, answers in texts.items():
        figures = summary_of(answers)
        if reference is not None and answers is not reference:
            pairs = [(a["ids"], b["ids"]) for key in sets for a, b in zip(reference[key], answers[key])]
            differ = sum(a != b for a, b in pairs)
            figures["against_first"] = {"texts": len(pairs), "differ": differ}
        result["figures"][name] = figures
    print(json.dumps(result["figures"]), flush=True)
    return result | {"prompts": sets, "texts": texts}


# ---- the same with Transformers -------------------------------------------------------------------------------------------


def gaps_between(target, prompts: dict, reference: dict, others: dict, device: str, batch_size: int = 16) -> dict:
    """The fp32 target's logit gap between the two tokens at each first difference.

    Near-ties have small gaps: bf16 decoding of different batch shapes rounds differently. Large gaps are faults. A text that stops
    where the other goes on has no second token there; it is counted as a fault.
    """
    import torch

    result = {}
    for name, sets in others.items():
        cases, ended, equal = [], 0, 0
        for key, answers in sets.items():
            for prompt, a, b in zip(prompts[key], reference[key], answers):
                a, b = a["ids"], b["ids"]
                at = first_difference(a, b)
                if at is None:
                    equal += 1
                elif at >= min(len(a), len(b)):
                    ended += 1
                else:
                    cases.append((prompt + a[:at], a[at], b[at]))
        gaps = []
        cases.sort(key=lambda case: len(case[0]))
        for begin in range(0, len(cases), batch_size):
            part = cases[begin : begin + batch_size]
            width = max(len(ids) for ids, _, _ in part)
            # causal: what follows a sequence's end does not reach it
            padded = torch.tensor([ids + [0] * (width - len(ids)) for ids, _, _ in part], device=device)
            with torch.inference_mode():
                logits = target(padded).logits.float()
            for row, (ids, a, b) in enumerate(part):
                at = logits[row, len(ids) - 1]
                gaps.append(float((at[a] - at[b]).abs()))
        gaps.sort()
        result[name] = {
            "equal": equal,
            "differ": len(gaps) + ended,
            "beyond_0.5": sum(gap > 0.5 for gap in gaps) + ended,
            "one_ended": ended,
            "median_gap": gaps[len(gaps) // 2] if gaps else None,
            "largest_gap": gaps[-1] if gaps else None,
        }
    return result


def hf(args) -> dict:
    import torch
    from transformers import AutoModelForCausalLM

    from dspine.integrations.evaluation.decoding import decode_with_drafter
    from dspine.integrations.evaluation.prompts import Prompt
    from dspine.modeling_dspine import DSpineModel

    stored = json.loads(args.parity.read_text())
    prompts, texts = stored["prompts"], stored["texts"]
    first = next(iter(stored["servers"]))
    result = {"servers": stored["figures"], "drafters": {}}
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).to(args.device).eval()
    others = {name: sets for name, sets in texts.items() if name != first}
    if first in texts:
        result["ties"] = gaps_between(target, prompts, texts[first], others, args.device)
        print(json.dumps(result["ties"]), flush=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    target = target.to(getattr(torch, args.dtype))
    for name, folder in args.drafter:
        drafter = DSpineModel.from_pretrained(folder, dtype=target.dtype).to(args.device).eval()
        drafter.bind_target(target)
        sets, began = {}, time.monotonic()
        for key, ids in prompts.items():
            asked = [Prompt(key, i, one) for i, one in enumerate(ids)]
            decoded = []
            for begin in range(0, len(asked), args.batch_size):
                part = asked[begin : begin + args.batch_size]
                decoded += decode_with_drafter(target, drafter, part, stored["max_new_tokens"])
            sets[key] = [
                {"ids": one.output_ids, "tokens": sum(one.accepted_lengths) + 1, "rounds": len(one.accepted_lengths)}
                for one in decoded
            ]
            print(
                f"{name} {key}: {json.dumps(lengths_of(sets[key]))} after {time.monotonic() - began:.0f} s", flush=True
            )
        figures = summary_of(sets)
        served = stored["figures"].get(name)
        if served and served.get("all"):
            figures["served_over_hf"] = {
                where: {key: served[where][key] / figures[where][key] for key in figures["mean_of_sets"]}
                for where in ("all", "mean_of_sets")
            }
            print(name, json.dumps(figures["served_over_hf"]), flush=True)
        result["drafters"][name] = figures
        args.output.write_text(json.dumps(result, indent=1) + "\n")  # a cut run keeps what it has
        del drafter
    return result


def walked_against_served(served: list[dict], walked: list[list[int]]) -> dict:
    """Rounds of the server (`rounds` of each answer) against those of the walk over the same texts (tokens committed by each)."""
    pairs = [(one["tokens"], one["rounds"], len(rounds)) for one, rounds in zip(served, walked) if one["rounds"]]
    kinds = {
        "served": [{"tokens": tokens, "rounds": rounds} for tokens, rounds, _ in pairs],
        "walked": [{"tokens": tokens, "rounds": rounds} for tokens, _, rounds in pairs],
    }
    figures = {name: lengths_of(texts) for name, texts in kinds.items()}
    if not pairs:
        return figures
    keys = ("accepted_length", "accepted_length_per_request")
    figures["served_over_walked"] = {key: figures["served"][key] / figures["walked"][key] for key in keys}
    differences = Counter(rounds - other for _, rounds, other in pairs)
    figures["equal_rounds"] = differences[0] / len(pairs)
    figures["more_rounds_served"] = {str(more): count for more, count in sorted(differences.items())}
    return figures


def walk(args) -> dict:
    """What a text's accepted length must be follows from the text: at T=0 a round accepts the drafts that the text repeats."""
    import torch
    from transformers import AutoModelForCausalLM

    from dspine.integrations.doctor_routes import walked_rounds
    from dspine.integrations.evaluation.prompts import Prompt
    from dspine.modeling_dspine import DSpineModel

    stored = json.loads(args.parity.read_text())
    result = {"dtype": args.dtype, "drafters": {}}
    dtype = getattr(torch, args.dtype)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).to(args.device).eval()
    for name, folder in args.drafter:
        if name not in stored["texts"]:
            raise ValueError(
                f"--drafter must be named like a server of --parity, {list(stored['texts'])}, got {name!r}"
            )
        drafter = DSpineModel.from_pretrained(folder, dtype=dtype).to(args.device).eval()
        drafter.bind_target(target)
        walked, began = {}, time.monotonic()
        for key, answers in stored["texts"][name].items():
            asked = [Prompt(key, i, ids) for i, ids in enumerate(stored["prompts"][key])]
            # an answer of one token has no round
            walked[key] = [
                walked_rounds(target, drafter, prompt, answer["ids"]) for prompt, answer in zip(asked, answers)
            ]
            figures = walked_against_served(answers, walked[key])
            print(f"{name} {key}: {json.dumps(figures)} after {time.monotonic() - began:.0f} s", flush=True)
        served = stored["texts"][name]
        whole = walked_against_served(sum(served.values(), []), sum(walked.values(), []))
        whole["sets"] = {key: walked_against_served(served[key], walked[key]) for key in walked}
        print(name, json.dumps({key: value for key, value in whole.items() if key != "sets"}), flush=True)
        result["drafters"][name] = whole
        if args.keep_rounds:
            whole["rounds"] = walked
        args.output.write_text(json.dumps(result, indent=1) + "\n")
        del drafter
    return result


def draft_pass(target, drafter, ids: list[int], start: int) -> dict:
    """The drafter's pass for the block whose anchor is `ids[start]`, in the words of `record_sglang.py`, without a cache."""
    import torch

    config, device = drafter.config, target.device
    text = torch.tensor([ids[: start + 1]], device=device)
    layers = {}

    def keep(name):
        return lambda module, arguments, output: layers.__setitem__(name, output[0][0])

    hooks = [module.register_forward_hook(keep(name)) for name, module in drafter.injections.items()]
    try:
        with torch.inference_mode():
            states = target(text[:, :start], output_hidden_states=True).hidden_states
            slots = torch.full((1, config.block_size), config.mask_token_id, device=device)
            slots[:, 0] = text[:, start]
            outputs = drafter(
                noise_embeds=drafter.binding.embed(slots, config.input_embedding_scale),
                context_hidden_states=torch.cat([states[i + 1] for i in config.target_layer_ids], -1),
                anchor_ids=text[:, start:],
                position_ids=torch.arange(start + config.block_size, device=device)[None],
            )
            proposal = drafter.propose(outputs, text[:, start])
    finally:
        [hook.remove() for hook in hooks]
    parts = {"hidden": outputs.last_hidden_state[0], "layers": layers}
    return parts | {"tokens": proposal.tokens[0], "candidates": proposal.candidates[0]}


def layers(args) -> dict:
    import torch
    from transformers import AutoModelForCausalLM

    from dspine.modeling_dspine import DSpineModel

    stored = json.loads(args.parity.read_text())
    texts = [
        prompt + answer["ids"]
        for sets in stored["texts"].values()
        for name, answers in sets.items()
        for prompt, answer in zip(stored["prompts"][name], answers)
    ]
    models = {}
    for name in ("float32", args.dtype):
        target = AutoModelForCausalLM.from_pretrained(args.target, dtype=getattr(torch, name)).to(args.device).eval()
        drafter = DSpineModel.from_pretrained(args.drafter, dtype=target.dtype).to(args.device).eval()
        drafter.bind_target(target)
        models[name] = (target, drafter)
    errors: dict[str, dict[str, list[float]]] = {}
    tails = {"served": [], "hf": []}
    skipped = used = 0
    for path in sorted(args.records.glob("pass-*.pt")):
        served = torch.load(path, map_location=args.device)
        start = int(served["positions"][0])
        texts_here = [ids for ids in texts if len(ids) > start and ids[start] == int(served["ids"][0])]
        if len(texts_here) != 1:  # a text of another request, or several that it could be
            skipped += 1
            continue
        used += 1
        exact = draft_pass(*models["float32"], texts_here[0], start)
        other = draft_pass(*models[args.dtype], texts_here[0], start)
        for name in ("hidden", *exact["layers"]):
            pick = (lambda one: one["hidden"]) if name == "hidden" else (lambda one, name=name: one["layers"][name])
            reference = pick(exact).float()
            part = errors.setdefault("norm(h)" if name == "hidden" else f"injection {name}", {"served": [], "hf": []})
            for key, one in (("served", served), ("hf", other)):
                got = pick(one).float().view_as(reference)
                part[key].append(float((got - reference).norm() / reference.norm()))
        for key, one in (("served", served), ("hf", other)):
            same = one["tokens"].view(-1) == exact["tokens"].view(-1)
            kept = (one["candidates"][:, :, None] == exact["candidates"][:, None]).any(-1).float()
            tails[key].append((float(same.float().mean()), float(kept.mean())))
    if not used:
        raise ValueError(
            f"no stored pass in {args.records} belongs to a text of {args.parity}, {skipped} were looked at"
        )
    result = {"passes": used, "skipped": skipped, "dtype": args.dtype, "relative_error": {}, "passed": True}
    for name, part in errors.items():
        figures = {key: statistics.median(values) for key, values in part.items()}
        figures["served_over_hf"] = figures["served"] / max(figures["hf"], 1e-12)
        result["relative_error"][name] = figures
        # as far from fp32 as any other order of rounding
        result["passed"] &= figures["served_over_hf"] < 1.5
    for key, values in tails.items():
        columns = [statistics.mean(column) for column in zip(*values)]
        result[f"{key}_against_fp32"] = dict(zip(("same_tokens", "same_candidates"), columns))
    print(json.dumps(result), flush=True)
    return result


# ---- distribution ---------------------------------------------------------------------------------------------------------


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(X >= statistic) of a chi-square variable: the regularised upper incomplete gamma function Q(freedom / 2, statistic / 2)."""
    a, x = freedom / 2, statistic / 2
    if x <= 0 or freedom <= 0:
        return 1.0
    log_factor = a * math.log(x) - x - math.lgamma(a)
    if x < a + 1:
        term = total = 1 / a
        n = a
        while abs(term) > abs(total) * 1e-15:
            n += 1
            term *= x / n
            total += term
        return max(0.0, 1 - total * math.exp(log_factor))
    # continued fraction, evaluated with Lentz' method
    b = x + 1 - a
    c, d = 1e300, 1 / b
    h = d
    for i in range(1, 10_000):
        factor = -i * (i - a)
        b += 2
        d = 1 / (factor * d + b or 1e-300)
        c = b + factor / c or 1e-300
        h *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return min(1.0, h * math.exp(log_factor))


def two_sample_test(one: Counter, other: Counter, least: float = 5.0) -> dict:
    """Chi-square test that two samples have one distribution. Cells with fewer than `least` expected in either sample are pooled."""
    n, m = sum(one.values()), sum(other.values())
    rare = [0, 0]
    cells = []
    for cell in set(one) | set(other):
        pair = (one[cell], other[cell])
        if sum(pair) * min(n, m) / (n + m) >= least:
            cells.append(pair)
        else:
            rare = [rare[0] + pair[0], rare[1] + pair[1]]
    if sum(rare) * min(n, m) / (n + m) >= least:
        cells.append(tuple(rare))
    statistic = 0.0
    for a, b in cells:
        total = a + b
        for got, size in ((a, n), (b, m)):
            expected = total * size / (n + m)
            statistic += (got - expected) ** 2 / expected
    freedom = len(cells) - 1
    p = chi_square_tail(statistic, freedom) if freedom > 0 else 1.0
    return {"p": p, "chi_square": statistic, "freedom": freedom, "samples": [n, m], "in_rare_cells": sum(rare)}


def fisher(values: list[float]) -> float:
    """One p-value for independent tests together (Fisher 1925)."""
    return chi_square_tail(-2 * sum(math.log(max(value, 1e-300)) for value in values), 2 * len(values))


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


# The beginning of the answer is given, so that the tokens tested are in the middle of a text, where drafts are accepted; open ones, so
# that many continuations are left at low temperature too
DISTRIBUTION_PROMPTS = [
    ("Tell me a story about a dog.", "Once upon a time, in a small village, there lived a"),
    ("Tell me a story about the sea.", "The old sailor looked at the"),
    ("Give me three names for a new cafe.", 'Here are three names for a new cafe: "'),
    ("Write a poem about autumn.", "The leaves are"),
]


# ---- time per round -------------------------------------------------------------------------------------------------------


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

        [client.close() for client in clients.values()]

    asyncio.run(run())
    return result


NORM = re.compile("rms_?norm", re.IGNORECASE)


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
        Medians: microseconds of a round, of it in waits (`...Synchronize`), calls of each kind; empty without runtime events.
    """
    calls = sorted((event for event in events if event.get("cat") in RUNTIME), key=lambda event: event["ts"])
    found: dict[str, list[float]] = {}
    for begin, end in zip(launches, launches[1:]):
        inside = [event for event in calls if begin <= event["ts"] < end]
        waits = sum(event["dur"] for event in inside if "Synchronize" in event["name"])
        kinds = Counter(event["name"] for event in inside)
        one = {"round": end - begin, "waits": waits, "calls": len(inside)}
        one |= {f"calls {name}": count for name, count in kinds.most_common(8)}
        for name, value in one.items():
            found.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in found.items()}


RUNTIME = ("cuda_runtime", "cuda_driver")


def breakdown(events: list[dict]) -> dict:
    """GPU time of one round from a trace's events: draft pass, decoding tail, verification, and what is between.

    A CUDA graph's kernels share the correlation of its launch. Of the two graphs in a round the draft's is the smaller. Its tail is
    what follows the last norm: the product with the output head and everything after it.

    Returns:
        Medians over rounds: `microseconds` from a part's first kernel to its last one's end, `running` of it in which a kernel ran,
        `kernels` launched; the `host`'s part; the longest kernels of tail and verification.

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
    longest: dict[str, list[Counter]] = {"tail": [], "verify": []}
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


def profile(args) -> dict:
    order, result = random.Random(1), {"servers": dict(args.server), "concurrency": {}}

    async def one(name, url, concurrency, repeat):
        client = Client(url)
        folder = (args.output.parent / f"trace-{args.output.stem}-{name}-{concurrency}-{repeat}").absolute()
        folder.mkdir(parents=True, exist_ok=True)
        prompts = [
            [order.randrange(100, args.vocabulary) for _ in range(args.prompt_tokens)] for _ in range(concurrency)
        ]
        load = asyncio.create_task(timed(client, prompts, args.new_tokens))
        await asyncio.sleep(args.after)
        body = {"output_dir": str(folder), "num_steps": args.steps, "activities": ["CPU", "GPU"]}
        body |= {"with_stack": False, "record_shapes": False}
        await client.json("/start_profile", body)
        await load
        began, files = time.monotonic(), []
        while time.monotonic() - began < 20 and not files:
            files = [path for path in folder.rglob("*.json.gz") if path.stat().st_size]
            await asyncio.sleep(0.5)
        client.close()
        if not files:
            raise ValueError(f"no trace was written to {folder}")
        for attempt in range(20):
            try:
                with gzip.open(files[0], "rt") as trace:
                    return breakdown(json.load(trace)["traceEvents"])
            except (EOFError, json.JSONDecodeError):  # still being written
                if attempt == 19:
                    raise
                await asyncio.sleep(0.5)

    for concurrency in args.concurrency:
        # there and back again: the first trace of a process is the most disturbed
        turns = [(server, repeat) for repeat in range(args.repeats) for server in args.server[:: 1 - 2 * (repeat % 2)]]
        figures = {name: [] for name, _ in args.server}
        for (name, url), repeat in turns:
            try:
                found = asyncio.run(one(name, url, concurrency, repeat))
            except (ValueError, OSError, RuntimeError, EOFError) as error:
                found = {"error": f"{type(error).__name__}: {error}"}
            figures[name].append(found)
            print(concurrency, name, json.dumps(found), flush=True)
        result["concurrency"][concurrency] = figures
    return result


# ---- checkpoints ----------------------------------------------------------------------------------------------------------

# of the released models, for load_format=dummy: no weights are needed
SHAPES = {
    "qwen3-4b": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}


def dummy_shape(name: str, folder: Path) -> None:
    """Configurations of a target and of equally large DSpine and DFlash drafters (5 layers, blocks of 16)."""
    from transformers import Qwen3Config

    from dspine.configuration_dspine import DSpineConfig

    fields = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}
    fields |= {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}
    target = Qwen3Config(**fields, **SHAPES[name], num_hidden_layers=36, architectures=["Qwen3ForCausalLM"])
    target.dtype = "bfloat16"
    target.eos_token_id = 151645
    target.save_pretrained(folder / name / "target")
    own = {key: value for key, value in SHAPES[name].items() if key != "tie_word_embeddings"}
    drafter = DSpineConfig(
        **fields,
        **own,
        num_hidden_layers=5,
        block_size=16,
        mask_token_id=151669,
        num_target_layers=36,
        target_layer_ids=[1, 9, 17, 25, 33],
        transfer_rank=256,
        num_candidates=16,
        architectures=["DSpineModel"],
        dtype="bfloat16",
    )
    drafter.save_pretrained(folder / name / "dspine")
    raw = drafter.to_dict()
    keys = ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers")
    kept = {key: raw[key] for key in (*fields, *own, "num_hidden_layers", "num_target_layers", "hidden_act")}
    kept |= {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 16, "dtype": "bfloat16"}
    kept |= {"tie_word_embeddings": False, "attention_bias": False, "dflash_config": {key: raw[key] for key in keys}}
    (folder / name / "dflash").mkdir(parents=True, exist_ok=True)
    (folder / name / "dflash" / "config.json").write_text(json.dumps(kept, indent=1) + "\n")


def padded_heads(source: Path, out: Path, ranks: int) -> None:
    """A checkpoint that computes the same with as many attention heads as `ranks` divides: new heads have zero weights.

    Small targets have odd numbers of heads (SmolLM2-135M: 9 and 3), which tensor parallelism cannot share out.
    """
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((source / "config.json").read_text())
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    more_kv = -(-kv // ranks) * ranks
    more = heads // kv * more_kv
    tensors = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors |= load_file(path)
    for name, tensor in tensors.items():
        # the new heads come last, with key and value heads of their own
        if re.search(r"\.[qkv]_proj\.(weight|bias)$", name):
            rows = (more if ".q_proj." in name else more_kv) * size - tensor.shape[0]
            tensors[name] = torch.cat([tensor, tensor.new_zeros(rows, *tensor.shape[1:])])
        elif name.endswith(".o_proj.weight"):
            tensors[name] = torch.cat(
                [tensor, tensor.new_zeros(tensor.shape[0], more * size - tensor.shape[1])], dim=1
            )
    out.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja", ".txt", ".model") and "safetensors" not in path.name:
            shutil.copy(path, out / path.name)
    config |= {"num_attention_heads": more, "num_key_value_heads": more_kv, "head_dim": size}
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file({k: v.contiguous() for k, v in tensors.items()}, out / "model.safetensors", metadata={"format": "pt"})


def prepare(args) -> dict:
    done, failed = [], {}

    def attempt(name, make):
        try:
            make()
            done.append(name)
        except Exception as error:  # the others are still wanted
            failed[name] = f"{type(error).__name__}: {error}"
        print(name, failed.get(name, "done"), flush=True)

    def dflash():
        sys.path.insert(0, str(Path(__file__).parent / "peers"))
        from dflash_equality import export_dflash

        from dspine.modeling_dspine import DSpineModel

        export_dflash(DSpineModel.from_pretrained(args.dflash, dtype="auto"), args.folder / "dflash")

    if args.dflash:
        attempt("dflash", dflash)
    if args.target and args.dspine:
        attempt("padded target", lambda: padded_heads(args.target, args.folder / "padded-target", args.ranks))
        attempt("padded dspine", lambda: padded_heads(args.dspine, args.folder / "padded-dspine", args.ranks))
    for name in SHAPES:
        attempt(name, lambda name=name: dummy_shape(name, args.folder))
    return {"done": done, "failed": failed}


# ---- command line ---------------------------------------------------------------------------------------------------------


def named(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"must look like name=value, got {text!r}")
    return name, value


def setting(text: str) -> tuple[float, float]:
    temperature, _, top_p = text.partition("/")
    return float(temperature), float(top_p or 1.0)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    checks = parser.add_subparsers(dest="check", required=True)

    def add(name, function, servers=True):
        one = checks.add_parser(name)
        one.set_defaults(function=function)
        one.add_argument("--output", type=Path, required=True, help="JSON file")
        if servers:
            one.add_argument("--server", type=named, nargs="+", required=True, metavar="NAME=URL")
        return one

    one = add("prepare", prepare, servers=False)
    one.add_argument("--folder", type=Path, required=True, help="for the checkpoints")
    one.add_argument("--target", type=Path)
    one.add_argument("--dspine", type=Path, help="a DSpine drafter")
    one.add_argument("--dflash", type=Path, help="a DFlash drafter saved by this package")
    one.add_argument("--ranks", type=int, default=2)

    one = add("parity", parity)
    one.add_argument("--target", required=True, help="its tokenizer is read")
    one.add_argument("--bench-dir", type=Path, required=True)
    one.add_argument("--num-prompts", type=int, default=20, help="of every benchmark")
    one.add_argument("--max-prompt-tokens", type=int, default=1024)
    one.add_argument("--max-new-tokens", type=int, default=256)
    one.add_argument("--concurrency", type=int, default=32)

    one = add("hf", hf, servers=False)
    one.add_argument("--parity", type=Path, required=True, help="the output of parity")
    one.add_argument("--target", required=True)
    one.add_argument(
        "--drafter", type=named, nargs="*", default=[], metavar="NAME=FOLDER", help="names as in --parity"
    )
    one.add_argument("--dtype", default="bfloat16")
    one.add_argument("--device", default="cuda")
    one.add_argument("--batch-size", type=int, default=20)

    one = add("walk", walk, servers=False)
    one.add_argument("--parity", type=Path, required=True, help="the output of parity")
    one.add_argument("--target", required=True)
    one.add_argument("--drafter", type=named, nargs="+", required=True, metavar="NAME=FOLDER", help="as in --parity")
    one.add_argument("--dtype", default="bfloat16")
    one.add_argument("--device", default="cuda")
    one.add_argument("--keep-rounds", action="store_true", help="store the tokens of every round of the walk")

    one = add("layers", layers, servers=False)
    one.add_argument("--records", type=Path, required=True, help="folder of record_sglang.py")
    one.add_argument(
        "--parity", type=Path, required=True, help="output of parity with that server and --num-prompts 1"
    )
    one.add_argument("--target", required=True)
    one.add_argument("--drafter", required=True)
    one.add_argument("--dtype", default="bfloat16")
    one.add_argument("--device", default="cuda")

    one = add("distribution", distribution)
    one.add_argument("--target", required=True, help="its tokenizer is read")
    one.add_argument("--samples", type=int, default=12288, help="of every prompt at every setting")
    one.add_argument("--time-limit", type=float, default=300.0, help="seconds; fewer samples are taken if they end")
    one.add_argument("--tokens", type=int, default=4, help="of a continuation")
    one.add_argument("--settings", type=setting, nargs="+", default=[(1.0, 1.0), (0.7, 0.9)], metavar="T/TOP_P")
    one.add_argument("--rows", type=int, default=8, help="of every prompt and setting in one request")
    one.add_argument("--in-flight", type=int, default=4, help="requests")

    for name, function in (("rounds", rounds), ("profile", profile)):
        one = add(name, function)
        one.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
        one.add_argument("--prompt-tokens", type=int, default=64)
        one.add_argument("--new-tokens", type=int, default=64 if name == "rounds" else 192)
        one.add_argument("--vocabulary", type=int, default=10000, help="prompts are random token ids below this")
    one.add_argument("--repeats", type=int, default=2, help="traces of each server, there and back again")
    checks.choices["rounds"].add_argument(
        "--repeats", type=int, nargs="+", default=[5], help="comparisons with the second server, the third, ..."
    )
    checks.choices["rounds"].add_argument(
        "--reference-shape",
        type=int,
        nargs=2,
        default=[4096, 151936],
        help="width and vocabulary of the product timed",
    )
    one.add_argument("--steps", type=int, default=16, help="scheduler steps to record")
    one.add_argument("--after", type=float, default=0.5, help="seconds of load before recording")
    args = parser.parse_args(argv)
    if args.check in ("distribution", "rounds") and len(args.server) < 2:
        parser.error(f"{args.check} compares servers with the first one, got {len(args.server)}")
    return args


def main(argv: list[str] | None = None) -> dict:
    args = parse_arguments(argv)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    result = args.function(args)
    result["check"], result["seconds"] = args.check, time.monotonic() - began
    result["command"] = [Path(sys.argv[0]).name, *(sys.argv[1:] if argv is None else argv)]
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
