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
import importlib
import json
import os
import platform
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import transformers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import dspine.modeling_dspine
from dspine.integrations.doctor_pairing import load_drafter, read_config
from dspine.integrations.evaluation import (
    BENCHMARKS,
    NearTieCheck,
    ResultStore,
    Server,
    decode_alone,
    decode_in_transformers_loop,
    decode_prompt_lookup,
    decode_with_drafter,
    load_prompts,
    load_token_prompts,
    summarise_records,
)
from dspine.integrations.evaluation.decoding import check_transformers_loop, prompt_seed
from dspine.integrations.evaluation.results import assisted_name, fingerprint, write_json
from dspine.modeling_dspine import DSpineModel, implementation_report


THINKING = {"off": False, "on": True, "template": None}


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
        help="`assisted`: every drafter in Transformers' own DFlash loop too (Transformers 5.19 or later)",
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


def named(entries: list[str]) -> dict[str, str]:
    """`NAME=VALUE` entries; a value without a name is called by its last part."""
    result = {}
    for entry in entries:
        name, _, value = entry.partition("=") if "=" in entry else (Path(entry).name, "", entry)
        if name in result:
            raise ValueError(f"two entries are called {name!r}; give them different names (NAME=VALUE)")
        if not value:
            raise ValueError(f"expected NAME=VALUE, got {entry!r}")
        result[name] = value
    return result


def read_prompts(args, tokenizer) -> list:
    """All prompts, the sets taken in turns, so that a run that is cut has some of each."""
    if args.prompts is not None:
        names = None if args.datasets == list(BENCHMARKS) else args.datasets
        prompts = load_token_prompts(args.prompts, names, args.max_samples)
    else:
        prompts = load_prompts(
            args.datasets,
            tokenizer,
            args.bench_dir,
            args.max_samples,
            None if args.prompt_seed < 0 else args.prompt_seed,
            THINKING[args.thinking],
            args.max_prompt_tokens,
        )
    if not prompts:
        raise ValueError("no prompts are left; check --datasets, --max-samples and --max-prompt-tokens")
    place = defaultdict(int)
    order = []
    for prompt in prompts:
        order.append(place[prompt.dataset])
        place[prompt.dataset] += 1
    return [prompts[i] for i in sorted(range(len(prompts)), key=lambda i: order[i])]


def part_of(prompts: list, rank: int, world: int) -> list:
    """One process's prompts: equal work for all, where answers are known every process gets long and short ones alike."""
    places = sorted(range(len(prompts)), key=lambda i: prompts[i].answer_length or 0)
    return [prompts[i] for i in sorted(places[rank::world])]


def batches(prompts: list, size: int, mix_sets: bool = False) -> list[list]:
    """Batches of one set each unless `mix_sets`; prompts of like answers (if known) and like length go together, since a batch runs
    as long as its longest answer."""
    if size == 1:
        return [[prompt] for prompt in prompts]
    sets = defaultdict(list)
    for prompt in prompts:
        sets[None if mix_sets else prompt.dataset].append(prompt)
    parts = []
    for rows in sets.values():
        rows = sorted(rows, key=lambda prompt: (prompt.answer_length or 0, len(prompt.input_ids)))
        parts.append([rows[i : i + size] for i in range(0, len(rows), size)])
    return [part[i] for i in range(max(map(len, parts))) for part in parts if i < len(part)]


@dataclass
class Unit:
    """What one process does at a time: the prompts of a batch that are not in the store yet, decoded by one method."""

    temperature: float
    seed: int
    place: int  # of the batch among all batches
    prompts: list
    method: dict

    @property
    def gives_answers(self) -> bool:
        """Whether texts of other units are compared with this one's."""
        return self.temperature == 0 and self.method["kind"] == "target"

    def rounds(self, max_new_tokens: int) -> float:
        """Roughly how many rounds it takes, in passes of the target alone; good enough to share work out.

        A batch runs as long as its longest answer; drafters commit some 4 tokens a round at T=0 and 2 at T > 0, and their
        rounds cost about a third more.
        """
        lengths = [min(prompt.answer_length or max_new_tokens, max_new_tokens) for prompt in self.prompts]
        if self.method["kind"] == "target":
            return max(lengths)
        # Transformers' assisted generation takes one prompt at a time
        length = max(lengths) if self.method["kind"] == "drafter" else sum(lengths)
        return length / (3 if self.temperature == 0 else 1.5)


def share_out(units: list[Unit], world: int, max_new_tokens: int) -> tuple[list[list[Unit]], list[list[Unit]]]:
    """Two parts of every process's work, between which all processes meet.

    The first part holds what gives answers, shared out evenly, and work that needs no answers where a process would only wait for the
    others. Units start in the order of their batches, longest answers first, with all methods and temperatures of a batch, each at the
    process that is free first: a run that is cut then has the same prompts of all methods as far as possible, and short units at the
    end make all processes finish at about the same time. All processes compute the same plan.
    """
    rounds = {id(unit): unit.rounds(max_new_tokens) for unit in units}
    longest = defaultdict(float)
    for unit in units:
        lengths = [min(prompt.answer_length or max_new_tokens, max_new_tokens) for prompt in unit.prompts]
        longest[unit.place] = max(longest[unit.place], *lengths)
    units = sorted(units, key=lambda unit: (-longest[unit.place], unit.place, -rounds[id(unit)]))
    first, then = ([[] for _ in range(world)] for _ in range(2))
    load = [0.0] * world

    def give(shares: list[list[Unit]], unit: Unit, until: float = float("inf")) -> bool:
        rank = load.index(min(load))
        if load[rank] + rounds[id(unit)] > until:
            return False
        load[rank] += rounds[id(unit)]
        shares[rank].append(unit)
        return True

    for unit in units:
        if unit.gives_answers:
            give(first, unit)
    meeting, rest = max(load), []
    for unit in units:
        if not unit.gives_answers and not (unit.temperature > 0 and give(first, unit, meeting)):
            rest.append(unit)
    load = [0.0] * world
    for unit in rest:
        give(then, unit)
    return first, then


def versions(args) -> dict:
    result = {
        "dspine": dspine.modeling_dspine.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(args.device)
        if args.device.startswith("cuda")
        else f"CPU ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "processes": args.world,
        "devices": min(args.world, torch.cuda.device_count()) if args.device.startswith("cuda") else 1,
    }
    if args.backend == "transformers":
        result["implementations"] = {name: part["active"] for name, part in implementation_report().items()}
    return result


def load(folder: str, dtype: torch.dtype) -> DSpineModel:
    """A DSpine drafter, a DFlash checkpoint, or a peer trained by a script in `peers/`."""
    if (Path(folder) / "peer.json").is_file():
        path = str(Path(__file__).parent / "peers")
        if path not in sys.path:
            sys.path.append(path)
        return importlib.import_module("peer_drafters").load_peer(folder, dtype)
    _, is_dflash = read_config(folder)
    return load_drafter(folder, dtype, is_dflash)


class TransformersRun:
    """Target, drafters and baselines in this process; `methods` are run on every batch in turn."""

    def __init__(self, args):
        if "assisted" in args.baselines:
            check_transformers_loop()  # now, not after hours of other work
        dtype = getattr(torch, args.dtype)
        options = {"dtype": dtype, "trust_remote_code": args.trust_remote_code}
        self.args = args
        self.target = AutoModelForCausalLM.from_pretrained(args.target, **options).to(args.device).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(args.target, trust_remote_code=args.trust_remote_code)
        self.check = None if args.no_exactness else NearTieCheck(self.target, args.tie_gap)
        self.methods, self.drafters = [], {}
        self.warm = set()  # methods that have run
        self.sums = defaultdict(lambda: [0, 0])  # tokens and rounds so far
        for name in (name for name in args.baselines if name != "assisted"):
            self.methods.append({"method": name, "kind": name, "block_size": None, "fingerprint": None})
        for name, folder in named(args.drafter).items():
            drafter = load(folder, dtype).to(args.device).eval()
            drafter.bind_target(self.target, self.tokenizer)
            trained, trained_for = drafter.config.block_size, drafter.config.target_name_or_path
            self.drafters[name] = {
                "fingerprint": fingerprint(folder),
                "parameters": sum(parameter.numel() for parameter in drafter.parameters()),
                "block_size_of_training": trained,
                "config": drafter.config.to_diff_dict() | {"target_name_or_path": Path(trained_for or "").name},
                "model": drafter,
            }
            for block_size in dict.fromkeys(size or trained for size in args.block_sizes):
                self.methods.append(
                    {
                        "method": name,
                        "kind": "drafter",
                        "block_size": block_size,
                        "fingerprint": self.drafters[name]["fingerprint"],
                    }
                )
            if "assisted" in args.baselines:
                part = {"kind": "assisted", "block_size": trained, "fingerprint": self.drafters[name]["fingerprint"]}
                self.methods.append({"method": assisted_name(name), "drafter": name} | part)
        if not self.methods:
            raise ValueError("nothing to run: give --drafter or --baselines")

    def settings(self) -> dict:
        names = ("backend", "max_new_tokens", "thinking", "batch_size", "mix_sets", "dtype", "lookup_tokens")
        target = self.args.target if not Path(self.args.target).is_dir() else Path(self.args.target).resolve().name
        return {name: getattr(self.args, name) for name in names} | {
            "target": target,
            "target_fingerprint": fingerprint(self.args.target) if Path(self.args.target).is_dir() else None,
            "device": versions(self.args)["device"],
        }

    def described(self) -> dict:
        return {name: {k: v for k, v in part.items() if k != "model"} for name, part in self.drafters.items()}

    def decode(self, method: dict, prompts: list, temperature: float, seed: int, max_new_tokens: int) -> list:
        common = (max_new_tokens, temperature, seed)
        if method["kind"] == "target":
            return decode_alone(self.target, prompts, *common)
        if method["kind"] == "prompt_lookup":
            return decode_prompt_lookup(self.target, prompts, *common, num_tokens=self.args.lookup_tokens)
        drafter = self.drafters[method.get("drafter", method["method"])]["model"]
        if method["kind"] == "assisted":
            return decode_in_transformers_loop(self.target, drafter, prompts, *common)
        return decode_with_drafter(self.target, drafter, prompts, *common, block_size=method["block_size"])

    def decode_what_fits(self, unit: Unit, prompts: list, max_new_tokens: int) -> list:
        """`decode`, in halves where a batch does not fit into the device's memory."""
        try:
            return self.decode(unit.method, prompts, unit.temperature, unit.seed, max_new_tokens)
        except torch.OutOfMemoryError:
            if len(prompts) == 1:
                raise
        # outside of `except`, where the traceback would keep the tensors alive
        torch.cuda.empty_cache()
        half = (len(prompts) + 1) // 2
        print(f"{unit.method['method']}: {len(prompts)} rows do not fit, {half} at a time", file=sys.stderr)
        parts = (prompts[:half], prompts[half:])
        return [answer for part in parts for answer in self.decode_what_fits(unit, part, max_new_tokens)]

    def missing(self, store: ResultStore, prompts: list) -> list[Unit]:
        """All that is not in the store yet."""
        args, units = self.args, []
        for temperature in args.temperatures:
            for seed in args.seeds if temperature > 0 else args.seeds[:1]:
                for place, batch in enumerate(batches(prompts, args.batch_size, args.mix_sets)):
                    for method in self.methods:
                        keys = [store.key(self.record(method, prompt, temperature, seed)) for prompt in batch]
                        todo = [prompt for prompt, key in zip(batch, keys) if key not in store.done]
                        if todo:
                            units.append(Unit(temperature, seed, place, todo, method))
        return units

    def run(self, store: ResultStore, prompts: list, deadline: float) -> bool:
        """This process's share of all that is not in the store yet; False if the deadline came first."""
        args = self.args
        units = self.missing(store, prompts)
        if args.world == 1:
            # in the order asked for: temperature by temperature, and every batch by all methods in turn
            first, then = units, []
        else:
            # nobody may write before all have read what is missing, or their plans would differ
            agreed(True, args.world)
            first, then = (part[args.rank] for part in share_out(units, args.world, args.max_new_tokens))
        total = sum(len(unit.prompts) for unit in first + then)
        with tqdm(total=total, desc="requests", unit="request", disable=args.rank > 0, file=sys.stderr) as bar:
            finished = self.work(store, first, deadline, bar)
            if args.world > 1:
                finished = agreed(finished, args.world) and self.work(store, then, deadline, bar)
        return finished

    def work(self, store: ResultStore, units: list[Unit], deadline: float, bar) -> bool:
        """Decodes units in turn; False if the deadline came first."""
        args = self.args
        # the target's greedy answers, from any process of this run or an earlier one: what texts are compared with
        answers = {
            (r["dataset"], r["index"]): r["output_ids"]
            for r in store.records()
            if r["kind"] == "target" and r["temperature"] == 0 and r.get("output_ids")
        }
        for unit in units:
            if time.monotonic() > deadline:
                return False
            method, greedy = unit.method, unit.temperature == 0
            name = (method["method"], method["block_size"], greedy)
            if name not in self.warm and args.warmup_tokens > 1:
                # builds kernels and graphs of this method, which must not be charged to the first prompt
                self.decode_what_fits(unit, unit.prompts, args.warmup_tokens)
                self.warm.add(name)
            decoded, finished = self.decode_what_fits(unit, unit.prompts, args.max_new_tokens), []
            for prompt, answer in zip(unit.prompts, decoded):
                record = self.record(method, prompt, unit.temperature, unit.seed, answer)
                request = (prompt.dataset, prompt.index)
                if unit.gives_answers:
                    answers[request] = record["output_ids"] = answer.output_ids
                elif greedy and self.check is not None and request in answers:
                    record["exactness"] = self.check(prompt.input_ids, answers[request], answer.output_ids)
                finished.append(record)
                if method["kind"] == "drafter":
                    total = self.sums[f"{method['method']}/{method['block_size']}"]
                    total[0] += sum(answer.accepted_lengths)
                    total[1] += len(answer.accepted_lengths)
            store.add(*finished)
            bar.update(len(unit.prompts))
            bar.set_postfix({k: f"{a / max(b, 1):.2f}" for k, (a, b) in self.sums.items()}, refresh=False)
        return True

    def record(self, method, prompt, temperature, seed, answer=None) -> dict:
        record = {
            "backend": "transformers",
            **method,
            "dataset": prompt.dataset,
            "index": prompt.index,
            "prompt": prompt.digest,
            "temperature": temperature,
            "seed": seed,
            "concurrency": None,
        }
        if answer is not None:
            record |= {
                "batch_size": 1 if method["kind"] in ("prompt_lookup", "assisted") else self.args.batch_size,
                "prompt_tokens": len(prompt.input_ids),
                "new_tokens": len(answer.output_ids),
                "seconds": answer.seconds,
                "accepted_lengths": answer.accepted_lengths,
                "times": answer.times,
                "rank": self.args.rank,
            }
        return record


class ServerRun:
    """Running servers, each with its own drafter (or none); every concurrency sends all prompts of a set at once."""

    def __init__(self, args):
        self.args = args
        self.tokenizer = AutoTokenizer.from_pretrained(args.target, trust_remote_code=args.trust_remote_code)
        self.servers = {name: Server(url, args.server_api) for name, url in named(args.server).items()}
        self.info = {name: server.info() for name, server in self.servers.items()}

    def settings(self) -> dict:
        names = ("backend", "max_new_tokens", "thinking", "server_api")
        target = Path(self.args.target).resolve().name if Path(self.args.target).is_dir() else self.args.target
        return {name: getattr(self.args, name) for name in names} | {"target": target}

    def described(self) -> dict:
        return self.info

    def run(self, store: ResultStore, prompts: list, deadline: float) -> bool:
        args, sets = self.args, defaultdict(list)
        prompts = part_of(prompts, args.rank, args.world)
        for prompt in prompts:
            sets[prompt.dataset].append(prompt)
        plan = [
            (temperature, seed, concurrency, rows, name)
            for temperature in args.temperatures
            for seed in (args.seeds if temperature > 0 else args.seeds[:1])
            for rows in sets.values()
            for concurrency in args.concurrency
            for name in self.servers
        ]
        plan = [
            part
            for part in plan
            if any(store.key(self.record(part[4], prompt, *part[:3])) not in store.done for prompt in part[3])
        ]
        for name in {part[4] for part in plan}:
            self.servers[name].load(prompts[: max(args.concurrency)], max(args.concurrency), args.warmup_tokens)
        total = sum(len(part[3]) for part in plan)
        with tqdm(total=total, desc="requests", unit="request", disable=args.rank > 0, file=sys.stderr) as bar:
            for temperature, seed, concurrency, rows, name in plan:
                if time.monotonic() > deadline:
                    return False
                server = self.servers[name]
                server.flush_cache()
                seeds = [prompt_seed(seed, prompt) % 2**31 for prompt in rows]
                answers, wall = server.load(rows, concurrency, args.max_new_tokens, temperature, seeds, bar.update)
                tokens = sum(answer.new_tokens for answer in answers)
                for prompt, answer in zip(rows, answers):
                    record = self.record(name, prompt, temperature, seed, concurrency, answer)
                    store.add(record | {"wall_seconds": wall, "wall_tokens": tokens})
        return True

    def record(self, name, prompt, temperature, seed, concurrency, answer=None) -> dict:
        speculative = {k: v for k, v in self.info[name].items() if k.startswith("speculative_")}
        block_size = speculative.get("speculative_num_draft_tokens")
        record = {
            "backend": "sglang" if self.args.server_api == "sglang" else "openai",
            "method": name,
            "kind": "target" if name == "target" else "drafter",
            "block_size": block_size,
            "fingerprint": json.dumps(speculative, sort_keys=True) if speculative else None,
            "dataset": prompt.dataset,
            "index": prompt.index,
            "prompt": prompt.digest,
            "temperature": temperature,
            "seed": seed,
            "concurrency": concurrency,
        }
        if answer is not None:
            record |= {
                "batch_size": None,
                "prompt_tokens": len(prompt.input_ids),
                "new_tokens": answer.new_tokens,
                "seconds": answer.seconds,
                "rounds": answer.rounds,
                "accepted_lengths": answer.accepted_lengths,
                "rank": self.args.rank,
            }
        return record


def print_table(summary: dict) -> None:
    """The scoreboard as text."""
    print(
        f"{'method':<20} {'T':>4} {'B':>4} {'conc':>5} {'length':>7} {'interval':>14} {'tok/s':>9} {'speed-up':>9} {'exact':>12}"
    )
    for cell in summary["cells"]:
        mean = cell.get("mean_of_sets", {})
        low, high = mean.get("accepted_length_interval") or (float("nan"),) * 2
        exact = cell.get("exactness")
        print(
            f"{cell['method']:<20} {cell['temperature']:>4g} {cell['block_size'] or '-':>4} {cell['concurrency'] or '-':>5} "
            f"{mean.get('accepted_length', float('nan')):>7.3f} {f'{low:.2f} to {high:.2f}':>14} "
            f"{cell['tokens_per_second'] or float('nan'):>9.1f} {cell['speed_up'].get('target', float('nan')):>9.2f} "
            + (f"{exact['equal']}/{exact['compared']}, {exact['faults']} bad" if exact else "-").rjust(12)
        )


def agreed(finished: bool, world: int) -> bool:
    """Whether all processes finished; waits for them, so every process must call it equally often."""
    if world == 1:
        return finished
    flag = torch.tensor(int(finished))
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN)
    return bool(flag)


def summed_up(args, store: ResultStore, about: dict, finished: bool, seconds: float | None) -> dict:
    """Writes and shows the summary of everything in the folder; `about` holds settings, versions and drafters."""
    paths = ("rank", "world", "target", "drafter", "bench_dir", "prompts", "out")
    summary = {
        "complete": finished,
        **about,
        "arguments": {k: v for k, v in vars(args).items() if k not in paths},
        "seconds": seconds,
        **summarise_records(store.records(), args.num_resamples),
    }
    write_json(store.folder / "summary.json", summary)
    print_table(summary)
    words = "done" if finished else "stopped before the end; the same command continues"
    print(f"{words}: {store.folder / 'summary.json'}")
    return summary


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
    about = {"settings": run.settings(), "versions": versions(args), "drafters": run.described()}
    if args.rank == 0:
        file = store.folder / "run.json"
        # drafters measured in an earlier run of the same folder are still part of it
        earlier = json.loads(file.read_text(encoding="utf-8")).get("drafters", {}) if file.is_file() else {}
        about["drafters"] = earlier | about["drafters"]
        write_json(file, about)
    deadline = float("inf") if args.time_limit is None else started + args.time_limit
    finished = agreed(run.run(store, prompts, deadline), args.world)
    store.close()
    summary = {}
    if args.rank == 0:
        about["versions"] = versions(args)  # which implementations ran is known only now
        write_json(file, about)
        summary = summed_up(args, store, about, finished, time.monotonic() - started)
    if args.world > 1:
        torch.distributed.destroy_process_group()
    return summary


if __name__ == "__main__":
    main()
