"""Throughput, latency and accepted length of a running SGLang server at fixed concurrency, written as JSON.

    python examples/serve_sglang.py --target TARGET --drafter DRAFTER --keep &
    python examples/benchmark_sglang.py --target TARGET --concurrency 1 8 32 64 --output dspine.json

The same number of requests is in flight all the time: a worker per slot sends its next one when the last is answered. Prompts come
from `--prompts`, a folder of `*.jsonl` files with `{"turns": [text, ...]}` lines, one file after the other in turn; without it three
built-in ones are repeated. `--keep-tokens` stores prompts and outputs as token ids, to compare two servers' texts with
`--compare-with other.json`.
"""

import argparse
import json
import platform
import statistics
import sys
import threading
import time
from pathlib import Path

from serve_sglang import QUESTIONS, accepted_length, request


def load_prompts(folder: Path | None, count: int) -> list[str]:
    """`count` prompts, one from each file in turn, from the start again when they run out."""
    if folder is None:
        return [QUESTIONS[i % len(QUESTIONS)] for i in range(count)]
    files = [[json.loads(line)["turns"][0] for line in path.open()] for path in sorted(folder.glob("*.jsonl"))]
    if not files:
        raise ValueError(f"--prompts must be a folder with *.jsonl files, found none in {folder}")
    return [files[i % len(files)][i // len(files) % len(files[i % len(files)])] for i in range(count)]


def run(url: str, prompts: list[list[int]], sampling: dict, concurrency: int) -> tuple[list[dict], float]:
    """Sends every prompt (token ids), `concurrency` at a time.

    Returns:
        Per prompt the server's answer with `latency` in seconds, or `{"error": text}`; and the seconds that all of it took.
    """
    answers: list[dict] = [{} for _ in prompts]
    order, lock = iter(range(len(prompts))), threading.Lock()

    def work():
        while True:
            with lock:
                i = next(order, None)
            if i is None:
                return
            start = time.monotonic()
            try:
                answers[i] = request(f"{url}/generate", {"input_ids": prompts[i], "sampling_params": sampling})
            except (OSError, RuntimeError) as error:
                answers[i] = {"error": str(error)}
            answers[i]["latency"] = time.monotonic() - start

    workers = [threading.Thread(target=work) for _ in range(concurrency)]
    start = time.monotonic()
    [worker.start() for worker in workers]
    [worker.join() for worker in workers]
    return answers, time.monotonic() - start


def summarise(answers: list[dict], seconds: float) -> dict:
    """Figures of one run. Accepted length is pooled (tokens / rounds) and the mean of the requests' own."""
    good = [answer for answer in answers if "error" not in answer]
    metas = [answer["meta_info"] for answer in good]
    tokens = sum(meta["completion_tokens"] for meta in metas)
    rounds = sum(meta.get("spec_verify_ct") or 0 for meta in metas)
    lengths = [length for length in map(accepted_length, metas) if length is not None]
    latencies = sorted(answer["latency"] for answer in good)
    figures = {
        "requests": len(answers),
        "errors": len(answers) - len(good),
        "seconds": seconds,
        "output_tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "latency_median": statistics.median(latencies) if latencies else None,
        "latency_p95": latencies[int(0.95 * (len(latencies) - 1))] if latencies else None,
        "rounds": rounds,
    }
    if rounds:
        with_rounds = [meta for meta in metas if meta.get("spec_verify_ct")]
        figures["accepted_length"] = sum(meta["completion_tokens"] - 1 for meta in with_rounds) / rounds
        figures["accepted_length_per_request"] = statistics.mean(lengths)
    return figures


def compare(runs: list[dict], others: list[dict]) -> list[dict]:
    """For runs of equal concurrency with stored tokens: how many texts are equal, and where the others part."""
    found = []
    by_concurrency = {other["concurrency"]: other for other in others}
    for one in runs:
        other = by_concurrency.get(one["concurrency"])
        if other is None or "tokens" not in one or "tokens" not in other:
            continue
        firsts = []
        for a, b in zip(one["tokens"], other["tokens"]):
            if a != b:
                firsts.append(next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b))))
        pairs = min(len(one["tokens"]), len(other["tokens"]))
        found.append({"concurrency": one["concurrency"], "equal": pairs - len(firsts), "first_differences": firsts})
    return found


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or Hub id; only its tokenizer is read")
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--requests", type=int, default=4, help="requests per slot of the concurrency")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--max-prompt-tokens", type=int, default=1500)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--ignore-eos", action="store_true", help="always generate --max-new-tokens tokens")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--keep-tokens", action="store_true")
    parser.add_argument("--compare-with", type=Path, help="an earlier output with tokens")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    from transformers import AutoTokenizer

    args = parse_arguments(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    texts = load_prompts(args.prompts, max(args.concurrency) * args.requests)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )[: args.max_prompt_tokens]
        for text in texts
    ]
    sampling = {"temperature": args.temperature, "top_p": args.top_p, "max_new_tokens": args.max_new_tokens}
    sampling["ignore_eos"] = args.ignore_eos
    # a short round of every batch size first, so that nothing is compiled or loaded while the clock runs
    run(args.url, prompts[: max(args.concurrency)], sampling | {"max_new_tokens": 8}, max(args.concurrency))
    runs = []
    for concurrency in args.concurrency:
        chosen = prompts[: concurrency * args.requests]
        answers, seconds = run(args.url, chosen, sampling, concurrency)
        figures = {"concurrency": concurrency, **summarise(answers, seconds)}
        print(json.dumps(figures), flush=True)
        errors = sorted({answer["error"] for answer in answers if "error" in answer})
        if errors:
            figures["error_texts"] = errors[:5]
        if args.keep_tokens:
            figures |= {"prompts": chosen, "tokens": [answer.get("output_ids", []) for answer in answers]}
        runs.append(figures)
    result = {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "sampling": sampling,
        "python": platform.python_version(),
        "server": server_facts(args.url),
        "runs": runs,
    }
    if args.compare_with:
        result["comparison"] = compare(runs, json.loads(args.compare_with.read_text())["runs"])
        print(json.dumps(result["comparison"]))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    if any(figures["errors"] for figures in runs):
        sys.exit("some requests failed; see error_texts in the output")


def server_facts(url: str) -> dict:
    """What the server says about itself, as far as it concerns a measurement."""
    try:
        info = request(f"{url}/get_server_info", timeout=30) or {}
    except (OSError, RuntimeError) as error:
        return {"unknown": str(error)}
    names = ("version", "model_path", "dtype", "tp_size", "attention_backend", "max_running_requests", "load_format")
    names += ("speculative_algorithm", "speculative_draft_model_path", "speculative_num_draft_tokens")
    return {name: info[name] for name in names if name in info}


if __name__ == "__main__":
    main()
