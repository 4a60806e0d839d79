"""A whole round, draft and verification, with DSpine's operations and without."""

from kernel_benchmark.draft_pass import Backbone, kernel_operations
from kernel_benchmark.timing import graph_times


def measure_rounds(report, shape, args, drafter):
    """Draft pass, choice of tokens and verification of 16 tokens a row by a target of the drafter's layers."""
    ops = kernel_operations()
    verifier = Backbone(shape, shape.verifier_layers, drafter.backbone.head)
    verifier.run_layer = drafter.backbone.run_layer

    def verify():
        x = drafter.x
        for weights, cache in zip(verifier.layers, verifier.caches):
            x = verifier.run_layer(x, cache, *weights)
        return verifier.logits(x).argmax(-1)

    def dflash():
        drafter.draft()[2].argmax(-1)
        verify()

    def dspine():
        drafter.tail(ops, *drafter.draft(ops.gated_adjacent_injection))
        verify()

    report["rounds"] = {}
    for N in [n for n in args.batches if n <= 8]:
        drafter.set_batch(N)
        verifier.set_batch(N)
        us = graph_times({"dflash": dflash, "dspine": dspine}, rounds=15, target_ms=20)
        report["rounds"][str(N)] = {"us": us, "extra": us["dspine"] / us["dflash"] - 1}
