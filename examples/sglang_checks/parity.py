"""Greedy texts of the benchmarks from every server, compared with the first server's."""

import asyncio
import json
from pathlib import Path

from sglang_client import Client

from sglang_checks.lengths import summary_of


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
