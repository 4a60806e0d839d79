"""What DSpine's own operations cost next to the backbone, on one GPU, with random weights in the shape of Qwen3-8B.

    python examples/benchmark_kernels.py --output examples/results/kernels_h200.json --plot examples/results/kernels_h200.png

Every number of a run comes from one process. Serving is timed as CUDA graphs, whose replays are interleaved so that a drifting clock
meets all variants alike; the cost of the injections inside the draft pass is the difference between the pass with and without them,
which leaves no weights in the cache that a real pass would have pushed out.

`--sweep` instead times, for every size class, the configuration in the kernels' tables against some others and, with `--rival`,
against the `kernels/` of another commit, and says which wins:

    git archive COMMIT kernels | tar x -C /tmp/rival
    python examples/benchmark_kernels.py --sweep --rival /tmp/rival/kernels --output /tmp/sweep.json

A section that fails is recorded with its error, and the others go on; `--output` is written after every section.
"""

import argparse
import dataclasses
import json
import time
import traceback
from pathlib import Path

import torch
from kernel_benchmark.draft_pass import Drafter
from kernel_benchmark.first_calls import measure_first_calls, time_first_calls
from kernel_benchmark.floors import measure_ceilings
from kernel_benchmark.output import plot, print_table
from kernel_benchmark.rounds import measure_rounds
from kernel_benchmark.serving import measure_references, measure_serving
from kernel_benchmark.shapes import make_shape, normal
from kernel_benchmark.sweep import sweep
from kernel_benchmark.timing import START
from kernel_benchmark.training import measure_training


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file with all figures")
    parser.add_argument("--plot", type=Path, help="PNG file (needs matplotlib)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument(
        "--budget", type=float, default=210, help="seconds after which comparisons with torch.compile are left out"
    )
    parser.add_argument(
        "--first-calls", action="store_true", help="time every operation's first call instead, without other figures"
    )
    parser.add_argument("--sweep", action="store_true", help="compare configurations of the kernels instead")
    parser.add_argument(
        "--rival", type=Path, help="with --sweep: folder `kernels` of another version, timed beside this one"
    )
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the script")
    return parser.parse_args(argv)


def write_json(path: Path, value: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.tmp")
    written.write_text(json.dumps(value, indent=1, default=dataclasses.asdict) + "\n")
    written.replace(path)  # never half a file


def run_section(report, name, function, *arguments):
    begin = time.perf_counter()
    try:
        function(report, *arguments)
    except Exception as error:
        report["errors"][name] = "".join(traceback.format_exception(error))[-3000:]
        print(f"{name} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
    finally:
        torch.cuda.empty_cache()
        report["section_s"][name] = time.perf_counter() - begin


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    torch.manual_seed(0)
    shape = make_shape(args.tiny)
    if args.first_calls:
        seconds = time_first_calls(shape)
        write_json(args.output, seconds)
        for name, value in seconds.items():
            print(f"{name}: {value:.2f} s", flush=True)
        return
    import triton

    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "shape": dict(vars(shape)),
        "serving": {},
        "errors": {},
        "section_s": {},
    }

    def section(name, function, *arguments):
        run_section(report, name, function, *arguments)
        write_json(args.output, report)

    if args.sweep:
        section("sweep", sweep, shape, args)
    else:
        section("first_calls", measure_first_calls, shape, args)
        section("ceilings", measure_ceilings, shape, args)
        drafter = Drafter(shape, normal(shape.V, shape.d))

        def compile_layer(report):
            # the strongest baseline: the backbone's small operations fused
            compiled = torch.compile(drafter.backbone.layer, dynamic=False)
            drafter.set_batch(args.batches[0])
            with torch.no_grad():
                compiled(drafter.x, drafter.backbone.caches[0], *drafter.backbone.layers[0])
            drafter.backbone.run_layer = compiled

        section("compile_layer", compile_layer)
        for N in args.batches:
            section(f"serving_{N}", measure_serving, shape, args, drafter, N)
            section(f"eager_{N}", measure_references, shape, args, drafter, N, False)
        section("training", measure_training, shape, args)
        section("rounds", measure_rounds, shape, args, drafter)
        for N in args.batches:
            if N != 32:  # between sizes that are compared
                section(f"compiled_{N}", measure_references, shape, args, drafter, N, True)
    report["total_s"] = time.perf_counter() - START
    write_json(args.output, report)
    if args.plot and not args.sweep:
        section("plot", plot, args.plot)
    if not args.sweep:
        print_table(report)


if __name__ == "__main__":
    main()
