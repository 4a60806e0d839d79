"""Measures what an SGLang server with a DSpine drafter must hold: same texts, same distribution, accepted length, time per round.

The servers must be running (see `serve_sglang.py`); each check asks them over HTTP and writes one JSON file:

    prepare       checkpoints for the other checks: a DFlash drafter in SGLang's layout, padded heads, shapes with dummy weights
    parity        greedy texts of the benchmarks from every server, compared with the first server's
    hf            the same prompts with Transformers: are differences near-ties, is the accepted length the same
    walk          the served texts again, teacher-forced through Transformers: the accepted length that each text must have had
    layers        draft passes stored by `record_sglang.py` against the drafter in Transformers, layer by layer
    distribution  short sampled continuations of servers, compared with the first's by two-sample chi-square tests
    exact         the same samples against the target's own probabilities in float32
    rounds        time per verification round of servers at fixed concurrency, in short windows that alternate between them
    profile       where a round's GPU time goes, from a trace of SGLang's own profiler

    python examples/check_sglang.py parity --server plain=http://127.0.0.1:30000 dspine=http://127.0.0.1:31000 \
        --target TARGET --bench-dir bench/ --output parity.json

`prepare`, `hf`, `walk`, `layers` and `exact` need this package's model and run without SGLang; the others need neither.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from sglang_checks.checkpoints import prepare
from sglang_checks.distribution import distribution, exact
from sglang_checks.hugging_face import hf, walk
from sglang_checks.layers import layers
from sglang_checks.parity import parity
from sglang_checks.profile import profile
from sglang_checks.rounds import rounds


def named(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"must look like name=value, got {text!r}")
    return name, value


def setting(text: str) -> tuple[float, float]:
    temperature, _, top_p = text.partition("/")
    return float(temperature), float(top_p or 1.0)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    checks = parser.add_subparsers(dest="check", required=True)

    def add(name, function, servers=True):
        one = checks.add_parser(name)
        one.set_defaults(function=function)
        one.add_argument("--output", type=Path, required=True, help="JSON file")
        if servers:
            one.add_argument("--server", type=named, nargs="+", required=True, metavar="NAME=URL")
        return one

    one = add("prepare", prepare, servers=False)
    one.add_argument("--folder", type=Path, required=True, help="for the checkpoints")
    one.add_argument("--target", type=Path)
    one.add_argument("--dspine", type=Path, help="a DSpine drafter")
    one.add_argument("--dflash", type=Path, help="a DFlash drafter saved by this package")
    one.add_argument("--ranks", type=int, default=2)

    one = add("parity", parity)
    one.add_argument("--target", required=True, help="its tokenizer is read")
    one.add_argument("--bench-dir", type=Path, required=True)
    one.add_argument("--num-prompts", type=int, default=20, help="of every benchmark")
    one.add_argument("--max-prompt-tokens", type=int, default=1024)
    one.add_argument("--max-new-tokens", type=int, default=256)
    one.add_argument("--concurrency", type=int, default=32)

    one = add("hf", hf, servers=False)
    one.add_argument("--parity", type=Path, required=True, help="the output of parity")
    one.add_argument("--target", required=True)
    one.add_argument(
        "--drafter", type=named, nargs="*", default=[], metavar="NAME=FOLDER", help="names as in --parity"
    )
    one.add_argument("--dtype", default="bfloat16")
    one.add_argument("--device", default="cuda")
    one.add_argument("--batch-size", type=int, default=20)

    one = add("walk", walk, servers=False)
    one.add_argument("--parity", type=Path, required=True, help="the output of parity")
    one.add_argument("--target", required=True)
    one.add_argument("--drafter", type=named, nargs="+", required=True, metavar="NAME=FOLDER", help="as in --parity")
    one.add_argument("--dtype", default="bfloat16")
    one.add_argument("--device", default="cuda")
    one.add_argument("--keep-rounds", action="store_true", help="store the tokens of every round of the walk")

    one = add("layers", layers, servers=False)
    one.add_argument("--records", type=Path, required=True, help="folder of record_sglang.py")
    one.add_argument(
        "--parity", type=Path, required=True, help="output of parity with that server and --num-prompts 1"
    )
    one.add_argument("--target", required=True)
    one.add_argument("--drafter", required=True)
    one.add_argument("--dtype", default="bfloat16")
    one.add_argument("--device", default="cuda")

    one = add("distribution", distribution)
    one.add_argument("--target", required=True, help="its tokenizer is read")
    one.add_argument("--samples", type=int, default=12288, help="of every prompt at every setting")
    one.add_argument("--time-limit", type=float, default=300.0, help="seconds; fewer samples are taken if they end")
    one.add_argument(
        "--first-share", type=float, default=0.65, help="of that time before suspected settings are repeated"
    )
    one.add_argument("--tokens", type=int, default=4, help="of a continuation")
    one.add_argument("--settings", type=setting, nargs="+", default=[(1.0, 1.0), (0.7, 0.9)], metavar="T/TOP_P")
    one.add_argument("--num-prompts", type=int, default=4, help="of four")
    one.add_argument("--rows", type=int, default=8, help="of every prompt and setting in one request")
    one.add_argument("--in-flight", type=int, default=4, help="requests")

    one = add("exact", exact, servers=False)
    one.add_argument(
        "--samples", type=Path, required=True, help="the file *-samples.json.gz beside the output of distribution"
    )
    one.add_argument("--target", required=True)
    one.add_argument("--device", default="cuda")
    one.add_argument("--batch-size", type=int, default=64)
    one.add_argument("--least", type=int, default=200, help="samples of a beginning that is tested")
    one.add_argument("--margin", type=float, default=0.02, help="around top-p, where rounding may decide")

    for name, function in (("rounds", rounds), ("profile", profile)):
        one = add(name, function)
        one.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
        one.add_argument("--prompt-tokens", type=int, default=64)
        one.add_argument("--new-tokens", type=int, default=64 if name == "rounds" else 192)
        one.add_argument("--vocabulary", type=int, default=10000, help="prompts are random token ids below this")
    one.add_argument("--repeats", type=int, default=2, help="traces of each server, there and back again")
    checks.choices["rounds"].add_argument(
        "--repeats", type=int, nargs="+", default=[5], help="comparisons with the second server, the third, ..."
    )
    checks.choices["rounds"].add_argument(
        "--reference-shape",
        type=int,
        nargs=2,
        default=[4096, 151936],
        help="width and vocabulary of the product timed",
    )
    one.add_argument("--steps", type=int, default=16, help="scheduler steps to record")
    one.add_argument("--after", type=float, default=0.5, help="seconds of load before recording")
    one.add_argument("--patience", type=float, default=15.0, help="seconds to wait for a trace")
    args = parser.parse_args(argv)
    if args.check in ("distribution", "rounds") and len(args.server) < 2:
        parser.error(f"{args.check} compares servers with the first one, got {len(args.server)}")
    return args


def main(argv: list[str] | None = None) -> dict:
    args = parse_arguments(argv)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    result = args.function(args)
    result["check"], result["seconds"] = args.check, time.monotonic() - began
    result["command"] = [Path(sys.argv[0]).name, *(sys.argv[1:] if argv is None else argv)]
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
