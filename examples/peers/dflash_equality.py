"""Accepted lengths of one DFlash drafter, decoded by the `dflash` package and by this one: are they the same numbers?

    pip install dflash==0.1.0
    python examples/peers/dflash_equality.py --target PATH --drafter PATH --bench-dir FOLDER --num-prompts 4

The drafter is a DFlash checkpoint (z-lab's naming) or a DSpine folder with injection and refinement off, which is first written as the
former. Greedy decoding on both sides, one prompt at a time.

What is equal, and what is not: `dflash` drafts only as many slots as the length limit leaves room for, this package always drafts the
block of training and verifies what fits. Slots see each other, so a narrower block holds other drafts: rounds that begin less than a
block before the limit may differ, all others are the same. With `--room` (the default here) `dflash` gets a limit one block further
away and its rounds are cut at ours; then every round must be equal.
"""

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from peer_drafters import BACKBONE_FIELDS, load_target
from safetensors.torch import save_file
from transformers import AutoTokenizer

from dspine.integrations.evaluation import BENCHMARKS, load_prompts, load_token_prompts
from dspine.integrations.evaluation.decoding import decode_with_drafter, end_token_ids
from dspine.modeling_dspine import DSpineConfig, DSpineModel


DFLASH_FIELDS = ("mask_token_id", "target_layer_ids", "input_embedding_scale", "output_multiplier", "is_causal")
QWEN_FIELDS = (*BACKBONE_FIELDS, "layer_types", "sliding_window", "block_size", "num_target_layers")


def export_dflash(drafter: DSpineModel, folder: str | Path) -> Path:
    """Writes a drafter without DSpine's parts as a DFlash checkpoint, in the naming of released ones.

    Raises:
        ValueError: the drafter injects or refines, which a DFlash checkpoint cannot say.
    """
    config = drafter.config
    if config.uses_transfer_space:
        raise ValueError("only a drafter with injection=False and refinement=False is a DFlash drafter")
    raw = {name: getattr(config, name) for name in QWEN_FIELDS}
    raw |= {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "tie_word_embeddings": False,
        "use_sliding_window": config.sliding_window is not None,
        "dtype": str(drafter.dtype).removeprefix("torch."),
        "dflash_config": {name: getattr(config, name) for name in DFLASH_FIELDS if getattr(config, name) is not None},
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=1), encoding="utf-8")
    tensors = {name: value.contiguous().cpu() for name, value in drafter.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def as_dflash_folder(drafter: str, work: Path) -> Path:
    """The drafter as a DFlash checkpoint; a DSpine folder is converted into `work`."""
    raw = json.loads((Path(drafter) / "config.json").read_text())
    if raw.get("model_type") != DSpineConfig.model_type:
        return Path(drafter)
    return export_dflash(DSpineModel.from_pretrained(drafter, dtype="auto"), work / "dflash")


def decode_dflash(target, drafter, prompt, max_new_tokens: int) -> tuple[list[int], list[int]]:
    """New tokens and the tokens of every round, by `dflash.model.dflash_generate`."""
    import dflash.model

    if target.device.type != "cuda":
        dflash.model._cuda_time = time.perf_counter  # its clock waits for a GPU
    output = dflash.model.dflash_generate(
        drafter,
        target,
        torch.tensor([prompt.input_ids], device=target.device),
        max_new_tokens,
        end_token_ids(target) or None,
        return_stats=True,
    )
    return output.output_ids[0, len(prompt.input_ids) :].tolist(), output.acceptance_lengths


def cut_rounds(lengths: list[int], tokens: int) -> list[int]:
    """The rounds of a text cut after `tokens` tokens of its rounds."""
    result = []
    for length in lengths:
        if tokens <= 0:
            break
        result.append(min(length, tokens))
        tokens -= length
    return result


def rounds_before_limit(lengths: list[int], max_new_tokens: int, block_size: int) -> int:
    """How many rounds begin at least a block before the limit: both packages draft whole blocks in these."""
    used, count = 1, 0
    for length in lengths:
        if max_new_tokens - used + 1 < block_size:
            break
        count, used = count + 1, used + length
    return count


def compare(target, ours: DSpineModel, theirs, prompts, max_new_tokens: int, room: bool = True) -> dict:
    """Both packages on the same prompts.

    Returns:
        `equal_texts`, `equal_rounds` (of how many `requests`), `equal_before_limit` (rounds that begin a block before the limit), and both
        packages' pooled and per-request accepted lengths.
    """
    block_size = ours.config.block_size
    result = {"requests": len(prompts), "equal_texts": 0, "equal_rounds": 0, "equal_before_limit": 0}
    lengths = {"ours": [], "dflash": []}
    for prompt in prompts:
        (mine,) = decode_with_drafter(target, ours, [prompt], max_new_tokens)
        text, rounds = decode_dflash(target, theirs, prompt, max_new_tokens + (block_size if room else 0))
        if room:
            text, rounds = text[:max_new_tokens], cut_rounds(rounds, max_new_tokens - 1)
        whole = rounds_before_limit(mine.accepted_lengths, max_new_tokens, block_size)
        result["equal_texts"] += mine.output_ids == text
        result["equal_rounds"] += mine.accepted_lengths == rounds
        result["equal_before_limit"] += mine.accepted_lengths[:whole] == rounds[:whole]
        lengths["ours"].append(mine.accepted_lengths)
        lengths["dflash"].append(rounds)
    for name, rows in lengths.items():
        rows = [row for row in rows if row]
        result[name] = {
            "accepted_length": sum(map(sum, rows)) / sum(map(len, rows)),
            # what `dflash benchmark` prints
            "accepted_length_per_request": statistics.mean(statistics.mean(row) for row in rows),
            "rounds": rows,
        }
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--bench-dir", help="folder of NAME.jsonl files; default: the sets of the Hub")
    parser.add_argument("--prompts", help="parquet file of token ids")
    parser.add_argument("--datasets", nargs="+", default=list(BENCHMARKS))
    parser.add_argument("--num-prompts", type=int, default=4, help="of every set")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--room", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", help="write the numbers here as JSON")
    args = parser.parse_args(argv)
    try:
        from dflash.model import DFlashDraftModel
    except ImportError:
        parser.error("the dflash package is needed: pip install dflash==0.1.0")
    dtype = getattr(torch, args.dtype)
    target = load_target(args.target, dtype, args.device)
    if args.prompts is not None:
        prompts = load_token_prompts(args.prompts, None, args.num_prompts)
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.target)
        prompts = load_prompts(args.datasets, tokenizer, args.bench_dir, args.num_prompts)
    with tempfile.TemporaryDirectory() as work:
        folder = as_dflash_folder(args.drafter, Path(work))
        off = {"injection": False, "refinement": False}
        ours = DSpineModel.from_dflash(folder, dtype=dtype, config_overrides=off).to(args.device).eval()
        theirs = DFlashDraftModel.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        theirs = theirs.to(args.device).eval()
    ours.bind_target(target)
    result = compare(target, ours, theirs, prompts, args.max_new_tokens, args.room)
    shown = copy.deepcopy(result)
    for name in ("ours", "dflash"):
        shown[name].pop("rounds")
    print(json.dumps(shown, indent=1))
    if args.out:
        Path(args.out).write_text(json.dumps(result), encoding="utf-8")
    same = result["equal_rounds" if args.room else "equal_before_limit"] == result["requests"]
    print("the same rounds" if same else "different rounds")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
