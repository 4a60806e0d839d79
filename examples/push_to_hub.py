"""Checks a trained drafter and pushes it to the Hub, or writes what would be pushed into a local folder.

    python examples/push_to_hub.py out --repo-id you/qwen3-8b-dspine --dry-run pushed/       # nothing leaves this machine
    python examples/push_to_hub.py out --repo-id you/qwen3-8b-dspine --private --tag v1

The folder must load strictly, with the code in it, and hold a stored transfer table that was computed if its configuration wants one.
Only the drafter's own files are pushed: optimizer states, checkpoints and logs stay. `--base-model` replaces a folder of this machine
in `config.json` by the target's name on the Hub.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import torch
from huggingface_hub import HfApi, ModelCard
from safetensors import safe_open

from dspine.modeling_dspine import DSpineConfig, DSpineModel
from dspine.modeling_dspine.hub_dspine import card_text


PUSHED = (
    "config.json",
    "README.md",
    "LICENSE",
    "*.safetensors",
    "*.safetensors.index.json",
    "*_dspine.py",
    "metrics.json",
)


def check_folder(folder: Path) -> DSpineModel:
    """The drafter in `folder`, loaded strictly.

    Raises:
        ValueError: something in it does not fit or is missing; the message says what.
    """
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            f"{folder} holds a LoRA adapter; push the merged drafter (examples/finetune_lora.py writes one)"
        )
    drafter = DSpineModel.from_pretrained(folder, dtype="auto")
    config = drafter.config
    missing = [name for name in ("modeling_dspine.py", "configuration_dspine.py") if not (folder / name).exists()]
    if missing:
        raise ValueError(f"{folder} lacks {missing}, which loading it without the package needs; save it again")
    for name, tensor in drafter.state_dict().items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name} of {folder} holds values that are not finite")
    if config.uses_transfer_space and config.store_transfer_table and not drafter.transfer_table.any(-1).all():
        raise ValueError(
            f"the transfer table of {folder} was never computed; bind the drafter to its target and save it"
        )
    return drafter


def stage(source: Path, destination: Path, repo_id: str, base_model: str | None) -> DSpineConfig:
    """Copies the files to push; the card gets the repository's name unless it was edited.

    Raises:
        ValueError: `config.json` names a folder of this machine as the target, or the card has no front matter.
    """
    destination.mkdir(parents=True, exist_ok=True)
    if any(destination.iterdir()):
        raise ValueError(f"{destination} must be empty")
    for pattern in PUSHED:
        for path in source.glob(pattern):
            shutil.copy(path, destination / path.name)
    raw = json.loads((source / "config.json").read_text())
    config = DSpineConfig.from_dict(dict(raw))
    made = {card_text(config, str(source)), card_text(config, source.name)}
    name = base_model or config.target_name_or_path
    if name is None or Path(name).is_absolute() or Path(name).is_dir():
        raise ValueError(f"config.json must name the target as the Hub does, got {name!r}; give --base-model")
    config.target_name_or_path = name
    (destination / "config.json").write_text(json.dumps(raw | {"target_name_or_path": name}, indent=2) + "\n")
    card = destination / "README.md"
    if not card.exists() or card.read_text(encoding="utf-8") in made:
        card.write_text(card_text(config, repo_id), encoding="utf-8")
    if "base_model" not in ModelCard.load(card).data.to_dict():
        raise ValueError(f"the card of {source} must name its base_model in the front matter")
    return config


def show(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        print(f"{path.stat().st_size / 2**20:>10.2f} MiB  {path.name}")
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as tensors:
            kinds = {tensors.get_slice(name).get_dtype() for name in tensors.keys()}
            print(f"{path.name}: {len(tensors.keys())} tensors, {', '.join(sorted(kinds))}")


def main(argv: list[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--repo-id", required=True)
    parser.add_argument("--base-model", help="Hub id of the target")
    parser.add_argument("--private", action="store_true")
    parser.add_argument("--revision", help="branch, made if it does not exist; default: main")
    parser.add_argument("--tag", help="tag of the pushed commit")
    parser.add_argument("--message", default="Upload DSpine drafter")
    parser.add_argument("--dry-run", type=Path, metavar="FOLDER", help="write the files there instead of pushing")
    args = parser.parse_args(argv)
    drafter = check_folder(args.folder)
    with tempfile.TemporaryDirectory() as work:
        staged = args.dry_run or Path(work) / args.repo_id.split("/")[-1]
        config = stage(args.folder, staged, args.repo_id, args.base_model)
        DSpineModel.from_pretrained(staged)
        parameters = sum(p.numel() for p in drafter.parameters())
        print(f"{args.repo_id}: {parameters:,} parameters for {config.target_name_or_path}")
        show(staged)
        if args.dry_run is not None:
            print(f"nothing was pushed; the files are in {staged}")
            return str(staged)
        api = HfApi()
        api.create_repo(args.repo_id, private=args.private, exist_ok=True)
        if args.revision is not None:
            api.create_branch(args.repo_id, branch=args.revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=args.repo_id, folder_path=staged, revision=args.revision, commit_message=args.message
        )
        if args.tag is not None:
            api.create_tag(args.repo_id, tag=args.tag, revision=commit.oid)
    print(commit.commit_url)
    return commit.commit_url


if __name__ == "__main__":
    main()
