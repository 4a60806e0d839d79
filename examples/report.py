"""Results of `benchmark.py` (and training runs, and ablations) into a page that reads by itself.

    python examples/report.py results/smollm2 results/served --training out/dspine out/dflash --ablations out/ablations/ablations.json \
        --ours dspine --goal dflash=25 --goal dflash2,dspark,domino=8 --label small='DSpine small (3 layers)' --out report

writes `report/report.html` (one file, figures inside), `report/report.md` and `report/figures/*.svg` and `*.png` (at most 60 KB each).
A results folder may be given as NAME=FOLDER. Conclusion and comparison are of the first one, the speed in the conclusion is a
server's where one was measured. `python examples/report.py --training ...` alone compares training runs; the first one is the reference.
"""

import argparse
import sys

from dspine.integrations.evaluation.report import Goal, build, load_ablations, load_run, load_training, write
from dspine.integrations.evaluation.report_data import LABELS


def pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign and value):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    return name, value


def goal(text: str) -> tuple[list[str], float]:
    names, value = pair(text)
    try:
        return names.split(","), float(value) / 100
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be NAME[,NAME]=PER CENT, got {text!r}") from None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "results", nargs="*", help="folders of benchmark.py, NAME=FOLDER or FOLDER; the first one leads"
    )
    parser.add_argument("--training", nargs="*", default=[], help="metrics.json of training runs, or their folders")
    parser.add_argument("--ablations", help="ablations.json of ablations.py")
    parser.add_argument("--ours", help="the drafter that goals are for and that tables compare; default: dspine")
    parser.add_argument(
        "--goal",
        type=goal,
        action="append",
        default=[],
        metavar="NAME[,NAME]=PER CENT",
        help="gain in accepted length over the best of the named drafters; may be repeated",
    )
    parser.add_argument(
        "--label", type=pair, action="append", default=[], metavar="NAME=TEXT", help="what a drafter is called"
    )
    parser.add_argument("--title")
    parser.add_argument("--out", default="report", help="folder to write to")
    args = parser.parse_args(argv)
    if not args.results and not args.training and not args.ablations:
        parser.error("give a results folder, --training or --ablations")
    labels = LABELS | dict(args.label)
    ours = args.ours or "dspine"
    ours = labels.get(ours, ours)
    goals = [Goal(ours, tuple(labels.get(name, name) for name in names), share) for names, share in args.goal]
    try:
        runs = []
        for entry in args.results:
            name, _, folder = entry.rpartition("=")
            runs.append(load_run(folder, name or None, labels))
        trainings = [load_training(path, labels) for path in args.training]
        ablations = load_ablations(args.ablations) if args.ablations else None
        blocks = build(runs, trainings, args.title, ours, goals, ablations)
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
