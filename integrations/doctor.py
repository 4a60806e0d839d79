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
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspine.integrations.doctor_findings import Examination
from dspine.integrations.doctor_pairing import (
    check_mask,
    check_rope,
    check_shapes,
    check_template,
    check_transfer,
    check_weights,
    load_drafter,
    read_config,
)
from dspine.integrations.doctor_routes import compare_routes, compare_server
from dspine.integrations.evaluation.prompts import Prompt, read_turns, render
from dspine.integrations.evaluation.serving import Server
from dspine.modeling_dspine.target_dspine import plain_weight


PROMPTS = (
    "Natalia sold clips to 48 of her friends in April, and half as many in May. How many did she sell in all? Reason step by step.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Why is the sky blue? Answer in three sentences.",
    "List five capitals of Europe with one sight each.",
    "Translate into French: The train leaves at nine, so we should be at the station by half past eight.",
    "Solve for x: 3x + 7 = 2x + 19. Show every step.",
)


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
