"""Accepted length and speed of drafters on the seven benchmarks, against the target alone and against prompt lookup.

    python examples/benchmark.py --target PATH --drafter dspine=PATH --drafter dflash=PATH \
        --bench-dir FOLDER --max-samples 80 --temperatures 0 1 --block-sizes 16 8 --out results/smollm2
    torchrun --standalone --nproc_per_node 16 examples/benchmark.py ... --baselines target --mix-sets --batch-size 140
    python examples/benchmark.py --backend sglang --target PATH --server target=http://127.0.0.1:30000 \
        --server dspine=http://127.0.0.1:30001 --concurrency 1 8 32 --bench-dir FOLDER --out results/served

Under `torchrun` the processes share out the work in whole batches of one method each, those of the longest answers first: a round of a
small target waits for the host and costs the same for 100 rows as for 10, so large batches and several processes on each GPU are
fastest. The target's greedy answers come first, since texts at T=0 are compared with them. Lengths and texts stay what they are, but
speeds are then those of a crowded device: measure speed in a run of its own, one process and `--batch-size 1`. A batch that does not
fit into a device's memory is decoded in halves. (Processes in front of servers share out the prompts instead.)

Without `--bench-dir` the sets come from the Hub. Every finished batch is on disk at once; the same command continues a run that was
cut, with any number of processes, and `--summary-only` sums up what a killed one left. At T=0 a drafter's text must be the target's
own; where it parts from it, the first difference is scored again in fp32, and more than a near-tie is counted as a fault.
`python examples/report.py results/smollm2` turns the folder into a page.
"""

import argparse
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
from benchmarking.inputs import THINKING, read_prompts
from benchmarking.server_run import ServerRun
from benchmarking.summary import arguments_of, summed_up, versions
from benchmarking.transformers_run import TransformersRun
from benchmarking.work import agreed

from dspine.integrations.evaluation import BENCHMARKS, ResultStore
from dspine.integrations.evaluation.results import write_json


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="transformers", choices=["transformers", "sglang"])
    parser.add_argument("--target", required=True, help="folder or Hub id; with servers only its tokenizer is read")
    parser.add_argument("--drafter", action="append", default=[], metavar="NAME=FOLDER", help="may be repeated")
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="the name `target` is the one without a drafter",
    )
    parser.add_argument("--server-api", default="sglang", choices=["sglang", "openai"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1], help="requests under way at a server")
    parser.add_argument(
        "--baselines",
        nargs="*",
        default=["target", "prompt_lookup"],
        choices=["target", "prompt_lookup", "assisted"],
        help="`assisted`: drafters in Transformers' own DFlash loop too, but for peers with a head that it would leave out "
        "(Transformers 5.19 or later)",
    )
    parser.add_argument("--lookup-tokens", type=int, default=10, help="tokens that prompt lookup proposes")
    parser.add_argument("--datasets", nargs="+", default=list(BENCHMARKS))
    parser.add_argument("--bench-dir", help="folder of NAME.jsonl files")
    parser.add_argument("--prompts", help="parquet file of token ids in place of the sets' texts")
    parser.add_argument("--max-samples", type=int, help="prompts of every set; default what papers use")
    parser.add_argument("--max-prompt-tokens", type=int, help="longer prompts are left out")
    parser.add_argument("--prompt-seed", type=int, default=42, help="draws the prompts of a set; -1: the first ones")
    parser.add_argument("--thinking", default="off", choices=list(THINKING))
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[0], help="0: the one of training")
    parser.add_argument("--max-new-tokens", type=int, default=2048)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="samples of every prompt at T > 0")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument(
        "--mix-sets",
        action="store_true",
        help="fill batches across sets: faster, and lengths stay exact; times by set do not",
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", help="default: cuda if there is one")
    parser.add_argument("--tie-gap", type=float, help="logits up to which a difference at T=0 is a near-tie")
    parser.add_argument("--no-exactness", action="store_true", help="do not compare texts at T=0")
    parser.add_argument("--warmup-tokens", type=int, default=32, help="decoded by every method before it is timed")
    parser.add_argument("--time-limit", type=float, help="seconds after which to stop; the same command continues")
    parser.add_argument("--summary-only", action="store_true", help="decode nothing, sum up what is in --out")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--num-resamples", type=int, default=1000, help="of the bootstrap")
    parser.add_argument("--out", required=True, help="results folder")
    args = parser.parse_args(argv)
    if args.backend == "sglang" and not args.server and not args.summary_only:
        parser.error("--backend sglang needs --server NAME=URL")
    if args.backend == "transformers" and args.server:
        parser.error("--server is for --backend sglang")
    if args.batch_size < 1 or args.max_new_tokens < 2 or min(args.concurrency) < 1:
        parser.error("--batch-size and --concurrency must be at least 1 and --max-new-tokens at least 2")
    args.rank, args.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if args.device is None:
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cuda":
        # more processes than devices share them: decoding small models waits for the host, not for the device
        args.device = f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % torch.cuda.device_count()}"
    return args


def main(argv: list[str] | None = None) -> dict:
    started = time.monotonic()
    args = parse_arguments(argv)
    if args.summary_only:
        file = Path(args.out) / "run.json"
        if not file.is_file():
            raise FileNotFoundError(f"--summary-only needs a run's folder as --out, got {args.out} without run.json")
        about = json.loads(file.read_text(encoding="utf-8"))
        # whether anything is missing is not known without the prompts
        return summed_up(args, ResultStore(args.out, about["settings"]), about, False, None)
    if args.world > 1:
        # only to wait for each other: a process that is done may wait long
        torch.distributed.init_process_group("gloo", timeout=timedelta(days=2))
    run = TransformersRun(args) if args.backend == "transformers" else ServerRun(args)
    prompts = read_prompts(args, run.tokenizer)
    store = ResultStore(args.out, run.settings(), args.rank)
    file = store.folder / "run.json"
    earlier = json.loads(file.read_text(encoding="utf-8")) if args.rank == 0 and file.is_file() else {}
    about = {
        "settings": run.settings(),
        "arguments": arguments_of(args),
        "versions": versions(args, earlier),
        # drafters measured in an earlier run of the same folder are still part of it
        "drafters": earlier.get("drafters", {}) | run.described(),
    }
    if args.rank == 0:
        write_json(file, about)
    deadline = float("inf") if args.time_limit is None else started + args.time_limit
    finished = agreed(run.run(store, prompts, deadline), args.world)
    store.close()
    summary = {}
    if args.rank == 0:
        about["versions"] = versions(args, earlier)  # which implementations ran is known only now
        write_json(file, about)
        summary = summed_up(args, store, about, finished, time.monotonic() - started)
    if args.world > 1:
        torch.distributed.destroy_process_group()
    return summary


if __name__ == "__main__":
    main()
