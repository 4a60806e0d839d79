"""The backend in this process: the target alone, prompt lookup, and drafters, in `dspine`'s loop and in Transformers' own."""

import importlib
import json
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarking.inputs import name_of_target, named, request_fields
from benchmarking.summary import versions
from benchmarking.work import Unit, agreed, batches, share_out
from dspine.integrations.doctor_pairing import load_drafter, read_config
from dspine.integrations.evaluation import (
    NearTieCheck,
    ResultStore,
    decode_alone,
    decode_in_transformers_loop,
    decode_prompt_lookup,
    decode_with_drafter,
)
from dspine.integrations.evaluation.decoding import check_transformers_loop, drafts_in_transformers_loop
from dspine.integrations.evaluation.results import assisted_name, fingerprint
from dspine.modeling_dspine import DSpineModel


# the code that reads drafters of other projects
PEERS = Path(__file__).resolve().parents[1] / "peers"


def peer_of(folder: str) -> dict:
    """`kind` and `package` of a peer trained by a script in `peers/`, empty for drafters that `dspine` itself reads."""
    file = Path(folder) / "peer.json"
    about = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return {name: about[name] for name in ("kind", "package") if name in about}


def load(folder: str, dtype: torch.dtype) -> DSpineModel:
    """A DSpine drafter, a DFlash checkpoint, or a peer trained by a script in `peers/`."""
    if (Path(folder) / "peer.json").is_file():
        if str(PEERS) not in sys.path:
            sys.path.append(str(PEERS))
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
            self.drafters[name] = peer_of(folder) | {
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
            if "assisted" in args.baselines and drafts_in_transformers_loop(drafter):
                part = {"kind": "assisted", "block_size": trained, "fingerprint": self.drafters[name]["fingerprint"]}
                self.methods.append({"method": assisted_name(name), "drafter": name} | part)
        if not self.methods:
            raise ValueError("nothing to run: give --drafter or --baselines")

    def settings(self) -> dict:
        names = ("backend", "max_new_tokens", "thinking", "batch_size", "mix_sets", "dtype", "lookup_tokens")
        return {name: getattr(self.args, name) for name in names} | {
            "target": name_of_target(self.args.target),
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
            **request_fields(prompt, temperature, seed, None),
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
