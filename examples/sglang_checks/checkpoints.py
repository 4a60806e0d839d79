"""Checkpoints for the other checks: a DFlash drafter in SGLang's layout, padded heads, shapes with dummy weights."""

import json
import re
import sys
from pathlib import Path


# of the released models, for load_format=dummy: no weights are needed
SHAPES = {
    "qwen3-4b": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}


def dummy_shape(name: str, folder: Path) -> None:
    """Configurations of a target and of equally large DSpine and DFlash drafters (5 layers, blocks of 16)."""
    from transformers import Qwen3Config

    from dspine.configuration_dspine import DSpineConfig

    fields = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}
    fields |= {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}
    target = Qwen3Config(**fields, **SHAPES[name], num_hidden_layers=36, architectures=["Qwen3ForCausalLM"])
    target.dtype = "bfloat16"
    target.eos_token_id = 151645
    target.save_pretrained(folder / name / "target")
    own = {key: value for key, value in SHAPES[name].items() if key != "tie_word_embeddings"}
    drafter = DSpineConfig(
        **fields,
        **own,
        num_hidden_layers=5,
        block_size=16,
        mask_token_id=151669,
        num_target_layers=36,
        target_layer_ids=[1, 9, 17, 25, 33],
        transfer_rank=256,
        num_candidates=16,
        architectures=["DSpineModel"],
        dtype="bfloat16",
    )
    drafter.save_pretrained(folder / name / "dspine")
    raw = drafter.to_dict()
    keys = ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers")
    kept = {key: raw[key] for key in (*fields, *own, "num_hidden_layers", "num_target_layers", "hidden_act")}
    kept |= {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 16, "dtype": "bfloat16"}
    kept |= {"tie_word_embeddings": False, "attention_bias": False, "dflash_config": {key: raw[key] for key in keys}}
    (folder / name / "dflash").mkdir(parents=True, exist_ok=True)
    (folder / name / "dflash" / "config.json").write_text(json.dumps(kept, indent=1) + "\n")


def padded_heads(source: Path, out: Path, ranks: int) -> None:
    """A checkpoint that computes the same with as many attention heads as `ranks` divides: new heads have zero weights.

    Small targets have odd numbers of heads (SmolLM2-135M: 9 and 3), which tensor parallelism cannot share out.
    """
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((source / "config.json").read_text())
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    more_kv = -(-kv // ranks) * ranks
    more = heads // kv * more_kv
    tensors = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors |= load_file(path)
    for name, tensor in tensors.items():
        # the new heads come last, with key and value heads of their own
        if re.search(r"\.[qkv]_proj\.(weight|bias)$", name):
            rows = (more if ".q_proj." in name else more_kv) * size - tensor.shape[0]
            tensors[name] = torch.cat([tensor, tensor.new_zeros(rows, *tensor.shape[1:])])
        elif name.endswith(".o_proj.weight"):
            tensors[name] = torch.cat(
                [tensor, tensor.new_zeros(tensor.shape[0], more * size - tensor.shape[1])], dim=1
            )
    out.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja", ".txt", ".model") and "safetensors" not in path.name:
            shutil.copy(path, out / path.name)
    config |= {"num_attention_heads": more, "num_key_value_heads": more_kv, "head_dim": size}
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file({k: v.contiguous() for k, v in tensors.items()}, out / "model.safetensors", metadata={"format": "pt"})


def prepare(args) -> dict:
    done, failed = [], {}

    def attempt(name, make):
        try:
            make()
            done.append(name)
        except Exception as error:  # the others are still wanted
            failed[name] = f"{type(error).__name__}: {error}"
        print(name, failed.get(name, "done"), flush=True)

    def dflash():
        sys.path.insert(0, str(Path(__file__).parents[1] / "peers"))
        from dflash_equality import export_dflash

        from dspine.modeling_dspine import DSpineModel

        export_dflash(DSpineModel.from_pretrained(args.dflash, dtype="auto"), args.folder / "dflash")

    # the quickest first: servers may be waiting for them
    for name in SHAPES:
        attempt(name, lambda name=name: dummy_shape(name, args.folder))
    if args.dflash:
        attempt("dflash", dflash)
    if args.target and args.dspine:
        attempt("padded target", lambda: padded_heads(args.target, args.folder / "padded-target", args.ranks))
        attempt("padded dspine", lambda: padded_heads(args.dspine, args.folder / "padded-dspine", args.ranks))
    return {"done": done, "failed": failed}
