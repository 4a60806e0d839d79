"""Served texts against Transformers: size of the differences, accepted length of the same prompts, a walk over the same texts."""

import json
import time
from collections import Counter

from sglang_checks.lengths import lengths_of, summary_of


def first_difference(a: list[int], b: list[int]) -> int | None:
    """The first position at which two texts differ, None if one is the beginning of the other and both have one length."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


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
