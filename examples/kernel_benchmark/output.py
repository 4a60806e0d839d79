"""A report's figures as text and as a plot."""

from pathlib import Path


def print_table(report):
    ceilings = report.get("ceilings")
    if ceilings:
        copy, matmul = ceilings["copy_bytes_per_s"] / 1e12, ceilings["matmul_flops_per_s"] / 1e12
        print(f"\n{report['device']}: copy {copy:.2f} TB/s, matmul {matmul:.0f} TFLOP/s")
    print("seconds of first calls:", {name: round(value, 2) for name, value in report.get("first_call", {}).items()})
    for N, out in report["serving"].items():
        us = {name: value for name, value in out.get("us", {}).items() if value is not None}
        if "injections_in_draft" not in us:
            continue
        print(f"\nbatch {N}: draft pass {us['draft']:.1f} us; agreement {out['agreement']}")
        print(
            f"  five injections {us['injections_in_draft']:.1f} us = {out['injections_share']:.2%} (goal 3 %)",
            end="; ",
        )
        print(f"tail {us['tail']:.1f} us = {out['tail_share']:.2%} (goal 100 us at batch 1, 5 % at 64)")
        for name in (
            "draft_with_injections",
            "draft_with_injections_without_dependent_launch",
        ):
            print(f"  {name}: {us[name]:.1f}", end="")
        print("\n  " + ", ".join(f"{name} {value:.1f}" for name, value in us.items() if not name.startswith("draft")))
        for name, floor in out.get("floors", {}).items():
            print(
                f"  {name:22s} {floor['us']:8.1f} us, {floor['times_floor']:5.1f}x floor ({floor['memory_floor_us']:.1f} memory,"
                f" {floor['arithmetic_floor_us']:.1f} arithmetic), {floor['achieved_TB_per_s']:.2f} TB/s, {floor['achieved_TFLOP_per_s']:.0f} TFLOP/s"
            )
    if "training" in report:
        training = report["training"]
        print(
            f"\ntraining, {training['slots']} slots:", {name: round(value) for name, value in training["us"].items()}
        )
        for name in ("forward", "backward"):
            floor = training[name]
            print(
                f"  {name}: {floor['us']:.0f} us, memory floor {floor['memory_floor_us']:.0f}, arithmetic floor {floor['arithmetic_floor_us']:.0f}"
            )
        print("  kernels:", {name[:48]: round(value) for name, value in training.get("kernels_us", {}).items()})
    for N, out in report.get("rounds", {}).items():
        print(
            f"round at batch {N}: DFlash {out['us']['dflash']:.0f} us, DSpine {out['us']['dspine']:.0f} us: {out['extra']:+.2%} (goal +1.5 %)"
        )
    print("errors:", {name: text.strip().splitlines()[-1][:200] for name, text in report["errors"].items()} or "none")
    print("seconds:", {name: round(value) for name, value in report["section_s"].items()})


def plot(report, path: Path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    batches = [N for N, out in report["serving"].items() if "injections_share" in out]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5))
    for axis, (name, goal, title) in zip(
        axes, (("injections", 3, "five injections"), ("tail", 5, "choice of tokens"))
    ):
        axis.bar(batches, [100 * report["serving"][N][f"{name}_share"] for N in batches], color="#4C72B0", width=0.5)
        axis.axhline(goal, color="#C44E52", linestyle="--", linewidth=1, label=f"goal {goal} %")
        axis.set_title(title)
        axis.set_xlabel("batch")
        axis.set_ylabel("% of the draft pass")
        axis.legend()
    figure.suptitle(f"DSpine's own operations, {report['device']}")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
