"""What a run leaves: the versions it ran with, and the summary of everything in its folder, as JSON and as a table."""

import platform

import torch
import transformers

import dspine.modeling_dspine
from dspine.integrations.evaluation import ResultStore, summarise_records
from dspine.integrations.evaluation.results import write_json
from dspine.modeling_dspine import implementation_report


def versions(args, earlier: dict | None = None) -> dict:
    """What a run runs with. Which implementations it uses is known after the first call of each; until then an `earlier` run of the
    same folder tells."""
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
        before = (earlier or {}).get("versions", {}).get("implementations", {})
        report = implementation_report().items()
        result["implementations"] = {name: part["active"] or before.get(name) for name, part in report}
    return result


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


def arguments_of(args) -> dict:
    """What a run was asked for, without places on this machine."""
    paths = ("rank", "world", "target", "drafter", "bench_dir", "prompts", "out")
    return {k: v for k, v in vars(args).items() if k not in paths}


def summed_up(args, store: ResultStore, about: dict, finished: bool, seconds: float | None) -> dict:
    """Writes and shows the summary of everything in the folder; `about` holds settings, arguments, versions and drafters."""
    summary = {
        "complete": finished,
        **about,
        "seconds": seconds,
        **summarise_records(store.records(), args.num_resamples),
    }
    write_json(store.folder / "summary.json", summary)
    print_table(summary)
    words = "done" if finished else "stopped before the end; the same command continues"
    print(f"{words}: {store.folder / 'summary.json'}")
    return summary
