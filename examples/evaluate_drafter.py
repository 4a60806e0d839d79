"""Accepted length of drafters by real decoding, at T=0 and T=1, on the prompts of benchmarks.

    python examples/evaluate_drafter.py --target PATH --drafter dspine=out/dspine --drafter dflash=out/dflash \
        --prompts bench_greedy.parquet --num-prompts 80 --max-new-tokens 512 --out evaluation.json

Prompts come from a parquet file (`input_ids`, `prompt_length`, `source`: the first `prompt_length` ids are the prompt, the rest the
target's stored answer) or from `--bench-dir`, a folder of `{"turns": [...]}` lines per benchmark, of which the first turn is put
through the chat template. Decoding runs in batches with left padding in the target's dtype. At T=0 a text must be the target's own:
where it leaves the stored answer, the first difference is scored again by the target in fp32, and a gap over `--tie-gap` logits
counts as a fault.
"""

import argparse
import copy
import json
import time
from collections import defaultdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspine.modeling_dspine import DSpineModel, implementation_report


def read_prompts(args) -> list[dict]:
    """`{source, prompt, answer}` with ids as lists (`answer` None without stored answers), at most `num_prompts` of a source."""
    if args.prompts is not None:
        import pyarrow.parquet as parquet

        rows = [
            {
                "source": str(row.get("source", "prompts")),
                "prompt": [int(i) for i in row["input_ids"][: row["prompt_length"]]],
                "answer": [int(i) for i in row["input_ids"][row["prompt_length"] :]],
            }
            for row in parquet.read_table(args.prompts).to_pylist()
        ]
    elif args.bench_dir is not None:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or args.target)
        rows = []
        for path in sorted(Path(args.bench_dir).glob("*.jsonl")):
            # not splitlines(): JSON strings may hold Unicode line separators
            for line in filter(None, path.read_text(encoding="utf-8").split("\n")):
                message = [{"role": "user", "content": json.loads(line)["turns"][0]}]
                options = {"enable_thinking": False} if "enable_thinking" in (tokenizer.chat_template or "") else {}
                text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False, **options)
                ids = tokenizer(text, add_special_tokens=False).input_ids
                if args.max_prompt_length is None or len(ids) <= args.max_prompt_length:
                    rows.append({"source": path.stem, "prompt": ids, "answer": None})
    else:
        raise ValueError("--prompts or --bench-dir must be given: where the prompts come from")
    taken, chosen = defaultdict(int), []
    for row in rows:
        if taken[row["source"]] < args.num_prompts:
            taken[row["source"]] += 1
            chosen.append(row)
    # texts of one length end together: stored answers tell, otherwise prompts only limit the padding
    return sorted(chosen, key=lambda row: (len(row["answer"] or ()), len(row["prompt"])), reverse=True)


def first_differences(rows, texts, target, gap_allowed: float, limit: int) -> dict:
    """How many greedy texts leave the stored answer, and at which of these the target in fp32 disagrees by more than a near-tie."""
    result = {"compared": 0, "different": 0, "faults": 0, "largest_gap": 0.0}
    precise = None
    for row, text in zip(rows, texts):
        if row["answer"] is None:
            continue
        result["compared"] += 1
        stored = row["answer"][:limit]
        at = next((i for i, (a, b) in enumerate(zip(stored, text)) if a != b), None)
        if at is None:
            continue
        result["different"] += 1
        precise = precise or copy.deepcopy(target).float()
        prefix = torch.tensor([row["prompt"] + stored[:at]], device=target.device)
        with torch.no_grad():
            logits = precise(prefix).logits[0, -1]
        gap = float((logits[stored[at]] - logits[text[at]]).abs())
        result["largest_gap"] = max(result["largest_gap"], gap)
        result["faults"] += gap > gap_allowed
    return result


def summary(rows, lengths) -> dict:
    """Pooled and per-request accepted length over all rows given, bonus token included."""
    tokens = sum(sum(row) for row in lengths)
    rounds = sum(len(row) for row in lengths)
    means = [sum(row) / len(row) for row in lengths if row]
    return {
        "accepted_length": tokens / max(rounds, 1),
        "accepted_length_per_request": sum(means) / max(len(means), 1),
        "requests": len(rows),
        "tokens": tokens,
        "rounds": rounds,
    }


def decode(drafter, target, rows, temperature: float, args, label: str) -> dict:
    """Decodes all rows in batches; statistics per source and in all."""
    device, pad = target.device, args.pad_token_id
    lengths, texts = [], []
    reached, accepted = defaultdict(int), defaultdict(int)
    clocks = defaultdict(float)
    generator = torch.Generator(device).manual_seed(args.seed)
    sampling = {"do_sample": temperature > 0}
    if temperature > 0:
        sampling |= {"temperature": temperature, "top_k": 0, "top_p": 1.0, "generator": generator}
    started = time.perf_counter()
    for begin in range(0, len(rows), args.batch_size):
        batch = rows[begin : begin + args.batch_size]
        width = max(len(row["prompt"]) for row in batch)
        ids = torch.full((len(batch), width), pad)
        mask = torch.zeros(len(batch), width, dtype=torch.long)
        for i, row in enumerate(batch):
            ids[i, width - len(row["prompt"]) :] = torch.tensor(row["prompt"])
            mask[i, width - len(row["prompt"]) :] = 1
        output = drafter.spec_generate(
            target,
            ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=args.max_new_tokens,
            pad_token_id=pad,
            return_dict_in_generate=True,
            **sampling,
        )
        statistics = output.statistics
        lengths += statistics.accepted_lengths
        for row, text in zip(statistics.accepted_lengths, output.sequences[:, width:].tolist()):
            texts.append(text[: sum(row) + 1])  # the prefill's token belongs to no round
        for slot, (n, m) in enumerate(zip(statistics.slot_reached, statistics.slot_accepted)):
            reached[slot] += n
            accepted[slot] += m
        for name in ("prefill_time", "draft_time", "verify_time"):
            clocks[name] += getattr(statistics, name)
        done = begin + len(batch)
        so_far = summary(rows[:done], lengths)["accepted_length"]
        seconds = time.perf_counter() - started
        print(
            f"{label} T={temperature:g}: {done}/{len(rows)} texts, {so_far:.3f} tokens a round, {seconds:.0f} s",
            flush=True,
        )
    by_source = defaultdict(lambda: ([], []))
    for row, row_lengths in zip(rows, lengths):
        by_source[row["source"]][0].append(row)
        by_source[row["source"]][1].append(row_lengths)
    sources = {name: summary(*parts) for name, parts in sorted(by_source.items())}
    keys = ("accepted_length", "accepted_length_per_request")
    result = {
        "all": summary(rows, lengths),
        "mean_of_benchmarks": {key: sum(part[key] for part in sources.values()) / len(sources) for key in keys},
        "benchmarks": sources,
        "slot_acceptance": [accepted[slot] / max(reached[slot], 1) for slot in sorted(reached)],
        "seconds": time.perf_counter() - started,
        **clocks,
    }
    if temperature == 0 and not args.no_compare:
        result["stored_answers"] = first_differences(rows, texts, target, args.tie_gap, args.max_new_tokens)
    return result


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", action="append", required=True, help="name=folder or folder; may be repeated")
    parser.add_argument("--prompts", help="parquet file")
    parser.add_argument("--bench-dir", help="folder of .jsonl files")
    parser.add_argument("--tokenizer")
    parser.add_argument("--num-prompts", type=int, default=80, help="of every benchmark")
    parser.add_argument("--max-prompt-length", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--batch-size", type=int, default=40)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tie-gap", type=float, default=0.5)
    parser.add_argument("--no-compare", action="store_true", help="do not compare greedy texts with stored answers")
    parser.add_argument("--out")
    args = parser.parse_args(argv)

    dtype = getattr(torch, args.dtype)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).to(args.device).eval()
    eos = target.generation_config.eos_token_id
    eos = eos[0] if isinstance(eos, list) else eos
    pad = target.config.get_text_config().pad_token_id
    args.pad_token_id = next((token for token in (pad, eos) if token is not None), 0)
    rows = read_prompts(args)
    report = {"target": Path(args.target).name, "dtype": args.dtype, "device": args.device, "drafters": {}}
    report |= {k: getattr(args, k) for k in ("num_prompts", "max_new_tokens", "batch_size", "seed")}
    if args.device.startswith("cuda"):
        report["gpu"] = torch.cuda.get_device_name()
    for entry in args.drafter:
        name, _, folder = entry.rpartition("=")
        name = name or Path(folder).name
        drafter = DSpineModel.from_pretrained(folder, dtype=dtype).to(args.device).eval()
        drafter.bind_target(target)
        results = {f"T={t:g}": decode(drafter, target, rows, t, args, name) for t in args.temperatures}
        report["drafters"][name] = {"parameters": sum(p.numel() for p in drafter.parameters()), **results}
        if args.out:  # after every drafter, so that a cut run keeps what it has
            report["implementations"] = implementation_report()
            Path(args.out).write_text(json.dumps(report, indent=1, default=str))
        del drafter
    print(f"{'drafter':<24} {'T':>4} {'pooled':>8} {'request':>8} {'mean of benchmarks':>20}")
    for name, results in report["drafters"].items():
        for temperature in args.temperatures:
            part = results[f"T={temperature:g}"]
            print(
                f"{name:<24} {temperature:>4g} {part['all']['accepted_length']:>8.3f} "
                f"{part['all']['accepted_length_per_request']:>8.3f} {part['mean_of_benchmarks']['accepted_length']:>20.3f}"
            )
    return report


if __name__ == "__main__":
    main()
