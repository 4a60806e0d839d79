"""A drafter's accepted length by three routes that must agree (teacher-forced walk, decoding in Transformers, a running server), and
what is wrong when they do not."""

import torch

from dspine.integrations.doctor_findings import Examination
from dspine.integrations.evaluation.decoding import NearTieCheck, decode_alone, decode_with_drafter
from dspine.integrations.evaluation.prompts import Prompt
from dspine.integrations.evaluation.serving import Server
from dspine.integrations.training.masks import PACKED_ATTENTION
from dspine.integrations.training.metrics import walk_row
from dspine.modeling_dspine import DSpineModel, implementation_report, use_implementation
from dspine.modeling_dspine.target_dspine import TapRecorder


# relative difference of pooled accepted lengths that rounding may cause; in float32 there is none
LOW_PRECISION_TOLERANCE = 0.05


def walked_rounds(target, drafter: DSpineModel, prompt: Prompt, answer: list[int]) -> list[int]:
    """Rounds of the teacher-forced walk over one answer: the route that training reports."""
    ids = torch.tensor(prompt.input_ids + answer, device=target.device)
    length, begin = len(ids), len(prompt.input_ids)
    row = {
        "input_ids": ids.to(drafter.device),
        "position_ids": torch.arange(length, device=drafter.device),
        "document_starts": torch.zeros(length, dtype=torch.long, device=drafter.device),
        "loss_mask": torch.arange(length, device=drafter.device) >= begin,
    }
    decoder = target.get_decoder()
    with torch.no_grad(), TapRecorder(drafter.binding.layers, drafter.config.target_layer_ids) as taps:
        decoder(input_ids=ids[None], use_cache=False)
        context = taps.take(drafter.device)
    rounds: dict[int, list[int]] = {}
    # dense masks: a handful of short texts is not worth compiling flex attention for
    before = drafter.config._attn_implementation
    drafter.set_attn_implementation(PACKED_ATTENTION)
    try:
        walk_row(drafter, context, row, [(0, 0, length)], chunk=64, flex=False, rounds=rounds)
    finally:
        drafter.set_attn_implementation(before)
    return rounds.get(0, [])


def pooled(rounds: list[list[int]]) -> float:
    return sum(map(sum, rounds)) / max(sum(map(len, rounds)), 1)


def compare_routes(found: Examination, target, drafter, prompts, max_new_tokens: int) -> list[list[int]]:
    """Walk against decoding on the target's own greedy answers; returns the answers."""
    answers = [decode_alone(target, [prompt], max_new_tokens)[0].output_ids for prompt in prompts]
    walked = [walked_rounds(target, drafter, prompt, answer) for prompt, answer in zip(prompts, answers)]
    decoded = [decode_with_drafter(target, drafter, [prompt], max_new_tokens)[0] for prompt in prompts]
    lengths = [answer.accepted_lengths for answer in decoded]
    found.rounds |= {"walk": walked, "decoding": lengths}
    if not any(lengths):
        found.add(
            "routes",
            "failure",
            "every answer ended with its first token, so nothing could be measured; use other prompts (--prompts)",
        )
        return answers
    found.accepted_lengths |= {"walk": pooled(walked), "decoding": pooled(lengths)}
    is_precise = target.dtype == torch.float32
    check = NearTieCheck(target)
    ties = [check(p.input_ids, a, d.output_ids) for p, a, d in zip(prompts, answers, decoded)]
    faults = [i for i, tie in enumerate(ties) if tie.get("fault")]
    if faults:
        tie = ties[faults[0]]
        gap = "ends elsewhere" if tie["gap"] is None else f"prefers the other token by {tie['gap']:.2f} logits in fp32"
        found.add(
            "text",
            "failure",
            f"with the drafter, greedy text {faults[0] + 1} leaves the target's own at token {tie['at'] + 1}, where the target {gap}: "
            "verification is not exact here",
        )
    else:
        equal = sum(tie["equal"] for tie in ties)
        found.add(
            "text",
            "ok",
            f"{equal} of {len(ties)} greedy texts are the target's token for token"
            + (", the others part at near-ties" if equal < len(ties) else ""),
        )
    # a text that parted at a near-tie is another text: its rounds cannot be compared
    same = [i for i, tie in enumerate(ties) if tie["equal"]]
    differ = [i for i in same if walked[i] != lengths[i]]
    tau = found.accepted_lengths
    if not differ:
        found.add(
            "routes",
            "ok",
            f"walk and decoding agree in every round: {tau['decoding']:.3f} tokens a round over {sum(map(len, lengths))} rounds",
        )
        return answers
    ours = pooled([walked[i] for i in same]), pooled([lengths[i] for i in same])
    apart = abs(ours[0] - ours[1]) / ours[1]
    if not is_precise and apart <= LOW_PRECISION_TOLERANCE:
        found.add(
            "routes",
            "ok",
            f"walk {ours[0]:.3f} and decoding {ours[1]:.3f} agree within {LOW_PRECISION_TOLERANCE:.0%}, as rounding in {target.dtype} allows",
        )
        return answers
    first = differ[0]
    at = next(
        (i for i, (a, b) in enumerate(zip(walked[first], lengths[first])) if a != b),
        min(len(walked[first]), len(lengths[first])),
    )
    here = [row[at] if at < len(row) else "none" for row in (walked[first], lengths[first])]
    found.add(
        "routes",
        "failure",
        f"the walk gives {ours[0]:.3f} tokens a round and decoding {ours[1]:.3f}; they part in round {at + 1} of prompt {first + 1} ({here[0]} "
        f"tokens in the walk, {here[1]} in decoding). {explain(target, drafter, prompts[first], walked[first], max_new_tokens)}",
    )
    return answers


def explain(target, drafter, prompt, walked: list[int], max_new_tokens: int) -> str:
    """Which part of decoding makes it leave the walk, found by exchanging parts: one or two sentences."""
    active = {op: part["active"] for op, part in implementation_report().items()}
    with use_implementation("reference"):
        again = decode_with_drafter(target, drafter, [prompt], max_new_tokens)[0].accepted_lengths
    if again == walked:
        active = {op: name for op, name in active.items() if name not in (None, "reference")}
        return f"With reference operations they agree, so one of these is wrong here: {active}; set DSPINE_IMPL=reference until it is mended."
    before = drafter.config._attn_implementation
    drafter.set_attn_implementation("eager")
    try:
        again = decode_with_drafter(target, drafter, [prompt], max_new_tokens)[0].accepted_lengths
    finally:
        drafter.set_attn_implementation(before)
    if again == walked:
        return f"With eager attention they agree, so the drafter's attention {before!r} mishandles the cache or the mask here."
    return (
        "Neither the reference operations nor eager attention cure it: the drafter sees other states in decoding than in training (taps of "
        "other layers, other positions, or a cache that keeps rejected tokens)."
    )


def compare_server(found: Examination, server: Server, config, target, prompts, answers, max_new_tokens: int) -> None:
    """Decoding in Transformers against a running server, whose texts may part at near-ties."""
    info = server.info()
    width = info.get("speculative_num_draft_tokens")
    if width and int(width) != config.block_size:
        found.add(
            "server",
            "failure",
            f"the server drafts blocks of {width}, the drafter was trained with {config.block_size}",
        )
    served = [server.generate(prompt.input_ids, max_new_tokens) for prompt in prompts]
    if not any(answer.rounds for answer in served):
        found.add(
            "server",
            "failure",
            "the server reports no verification passes: it was started without a drafter (--speculative-algorithm and "
            "--speculative-draft-model-path), or is no SGLang",
        )
        return
    # the token of the prefill belongs to no round
    tokens = sum(answer.new_tokens - 1 for answer in served if answer.rounds)
    tau = tokens / sum(answer.rounds for answer in served if answer.rounds)
    found.accepted_lengths["server"] = tau
    check = NearTieCheck(target, 0.5)  # the server runs in low precision whatever the target here does
    pairs = [(p, a, s) for p, a, s in zip(prompts, answers, served) if s.output_ids]
    ties = [check(p.input_ids, a, s.output_ids) for p, a, s in pairs]
    faults = [i for i, tie in enumerate(ties) if tie.get("fault")]
    if faults:
        tie = ties[faults[0]]
        gap = "one text ends early" if tie["gap"] is None else f"a gap of {tie['gap']:.2f} logits in fp32"
        found.add(
            "server text",
            "failure",
            f"text {faults[0] + 1} of the server leaves the target's own at token {tie['at'] + 1} at no near-tie ({gap})",
        )
    elif ties:
        found.add(
            "server text",
            "ok",
            f"{sum(tie['equal'] for tie in ties)} of {len(ties)} texts equal the target's, the others part at near-ties",
        )
    here = found.accepted_lengths.get("decoding")
    if here is None:
        return
    apart = (tau - here) / here
    if abs(apart) <= 2 * LOW_PRECISION_TOLERANCE:
        found.add("server", "ok", f"{tau:.3f} tokens a round in the server, {here:.3f} in Transformers")
    elif tau < 1.1 and here > 1.3:
        found.add(
            "server",
            "failure",
            f"the server accepts almost no drafts ({tau:.3f} tokens a round, {here:.3f} in Transformers): it taps other layers (off by one), "
            "rotates positions otherwise, or left out tensors of the drafter in silence",
        )
    else:
        found.add(
            "server",
            "failure",
            f"the server commits {tau:.3f} tokens a round, Transformers {here:.3f} ({apart:+.0%}): it runs another drafter or block size, "
            "without refinement, or with a transfer table of another target",
        )


__all__ = ["compare_routes", "compare_server", "explain", "pooled", "walked_rounds"]
