"""Lets a target answer prompts: the training data of its drafter.

    python examples/regenerate.py --target TARGET --prompts prompts.jsonl --output answers/ --batch-size 64
    python examples/regenerate.py --target TARGET --prompts prompts.jsonl --output answers/ --server http://localhost:30000

The second form asks an OpenAI-compatible server (`python -m sglang.launch_server --model TARGET`, `vllm serve TARGET`) and needs of
the target only its tokenizer: the server returns text, which is tokenised again under the chat template. Interrupted runs continue
where they stopped. `--merge FILE` also writes all shards into one parquet file.
"""

import argparse
import json
import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspine.integrations.training import ConversationEncoder
from dspine.integrations.training.regenerate import (
    RegenerationSettings,
    answer_with_server,
    answer_with_transformers,
    read_prompts,
    regenerate,
)


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="Hub id or folder")
    parser.add_argument("--prompts", required=True, help="JSON lines with messages, prompt or turns")
    parser.add_argument("--output", required=True, type=Path, help="folder for the shards")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many prompts at the beginning")
    parser.add_argument("--limit", type=int, help="at most so many prompts")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--max-prompt-tokens", type=int, default=1024)
    parser.add_argument("--thinking", choices=["on", "off"], help="`enable_thinking` of the chat template")
    parser.add_argument("--batch-size", type=int, help="prompts of a shard; default 64, with a server 8 x concurrency")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--server", help="URL of an OpenAI-compatible server; its key, if any, in $OPENAI_API_KEY")
    parser.add_argument("--model", help="the server's name for the target; default: the first that it lists")
    parser.add_argument("--concurrency", type=int, default=64, help="requests at a time")
    parser.add_argument("--time-limit", type=float, help="seconds after which no further batch is begun")
    parser.add_argument("--merge", type=Path, help="also write everything into this parquet file")
    args = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    settings = RegenerationSettings(
        args.max_new_tokens,
        args.max_prompt_tokens,
        tuple(args.temperatures),
        {"on": True, "off": False, None: None}[args.thinking],
        args.batch_size or (8 * args.concurrency if args.server else 64),
        args.seed,
    )
    prompts = read_prompts(args.prompts)[args.skip :][: args.limit]
    if args.server is not None:
        encoder = ConversationEncoder(tokenizer, settings.thinking)
        key = os.environ.get("OPENAI_API_KEY")
        answer = answer_with_server(args.server, encoder, settings, args.model, args.concurrency, api_key=key)
    else:
        target = AutoModelForCausalLM.from_pretrained(args.target, dtype=getattr(torch, args.dtype))
        answer = answer_with_transformers(target.to(args.device).eval(), tokenizer, settings)
    counts = regenerate(prompts, tokenizer, answer, args.output, settings, Path(args.target).name, args.time_limit)
    print(json.dumps(counts))
    if args.merge is not None:
        import pyarrow as pa
        import pyarrow.parquet as parquet

        shards = sorted(args.output.glob("part-*.parquet"))
        parquet.write_table(pa.concat_tables(map(parquet.read_table, shards)), args.merge, compression="zstd")
    return counts


if __name__ == "__main__":
    main()
