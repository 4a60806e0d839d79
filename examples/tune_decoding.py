"""Walks held-out answers with other decoding settings of one drafter, and writes the best guidance into its configuration if asked to.

    python examples/tune_decoding.py --target PATH --drafter out/dspine --eval-data greedy=heldout.parquet \
        --guidances 0 0.1 0.2 0.3 0.5 --candidates 8 16 32 --write

Nothing is trained: the number of candidates K and the guidance of greedy drafts (`refinement_guidance`) matter in decoding alone. Every
row changes one of them. `--write` keeps the guidance with the longest accepted length per request on the first set, which should hold
answers of temperature 0 that are not those the drafter is judged by.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspine.integrations.training import PackedDataset, TargetRunner, load_sequences, walk_dataset
from dspine.integrations.training.masks import PACKED_ATTENTION
from dspine.modeling_dspine import DSpineModel


def settings(config, candidates: list[int], guidances: list[float]) -> dict[str, dict]:
    """Rows by name, and the fields of the configuration that they set."""
    rows = {f"candidates-{count}": {"num_candidates": count} for count in candidates}
    rows |= {f"guidance-{guidance:g}": {"refinement_guidance": guidance} for guidance in guidances}
    own = {name: getattr(config, name) for name in ("num_candidates", "refinement_guidance")}
    return {name: own | row for name, row in rows.items()}


def evaluate(args) -> dict[str, dict]:
    """Metrics of every row on every set, as `eval_SET_METRIC`."""
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=dtype).to(device).eval()
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.target)
    except (OSError, ValueError):
        tokenizer = None  # token sequences need none
    # as in training: fp32 weights under autocast beside a target in low precision
    drafter = DSpineModel.from_pretrained(args.drafter, dtype=torch.float32).to(device).eval()
    if any(args.guidances) and not drafter.config.refinement:
        raise ValueError(
            f"--guidances must be 0 for a drafter without refinement ({args.drafter}), got {args.guidances}"
        )
    drafter.bind_target(target)
    drafter.set_attn_implementation(PACKED_ATTENTION)
    runner = TargetRunner(target, drafter.config.target_layer_ids)
    rows, result = settings(drafter.config, args.candidates, args.guidances), {}
    for entry in args.eval_data:
        name, _, path = entry.rpartition("=")
        sequences = load_sequences(path, tokenizer).every(args.eval_documents)
        dataset = PackedDataset(sequences, args.tokens_per_batch, args.max_anchors, shuffle=False)
        for row, values in rows.items():
            for field, value in values.items():
                setattr(drafter.config, field, value)
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                walked = walk_dataset(drafter, runner, dataset, device, args.eval_chunk, device.type == "cuda")
            metrics = {f"eval_{name or Path(path).stem}_{key}": value for key, value in walked.metrics().items()}
            result.setdefault(row, {}).update(metrics)
            print(row, entry, json.dumps(metrics), flush=True)
    return result


def write_best(folder: Path, result: dict[str, dict]) -> float:
    """Puts the best guidance into `config.json`; returns it."""
    guided = {name: metrics for name, metrics in result.items() if name.startswith("guidance-")}
    key = next(k for k in next(iter(guided.values())) if k.endswith("accepted_length_per_request"))
    best = float(max(guided, key=lambda name: guided[name][key]).removeprefix("guidance-"))
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"refinement_guidance": best}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return best


def main(argv: list[str] | None = None) -> dict[str, dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True, help="folder")
    parser.add_argument("--eval-data", nargs="+", required=True, metavar="NAME=FILE")
    parser.add_argument("--eval-documents", type=int, help="at most so many texts of each, evenly spaced")
    parser.add_argument("--candidates", type=int, nargs="*", default=[])
    parser.add_argument("--guidances", type=float, nargs="*", default=[])
    parser.add_argument("--tokens-per-batch", type=int, default=20480)
    parser.add_argument("--max-anchors", type=int, default=1536)
    parser.add_argument("--eval-chunk", type=int, default=256, help="anchors per pass")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], help="default: bfloat16, float32 on a CPU"
    )
    parser.add_argument("--write", action="store_true", help="put the best guidance into the drafter's config.json")
    parser.add_argument("--out", help="JSON file")
    args = parser.parse_args(argv)
    if not args.candidates and not args.guidances:
        parser.error("nothing to compare: give --candidates or --guidances")
    if min(args.guidances, default=0) < 0 or min(args.candidates, default=1) < 1:
        parser.error(
            f"--guidances must be at least 0 and --candidates at least 1, got {args.guidances} and {args.candidates}"
        )
    if args.write and not args.guidances:
        parser.error("--write needs --guidances to choose from")
    if args.write and not (Path(args.drafter) / "config.json").is_file():
        parser.error(f"--write needs a folder with config.json as --drafter, got {args.drafter}")
    args.dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    result = evaluate(args)
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1))
    if args.write:
        print(f"refinement_guidance = {write_best(Path(args.drafter), result):g}")
    return result


if __name__ == "__main__":
    main()
