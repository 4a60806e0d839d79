"""Trains one drafter for every row of an ablation table, with one recipe, data, steps and seed, and writes the table.

    python examples/ablations.py --target PATH --data 'answers/*.parquet' --eval-data greedy=bench_greedy.parquet t1=bench_t1.parquet \
        --out out/ablations --steps 2400 --gpus 0 1 --time-limit 1500
    python examples/ablations.py --list

Every row is `examples/train.py` with the base recipe and a few other arguments, in a process of its own: `--parallel` of them at a time
on each GPU. Finished rows are skipped and rows that the time limit cut are resumed when the same command runs again. The number of
candidates K and the guidance matter in decoding alone: their rows evaluate the default's drafter (`tune_decoding.py`).

`OUT/ablations.json` holds the figures, `OUT/ablations.md` the table, `OUT/ROW/log.txt` what a row printed. A row counts as converged if
its last two evaluations of the first evaluation set differ by less than `--tolerance`; the schedule ends at a learning rate of zero in
every row, so this says that training was still or no longer gaining at its end, not that a longer schedule would gain nothing.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path


HERE = Path(__file__).resolve().parent
COSINE = ["--supervision", "cosine", "--supervision_weight", "0.5"]
UNREFINED = ["--refinement", "false", "--refinement_guidance", "0"]
DFLASH = ["--injection", "false", *UNREFINED]
# the drafts' cross-entropy in place of the distance to the target's distribution
HARD = ["--distance", "none", "--refined_weight", "1"]
ROWS = {
    "dspine": ("DSpine as in the recipe", []),
    "dflash": ("DFlash: no injection, no refinement", DFLASH),
    "no-kl": ("cross-entropy of drafts in place of KL to the target's distribution", HARD),
    "dflash-no-kl": ("DFlash, cross-entropy of drafts", [*DFLASH, *HARD]),
    "refinement-only": ("no injection", ["--injection", "false"]),
    "injection-only": ("no refinement", UNREFINED),
    "frozen-space": ("transfer space frozen", ["--transfer_learned", "false"]),
    "cosine": ("cosine supervision, stop-gradient on a learned table", COSINE),
    "cosine-frozen": ("cosine supervision, frozen space", [*COSINE, "--transfer_learned", "false"]),
    "cross-entropy": (
        "cross-entropy supervision over the table",
        ["--supervision", "cross_entropy", "--supervision_weight", "0.1"],
    ),
    "rank-64": ("r = 64", ["--transfer_rank", "64"]),
    "rank-128": ("r = 128", ["--transfer_rank", "128"]),
    "rank-512": ("r = 512", ["--transfer_rank", "512"]),
    "soft-tokens": ("soft-token features", ["--soft_token_features", "true"]),
    "base-weight": ("weight of the base cross-entropy 0.2", ["--base_weight", "0.2"]),
    "gamma": ("weights of slots decay with gamma 7", ["--decay_gamma", "7"]),
    "dpace": ("D-PACE weights of slots", ["--slot_weighting", "dpace"]),
    "target-layers": ("starts from the target's last layers", ["--init_from_target_layers", "-1"]),
}
BASELINE = "dspine"
DECODING = "decoding.json"


def read_json(path: Path) -> dict | None:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def finished(folder: Path, steps: int) -> bool:
    report = read_json(folder / "metrics.json")
    return report is not None and report["steps"] >= steps


def train_command(name: str, args, seconds: float) -> list[str]:
    """The command of a row; it saves a checkpoint when `seconds` are over and continues from one if there is any."""
    evaluations = max(1, args.steps // args.evaluations)
    return [
        *(sys.executable, str(HERE / "train.py"), args.recipe, "--target", args.target, "--data", *args.data),
        *(["--eval_data", *args.eval_data] if args.eval_data else []),
        *("--output_dir", str(Path(args.out) / name), "--name", name, "--max_steps", str(args.steps)),
        *("--eval_strategy", "steps" if args.eval_data else "no", "--eval_steps", str(evaluations)),
        *("--save_strategy", "steps", "--save_steps", str(10 * args.steps), "--save_total_limit", "1"),
        *("--resume", "true", "--time_limit", str(round(seconds)), "--disable_tqdm", "true", "--seed", str(args.seed)),
        *args.train_args,
        *ROWS[name][1],
    ]


def decoding_command(args) -> list[str]:
    """Walks the default's drafter with other decoding settings, over the texts and batches of its training's evaluation."""
    data = read_json(Path(args.out) / BASELINE / "metrics.json")["arguments"]["data"]
    documents = data["eval_documents"]
    return [
        *(sys.executable, str(HERE / "tune_decoding.py"), "--target", args.target),
        *("--drafter", str(Path(args.out) / BASELINE), "--out", str(Path(args.out) / DECODING)),
        *("--eval-data", *args.eval_data, *([] if documents is None else ["--eval-documents", str(documents)])),
        *("--tokens-per-batch", str(data["tokens_per_batch"]), "--max-anchors", str(data["max_anchors"])),
        *("--candidates", *map(str, args.candidates), "--guidances", *map(str, args.guidances)),
    ]


def run_rows(names: list[str], args, deadline: float) -> None:
    """Runs rows on all GPUs until none is left or too little time is."""
    waiting, lock = list(names), threading.Lock()

    def work(gpu: str) -> None:
        while True:
            with lock:
                left = deadline - time.monotonic()
                if not waiting or left < args.row_minimum:
                    return
                name = waiting.pop(0)
            folder = Path(args.out) / name
            folder.mkdir(parents=True, exist_ok=True)
            if finished(folder, args.steps):
                print(f"{name}: finished before", flush=True)
            else:
                # the row evaluates and saves after its own limit, in the time kept back here
                command = train_command(name, args, left - args.margin)
                code, seconds = run(command, folder / "log.txt", gpu, left)
                print(f"{name}: exit {code} after {seconds:.0f} s on GPU {gpu or 'none'}", flush=True)
                if finished(folder, args.steps):
                    for checkpoint in folder.glob("checkpoint-*"):
                        shutil.rmtree(checkpoint)
            if name == BASELINE:
                run_decoding(args, gpu, deadline)

    lanes = [threading.Thread(target=work, args=(gpu,)) for gpu in args.gpus * args.parallel]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()


def run_decoding(args, gpu: str, deadline: float) -> None:
    """Evaluates the default's drafter with every decoding setting, unless that was done since it was trained."""
    done, trained = Path(args.out) / DECODING, Path(args.out) / BASELINE / "metrics.json"
    wanted = {f"candidates-{count}" for count in args.candidates} | {f"guidance-{value:g}" for value in args.guidances}
    if not wanted or not args.eval_data or not trained.exists():
        return
    if done.exists() and done.stat().st_mtime > trained.stat().st_mtime and wanted <= set(read_json(done) or {}):
        return
    code, seconds = run(decoding_command(args), Path(args.out) / "decoding.txt", gpu, deadline - time.monotonic())
    print(f"decoding settings: exit {code} after {seconds:.0f} s", flush=True)


def run(command: list[str], log: Path, gpu: str, seconds: float) -> tuple[int, float]:
    """Exit code and time of a process; it is ended after `seconds`."""
    started = time.monotonic()
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
    with log.open("a") as output:
        output.write(f"$ {' '.join(command)}\n")
        output.flush()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            code = process.wait(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                code = process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
    return code, time.monotonic() - started


# ---- the table ------------------------------------------------------------------------------------------------------------------


def sets_of(evaluation: dict) -> list[str]:
    return [
        k.removeprefix("eval_").removesuffix("_accepted_length") for k in evaluation if k.endswith("_accepted_length")
    ]


def summarise(name: str, folder: Path, args) -> dict | None:
    """What a row's `metrics.json` says, None if there is none."""
    report = read_json(folder / "metrics.json")
    if report is None:
        return None
    log, packing, evaluation = report["log"], report["packing"], report["evaluation"]
    trained = [entry for entry in log if "loss" in entry]
    first = next(iter(sets_of(evaluation)), None)
    key = f"eval_{first}_accepted_length"
    curve = {entry["step"]: entry[key] for entry in log if key in entry}
    values = list(curve.values())
    # the end is evaluated twice: by the schedule and after saving
    gain = values[-1] / values[-2] - 1 if len(values) > 1 else None
    whole = report["steps"] >= report["max_steps"]
    return {
        "what": ROWS[name][0],
        "overrides": ROWS[name][1],
        "steps": report["steps"],
        "max_steps": report["max_steps"],
        "seconds": report["train_seconds"],
        "tokens_seen": round(report["steps"] * packing["tokens"] / packing["rows"]),
        "passes": round(report["steps"] / packing["rows"], 2),
        "parameters": report["drafter_parameters"],
        "losses": {k: v for k, v in trained[-1].items() if k.startswith("loss")} if trained else {},
        "evaluation": {k: v for k, v in evaluation.items() if k.startswith("eval_")},
        "curve": {first: curve} if first else {},
        "last_gain": gain,
        "converged": bool(whole and gain is not None and abs(gain) < args.tolerance),
    }


def table(rows: dict[str, dict]) -> str:
    """The rows as Markdown; the gain is over `dflash` where it was trained."""
    sets = sets_of(next(iter(rows.values()))["evaluation"]) if rows else []
    first = sets[0] if sets else None
    head = ["row", "what", *(f"{name} {kind}" for name in sets for kind in ("pooled", "per request"))]
    head += ["over DFlash", "slots 1 2 3 4", "loss", "steps", "tokens", "converged"]
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join(["---"] * len(head)) + " |"]
    reference = rows.get("dflash", {}).get("evaluation", {}).get(f"eval_{first}_accepted_length")
    for name, row in rows.items():
        values, cells = row["evaluation"], [name, row["what"]]
        for part in sets:
            for key in ("accepted_length", "accepted_length_per_request"):
                value = values.get(f"eval_{part}_{key}")
                cells.append("" if value is None else f"{value:.3f}")
        own = values.get(f"eval_{first}_accepted_length")
        cells.append(f"{own / reference - 1:+.1%}" if own and reference else "")
        slots = [values.get(f"eval_{first}_slot_{k}_acceptance") for k in range(1, 5)]
        cells.append(" ".join(f"{value:.2f}" for value in slots if value is not None))
        loss = row.get("losses", {}).get("loss_refined", row.get("losses", {}).get("loss_base"))
        cells.append("" if loss is None else f"{loss:.3f}")
        cells.append(f"{row['steps']:,}" if "steps" in row else "")
        cells.append(f"{row['tokens_seen'] / 1e6:.1f}M" if "tokens_seen" in row else "")
        change = row.get("last_gain")
        state = "yes" if row.get("converged") else "no"
        cells.append("" if "steps" not in row else state if change is None else f"{state} ({change:+.1%})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def collect(args) -> dict:
    """Writes `ablations.json` and `ablations.md` from what is there."""
    out = Path(args.out)
    rows = {name: summarise(name, out / name, args) for name in ROWS}
    rows = {name: row for name, row in rows.items() if row is not None}
    for name, evaluation in (read_json(out / DECODING) or {}).items():
        kind, _, value = name.partition("-")
        what = {"candidates": "K", "guidance": "guidance"}[kind]
        rows[name] = {"what": f"{what} = {value} in decoding", "evaluation": evaluation}
    settings = {k: getattr(args, k) for k in ("steps", "seed", "train_args", "tolerance")}
    # where the files lay on one machine says nothing on another
    settings["recipe"] = Path(args.recipe).name
    settings["data"] = [Path(path).name for path in args.data]
    settings["eval_data"] = [
        f"{name}={Path(path).name}" for name, _, path in (e.rpartition("=") for e in args.eval_data)
    ]
    report = {"settings": settings, "rows": rows}
    (out / "ablations.json").write_text(json.dumps(report, indent=1))
    (out / "ablations.md").write_text(table(rows))
    return report


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--data", nargs="+", default=[])
    parser.add_argument("--eval-data", nargs="+", default=[], help="name=file; the first judges convergence")
    parser.add_argument("--out")
    parser.add_argument("--recipe", default=str(HERE / "recipes" / "smollm2-135m-dspine.yaml"))
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluations", type=int, default=4, help="in the course of a row")
    parser.add_argument("--candidates", type=int, nargs="*", default=[4, 8, 16, 32])
    parser.add_argument("--guidances", type=float, nargs="*", default=[0.1, 0.25, 0.5])
    parser.add_argument("--gpus", nargs="+", default=["0"], help="'' runs on whatever is visible")
    parser.add_argument("--parallel", type=int, default=1, help="rows at a time on each GPU")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds for everything")
    parser.add_argument("--margin", type=float, default=45, help="seconds in which a cut row evaluates and saves")
    parser.add_argument("--row-minimum", type=float, default=120, help="seconds that must be left to begin a row")
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument(
        "--train-args", action="append", default=[], help="one more word for train.py: --train-args=WORD"
    )
    parser.add_argument("--list", action="store_true", help="print the rows and stop")
    args = parser.parse_args(argv)
    if args.list:
        for name, (what, overrides) in ROWS.items():
            print(f"{name:<16} {what:<52} {' '.join(overrides)}")
        return {}
    if args.target is None or args.out is None:
        parser.error("--target and --out must be given")
    Path(args.out).mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + min(args.time_limit, 10 * 365 * 86400)
    try:
        run_rows(args.rows, args, deadline)
    finally:
        report = collect(args)
    print((Path(args.out) / "ablations.md").read_text())
    return report


if __name__ == "__main__":
    main()
