"""Times training steps on one GPU and says where the time goes.

    python examples/profile_training.py --out profile.json                       # SmolLM2-135M shape, 1,536 blocks of 16 slots
    python examples/profile_training.py --drafters dspine dspine-kl dflash        # what KL to the target's distribution costs
    python examples/profile_training.py --sections qwen3-8b --drafters dspine speculators dflash --target-layers 0 --out profile.json

Weights and tokens are random: times do not depend on them. Measured are, apart from each other,

* the drafter's step: forward pass, loss, backward pass, clipping and optimizer, on taps that are already there;
* the target's pass, with `--target-layers` layers of the real width;
* whole steps of `DSpineTrainer` with its data loader (`--trainer-steps`), and how long the GPU is busy in them.

`dspine-kl`, `dspine-tv` and `dflash-kl` learn from the target's distribution: the distance takes the place of the drafts'
cross-entropy. `--drafters speculators` times the DFlash model, loss and optimizer of `speculators` 0.9.0 on the same shapes: fp32 weights under bf16 autocast,
its compiled forward pass and its fused KL loss, as its trainer runs them, the loss outside of the compiled graph (PyTorch 2.11 cannot trace it). It learns from the target's distribution, so its step
includes the product that makes the target's logits of all slots. Its first step takes long, since it also tries some twenty tilings
of each loss kernel.

Parts run in the order given. A part that fails, or runs past `--part-limit`, is recorded as `error` with the figures it has reached,
and the others go on; `--out` is written after every figure, so that a run that is ended from outside leaves all it had.
"""

import argparse
import gc
import json
from pathlib import Path

import torch
from training_profile.limits import attempt
from training_profile.parts import time_step, time_target, time_trainer
from training_profile.shapes import SHAPES, Shape


DRAFTERS = ["dspine", "dspine-kl", "dspine-tv", "dflash", "dflash-kl", "speculators"]


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", default=["smollm2-135m"], choices=list(SHAPES))
    parser.add_argument("--drafters", nargs="+", default=["dspine"], choices=DRAFTERS)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--cross-entropy", default="auto", choices=["auto", "liger"])
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--table", type=int, default=25, help="kernels in the profile; 0: no profile")
    parser.add_argument("--target-layers", type=int, default=36, help="layers of the target timed apart; 0: none")
    parser.add_argument(
        "--trainer-steps", type=int, default=0, help="whole steps of the trainer that are timed; 0: none"
    )
    parser.add_argument("--part-limit", type=float, default=0, help="seconds for every part; 0: none")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out")
    args = parser.parse_args(argv)
    report = {"torch": torch.__version__, "device": args.device, "compiled": args.compile, "sections": {}}
    if args.device.startswith("cuda"):
        report["gpu"] = torch.cuda.get_device_name()

    def save():
        if args.out:
            written = Path(f"{args.out}.tmp")
            written.write_text(json.dumps(report, indent=1))
            written.replace(args.out)  # never half a file

    for name in args.sections:
        shape = Shape(name, args)
        result = {"tokens": shape.dataset.length, "anchors": shape.anchors, "block_size": args.block_size}
        report["sections"][name] = result
        parts = [(kind, time_step, (kind, shape, args)) for kind in args.drafters]
        if args.target_layers:
            parts.append(("target", time_target, (shape, args)))
        if args.trainer_steps:
            parts += [
                (f"trainer_{kind}", time_trainer, (kind, shape, args))
                for kind in args.drafters
                if kind != "speculators"
            ]
        for part, function, arguments in parts:
            result[part] = {}
            attempt(function, result[part], save, args.part_limit, *arguments)
            torch.compiler.reset()
            gc.collect()
            shown = {k: v for k, v in result[part].items() if k != "kernels"}
            print(name, part, json.dumps(shown, indent=1), flush=True)
            for kernel in result[part].get("kernels", ())[:12]:
                print(f"  {kernel['ms_per_step']:8.3f} ms {kernel['calls_per_step']:6.1f} x {kernel['name'][:90]}")
    return report


if __name__ == "__main__":
    main()
