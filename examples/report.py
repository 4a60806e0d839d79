"""Results of `benchmark.py` (and training runs) into a page that reads by itself.

    python examples/report.py results/smollm2 results/served --training out/dspine out/dflash --out report

writes `report/report.html` (one file, figures inside), `report/report.md` and `report/figures/*.svg`. A results folder may be given as
NAME=FOLDER. `python examples/report.py --training ...` alone compares training runs; the first one is the reference.
"""

import argparse
import sys

from dspine.integrations.evaluation.report import build, load_run, load_training, write


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "results", nargs="*", help="folders of benchmark.py, NAME=FOLDER or FOLDER; the first one leads"
    )
    parser.add_argument("--training", nargs="*", default=[], help="metrics.json of training runs, or their folders")
    parser.add_argument("--title")
    parser.add_argument("--out", default="report", help="folder to write to")
    args = parser.parse_args(argv)
    if not args.results and not args.training:
        parser.error("give a results folder or --training")
    try:
        runs = []
        for entry in args.results:
            name, _, folder = entry.rpartition("=")
            runs.append(load_run(folder, name or None))
        blocks = build(runs, [load_training(path) for path in args.training], args.title)
    except (OSError, ValueError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    except ImportError:
        print('report: figures need the optional extra. Install it with `pip install "dspine[eval]"`', file=sys.stderr)
        return 2
    for path in write(blocks, args.out):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
