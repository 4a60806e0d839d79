"""Lets a target answer prompts: the training data of its drafter.

    python examples/regenerate.py --target TARGET --prompts prompts.jsonl --output answers/ --batch-size 64

Interrupted runs continue where they stopped. `--merge FILE` also writes all shards into one parquet file.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspine.integrations.training.regenerate import (
    RegenerationSettings,
    answer_with_transformers,
    read_prompts,
    regenerate,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="Hub id or folder")
    parser.add_argument("--prompts", required=True, help="JSON lines with messages, prompt or turns")
    parser.add_argument("--output", required=True, type=Path, help="folder for the shards")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many prompts at the beginning")
    parser.add_argument("--limit", type=int, help="at most so many prompts")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--max-prompt-tokens", type=int, default=1024)
    parser.add_argument("--thinking", choices=["on", "off"], help="`enable_thinking` of the chat template")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--time-limit", type=float, help="seconds after which no further batch is begun")
    parser.add_argument("--merge", type=Path, help="also write everything into this parquet file")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=getattr(torch, args.dtype)).to(args.device).eval()
    settings = RegenerationSettings(
        args.max_new_tokens,
        args.max_prompt_tokens,
        tuple(args.temperatures),
        {"on": True, "off": False, None: None}[args.thinking],
        args.batch_size,
        args.seed,
    )
    prompts = read_prompts(args.prompts)[args.skip :][: args.limit]
    answer = answer_with_transformers(target, tokenizer, settings)
    counts = regenerate(prompts, tokenizer, answer, args.output, settings, Path(args.target).name, args.time_limit)
    print(json.dumps(counts))
    if args.merge is not None:
        import pyarrow as pa
        import pyarrow.parquet as parquet

        shards = sorted(args.output.glob("part-*.parquet"))
        parquet.write_table(pa.concat_tables(map(parquet.read_table, shards)), args.merge, compression="zstd")


if __name__ == "__main__":
    main()
