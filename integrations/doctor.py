"""Does this drafter fit this target, and does it draft as well as it should?

    python -m dspine.integrations.doctor TARGET DRAFTER [--prompts FILE] [--server http://127.0.0.1:30000]

Checks what a drafter silently loses acceptance over (layers, width, vocabulary, mask id, chat template, thinking, RoPE, dtype,
weights, transfer table), then measures its accepted length in up to three ways that must agree: the teacher-forced walk that
training reports, decoding in Transformers, and decoding in a running SGLang server. The exit code is 0 if nothing failed, 1 if
something did, 2 if the command itself was wrong.

Walk and decoding use the same answers, generated greedily by the target; in float32 their rounds must be identical. In lower
precision a block and a single token run through different kernels, so a few rounds may differ where two tokens are nearly tied.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import cached_file

from dspine.integrations.evaluation.decoding import NearTieCheck, decode_alone, decode_with_drafter, end_token_ids
from dspine.integrations.evaluation.prompts import Prompt, read_turns, render
from dspine.integrations.evaluation.serving import Server
from dspine.integrations.training.masks import PACKED_ATTENTION
from dspine.integrations.training.metrics import walk_row
from dspine.modeling_dspine import DSpineConfig, DSpineModel, implementation_report, use_implementation
from dspine.modeling_dspine.target_dspine import TapRecorder, plain_weight, transfer_table


PROMPTS = (
    "Natalia sold clips to 48 of her friends in April, and half as many in May. How many did she sell in all? Reason step by step.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Why is the sky blue? Answer in three sentences.",
    "List five capitals of Europe with one sight each.",
    "Translate into French: The train leaves at nine, so we should be at the station by half past eight.",
    "Solve for x: 3x + 7 = 2x + 19. Show every step.",
)

# relative difference of pooled accepted lengths that rounding may cause; in float32 there is none
LOW_PRECISION_TOLERANCE = 0.05


@dataclass
class Finding:
    """One check: `level` is "ok", "note" (worth knowing), "warning" (may cost acceptance) or "failure"."""

    check: str
    level: str
    message: str


@dataclass
class Examination:
    """All findings, and the accepted lengths measured by each route."""

    findings: list[Finding] = field(default_factory=list)
    accepted_lengths: dict[str, float] = field(default_factory=dict)
    rounds: dict[str, list[list[int]]] = field(default_factory=dict)

    def add(self, check: str, level: str, message: str) -> None:
        self.findings.append(Finding(check, level, message))

    @property
    def failed(self) -> bool:
        return any(finding.level == "failure" for finding in self.findings)

    def levels(self) -> dict[str, str]:
        """The worst level of every check."""
        order = ("ok", "note", "warning", "failure")
        result: dict[str, str] = {}
        for finding in self.findings:
            result[finding.check] = max(result.get(finding.check, "ok"), finding.level, key=order.index)
        return result


# ---- the pairing ----------------------------------------------------------------------------------------------------------------


def read_config(source: str) -> tuple[DSpineConfig, bool]:
    """The drafter's configuration, and whether it is a DFlash checkpoint (then with DSpine's parts switched off)."""
    raw = json.loads(Path(cached_file(source, "config.json")).read_text())
    if raw.get("model_type") == DSpineConfig.model_type:
        return DSpineConfig.from_pretrained(source), False
    return DSpineConfig.from_dflash(raw, injection=False, refinement=False), True


def load_drafter(source: str, dtype: torch.dtype, is_dflash: bool) -> DSpineModel:
    """The drafter, strictly loaded; see `DSpineModel.from_pretrained` for what is raised."""
    if is_dflash:
        off = {"injection": False, "refinement": False}
        return DSpineModel.from_dflash(source, dtype=dtype, config_overrides=off).eval()
    return DSpineModel.from_pretrained(source, dtype=dtype).eval()


def check_shapes(found: Examination, config: DSpineConfig, target) -> None:
    """Layers, width, vocabulary and taps: anything wrong here makes the pair impossible."""
    text = target.config.get_text_config()
    pairs = {
        "layers": ("num_target_layers", config.num_target_layers, text.num_hidden_layers),
        "hidden size": ("hidden_size", config.hidden_size, text.hidden_size),
        "vocabulary": ("vocab_size", config.vocab_size, text.vocab_size),
    }
    for check, (name, wanted, got) in pairs.items():
        if wanted == got:
            found.add(check, "ok", f"{name} is {got} on both sides")
        else:
            found.add(check, "failure", f"the drafter was made for a target with {name}={wanted}, this one has {got}")
    taps, last = config.target_layer_ids, text.num_hidden_layers - 1
    if max(taps) >= last:
        found.add(
            "taps",
            "failure",
            f"target_layer_ids {taps} must stay below the target's last layer ({last}), whose output is reported after the final norm",
        )
    else:
        found.add("taps", "ok", f"outputs of target layers {taps} (zero-based) feed the drafter")
    if config.target_model_type and config.target_model_type != text.model_type:
        found.add(
            "target",
            "warning",
            f"the drafter was trained for a {config.target_model_type!r}, this is a {text.model_type!r}",
        )


def check_mask(found: Examination, config: DSpineConfig, target, tokenizer) -> None:
    """The mask id must be a row of the embedding that means nothing else."""
    mask, rows = config.mask_token_id, plain_weight(target.get_input_embeddings())
    if mask is None:
        found.add("mask id", "failure", "mask_token_id is not set in the drafter's configuration")
        return
    if rows is not None and mask >= rows.shape[0]:
        found.add(
            "mask id",
            "failure",
            f"mask_token_id {mask} is no row of the target's embedding (0 to {rows.shape[0] - 1})",
        )
        return
    text = target.config.get_text_config()
    taken = {"pad": text.pad_token_id, "bos": text.bos_token_id}
    same = [name for name, token in taken.items() if token == mask] + ["end"] * (mask in end_token_ids(target))
    if same:
        found.add(
            "mask id",
            "warning",
            f"mask_token_id {mask} is also the {same[0]} token, whose embedding already means something; a reserved token drafts better",
        )
        return
    if tokenizer is not None and mask < len(tokenizer):
        word = tokenizer.convert_ids_to_tokens(mask)
        if (
            word in tokenizer.get_vocab()
            and mask not in tokenizer.all_special_ids
            and mask not in tokenizer.added_tokens_decoder
        ):
            found.add(
                "mask id", "warning", f"mask_token_id {mask} is the ordinary token {word!r}, which may occur in texts"
            )
            return
        found.add("mask id", "ok", f"mask_token_id {mask} is the reserved token {word!r}")
        return
    found.add("mask id", "ok", f"mask_token_id {mask} is a row of the embedding")


def check_template(found: Examination, config: DSpineConfig, tokenizer, thinking: bool | None) -> None:
    """Template and thinking mode must be those of training."""
    digest = DSpineConfig.chat_template_hash(getattr(tokenizer, "chat_template", None))
    recorded = config.target_chat_template_hash
    if recorded is None:
        found.add("chat template", "note", "the drafter does not record the chat template of its training")
    elif digest is None:
        found.add("chat template", "warning", f"the target's tokenizer has no chat template; training used {recorded}")
    elif digest != recorded:
        found.add(
            "chat template",
            "failure",
            f"the tokenizer's chat template ({digest}) is not the one of training ({recorded}), so every prompt looks unfamiliar to the "
            "drafter; use the tokenizer of training",
        )
    else:
        found.add("chat template", "ok", f"the template is the one of training ({digest})")
    words = {True: "on", False: "off", None: "left to the template"}
    has_switch = "enable_thinking" in str(getattr(tokenizer, "chat_template", None) or "")
    if config.target_thinking is None:
        level = "note" if not has_switch else "warning"
        found.add("thinking", level, "the drafter does not record whether it was trained on answers with thinking on")
    elif thinking is not None and thinking != config.target_thinking and (has_switch or config.target_thinking):
        found.add(
            "thinking",
            "failure",
            f"the drafter was trained with thinking {words[config.target_thinking]}, this examination has it {words[thinking]} "
            "(--thinking); a drafter is accepted far less often in the other mode",
        )
    else:
        found.add("thinking", "ok", f"thinking is {words[thinking]}, as in training")


def _same(a, b) -> bool:
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return abs(a - b) <= 1e-6 * max(abs(a), abs(b), 1e-12)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b


def check_rope(found: Examination, config: DSpineConfig, target) -> None:
    """RoPE and the scales between embeddings, states and logits must be what follows from the target."""
    try:
        expected = DSpineConfig.from_target(
            target.config, mask_token_id=0, block_size=config.block_size, num_hidden_layers=config.num_hidden_layers
        )
    except (ValueError, TypeError) as error:
        found.add("RoPE", "failure", f"no drafter can be made for this target: {error}")
        return
    ours, theirs = dict(config.rope_parameters or {}), dict(expected.rope_parameters)
    differ = [
        f"{name} is {ours.get(name)!r} in the drafter and {theirs.get(name)!r} in the target"
        for name in sorted({*ours, *theirs})
        if not _same(ours.get(name), theirs.get(name))
        and not (name == "partial_rotary_factor" and ours.get(name, 1) == 1)
    ]
    if differ:
        found.add("RoPE", "failure", f"{'; '.join(differ)}: positions look different to the drafter than they are")
    else:
        found.add(
            "RoPE", "ok", f"{ours.get('rope_type', 'default')}, theta {ours.get('rope_theta'):g}, as the target's"
        )
    for name in ("input_embedding_scale", "output_multiplier", "final_logit_softcapping"):
        if not _same(getattr(config, name), getattr(expected, name)):
            found.add(
                "scales",
                "failure",
                f"{name} is {getattr(config, name)!r} in the drafter, {getattr(expected, name)!r} follows from the target",
            )
    if config.max_position_embeddings < expected.max_position_embeddings:
        found.add(
            "RoPE",
            "note",
            f"the drafter is configured for {config.max_position_embeddings} positions, the target for {expected.max_position_embeddings}",
        )


def check_weights(found: Examination, drafter: DSpineModel, target, stored: torch.dtype | None) -> None:
    """Precision of the checkpoint, and weights that are damaged or were never trained. Coverage is checked in loading."""
    bad = [name for name, value in drafter.named_parameters() if not torch.isfinite(value).all()]
    if bad:
        found.add("weights", "failure", f"{len(bad)} tensors hold NaN or infinity: {', '.join(bad[:3])}")
    blank = [name for name, value in drafter.named_parameters() if value.dim() == 2 and not value.any()]
    if blank:
        found.add(
            "weights",
            "warning",
            f"{len(blank)} matrices are all zeros ({', '.join(blank[:3])}): these parts were never trained and change nothing",
        )
    if not bad and not blank:
        count = sum(parameter.numel() for parameter in drafter.parameters())
        found.add("weights", "ok", f"all tensors are there, none is unknown, {count / 1e6:.1f} M parameters")
    head = plain_weight(target.get_output_embeddings())
    if head is not None and head.dtype != drafter.dtype:
        found.add(
            "dtype",
            "failure",
            f"the drafter is {drafter.dtype} beside a target in {head.dtype}; load it with dtype={head.dtype}",
        )
    elif stored is not None and {stored, drafter.dtype} == {torch.bfloat16, torch.float16}:
        found.add(
            "dtype", "warning", f"the checkpoint is {stored} but runs in {drafter.dtype}, which rounds or overflows it"
        )
    else:
        found.add("dtype", "ok", f"both run in {drafter.dtype}")


@torch.no_grad()
def check_transfer(found: Examination, drafter: DSpineModel, target) -> None:
    """Whether the transfer table can be had, is that of this target, and still tells tokens apart. To be called before binding."""
    config = drafter.config
    if not config.uses_transfer_space:
        found.add("transfer table", "ok", "plain DFlash, no transfer space")
        return
    head = plain_weight(target.get_output_embeddings())
    stored = drafter.transfer_table if config.store_transfer_table else None
    if head is None:
        if stored is None:
            found.add(
                "transfer table",
                "failure",
                "the target's output head cannot be read (quantised or sharded) and the drafter was saved without its table; save it with "
                "store_transfer_table=True while bound to the unquantised target",
            )
            return
        table = stored
    else:
        A = drafter.transfer.weight
        table = transfer_table(head, A, config.rms_norm_eps, A.dtype)
        if stored is not None:
            gap = float((table.float() - stored.float()).abs().max())
            if gap > (1e-3 if A.dtype == torch.float32 else 0.1) + 0.02 * float(table.float().abs().max()):
                found.add(
                    "transfer table",
                    "failure",
                    f"the stored table is not that of this target (entries differ by up to {gap:.2g}): it is stale or of another model; "
                    "bind the drafter to its target and save it again",
                )
                return
    sample = table[:: max(1, table.shape[0] // 512)].float()
    sample = torch.nn.functional.normalize(sample, dim=-1)
    cosine = sample @ sample.T
    alike = float((cosine.sum() - cosine.trace()) / (cosine.numel() - len(sample)))
    if alike > 0.9:
        found.add(
            "transfer table",
            "warning",
            f"the transfer space has collapsed: two tokens have a mean cosine of {alike:.2f}, so it tells little apart",
        )
    else:
        how = "stored" if stored is not None else "computed from the target when binding"
        found.add("transfer table", "ok", f"{how}, mean cosine of two tokens {alike:.2f}")


# ---- three routes to the accepted length ----------------------------------------------------------------------------------------


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


# ---- the whole examination ------------------------------------------------------------------------------------------------------


def examine(
    target,
    tokenizer,
    drafter: str,
    prompts: list[Prompt] | None = None,
    thinking: bool | None = False,
    max_new_tokens: int = 96,
    server: Server | None = None,
) -> Examination:
    """Runs every check that can still be run after the ones before it.

    Args:
        target: a causal language model in evaluation mode, in the dtype to examine.
        tokenizer: the target's; None skips what needs one.
        drafter: folder or Hub id.
        prompts: default a built-in handful under the target's chat template.
    """
    found = Examination()
    try:
        config, is_dflash = read_config(drafter)
    except (OSError, ValueError) as error:
        found.add("configuration", "failure", f"the drafter's configuration cannot be read: {error}")
        return found
    if is_dflash:
        found.add(
            "configuration",
            "note",
            "a DFlash checkpoint: examined as a DSpine drafter without injection and refinement",
        )
    check_shapes(found, config, target)
    check_mask(found, config, target, tokenizer)
    check_template(found, config, tokenizer, thinking)
    check_rope(found, config, target)
    try:
        model = load_drafter(drafter, target.dtype, is_dflash).to(target.device)
    except (OSError, ValueError) as error:
        found.add("weights", "failure", str(error))
        return found
    stored = config.dtype if isinstance(config.dtype, torch.dtype) else getattr(torch, str(config.dtype), None)
    check_weights(found, model, target, stored)
    shapes = found.levels()
    if any(shapes.get(name) == "failure" for name in ("layers", "hidden size", "vocabulary", "taps", "mask id")):
        found.add("routes", "note", "not measured: drafter and target do not fit together")
        return found
    check_transfer(found, model, target)
    if found.levels().get("transfer table") == "failure" and plain_weight(target.get_output_embeddings()) is None:
        found.add("routes", "note", "not measured: there is no transfer table")
        return found
    try:
        model.bind_target(target)
    except ValueError as error:
        found.add("binding", "failure", str(error))
        return found
    if prompts is None:
        if tokenizer is None:
            found.add("routes", "note", "not measured: there is no tokenizer to build prompts with; give prompts")
            return found
        prompts = [Prompt("built-in", i, render(tokenizer, text, thinking)) for i, text in enumerate(PROMPTS)]
    answers = compare_routes(found, target, model, prompts, max_new_tokens)
    if server is not None:
        try:
            compare_server(found, server, config, target, prompts, answers, max_new_tokens)
        except RuntimeError as error:
            found.add("server", "failure", str(error))
    tau = found.accepted_lengths.get("decoding")
    if tau is not None and tau < 1.2:
        found.add(
            "acceptance",
            "warning",
            f"{tau:.2f} tokens a round: drafts are almost never accepted, as by an untrained drafter or on foreign prompts",
        )
    return found


def read_prompts(path: str, tokenizer, thinking: bool | None) -> list[Prompt]:
    """Prompts of a file: `{"turns": [...]}` lines in `.jsonl`, else one text per line."""
    if path.endswith(".jsonl"):
        texts = [turns[0] for turns in read_turns(path)]
    else:
        texts = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    if not texts:
        raise ValueError(f"{path} holds no prompts")
    return [Prompt(Path(path).stem, i, render(tokenizer, text, thinking)) for i, text in enumerate(texts)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dspine.integrations.doctor", description=__doc__.splitlines()[0])
    parser.add_argument("target", help="folder or Hub id of the target")
    parser.add_argument("drafter", help="folder or Hub id of a DSpine or DFlash drafter")
    parser.add_argument(
        "--prompts", help=".jsonl of turns, or a text file of one prompt a line; default a built-in handful"
    )
    parser.add_argument("--num-prompts", type=int, help="use the first ones only")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--thinking", default="off", choices=["off", "on", "template"])
    parser.add_argument("--dtype", default="float32", help="float32 demands identical rounds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--server", help="address of a running SGLang server with this target and drafter")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--json", help="write the findings here")
    args = parser.parse_args(argv)
    thinking = {"off": False, "on": True, "template": None}[args.thinking]
    if args.max_new_tokens < 2:
        parser.error("--max-new-tokens must be at least 2")
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.target, trust_remote_code=args.trust_remote_code)
        prompts = None if args.prompts is None else read_prompts(args.prompts, tokenizer, thinking)
        if args.num_prompts is not None:
            built_in = [Prompt("built-in", i, render(tokenizer, text, thinking)) for i, text in enumerate(PROMPTS)]
            prompts = (prompts or built_in)[: args.num_prompts]
        target = AutoModelForCausalLM.from_pretrained(
            args.target, dtype=getattr(torch, args.dtype), trust_remote_code=args.trust_remote_code
        )
    except (OSError, ValueError, AttributeError) as error:
        print(f"doctor: {error}", file=sys.stderr)
        return 2
    server = None if args.server is None else Server(args.server)
    found = examine(
        target.to(args.device).eval(), tokenizer, args.drafter, prompts, thinking, args.max_new_tokens, server
    )
    marks = {"ok": "ok     ", "note": "note   ", "warning": "WARNING", "failure": "FAILURE"}
    for finding in found.findings:
        print(f"{marks[finding.level]}  {finding.check}: {finding.message}")
    if found.accepted_lengths:
        print("accepted length: " + ", ".join(f"{name} {value:.3f}" for name, value in found.accepted_lengths.items()))
    failures = sum(finding.level == "failure" for finding in found.findings)
    warnings = sum(finding.level == "warning" for finding in found.findings)
    print(f"{failures} failed, {warnings} warnings" if failures or warnings else "everything fits")
    if args.json:
        Path(args.json).write_text(json.dumps(asdict(found), indent=1), encoding="utf-8")
    return int(found.failed)


if __name__ == "__main__":
    sys.exit(main())
