"""Saving, loading and the model card: what makes a folder or Hub repository a DSpine drafter."""

import json
import re
from pathlib import Path, PureWindowsPath

import torch
from safetensors import SafetensorError
from transformers.utils import cached_file


CARD = """---
{front}---

# {title}

A drafter for speculative decoding with {target}: it drafts blocks of {block_size} tokens in one pass, and the target verifies a block in one
pass of its own. The text generated is the target's: token for token in greedy decoding, the same distribution in sampling. The method
is a reconstruction of DSpine from the abstract of [arXiv 2609.36173](https://arxiv.org/abs/2609.36173), on the backbone of DFlash
([arXiv 2602.06036](https://arxiv.org/abs/2602.06036)).

## Use

```python
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained({target_id!r}, dtype="auto", device_map="auto")
tokenizer = AutoTokenizer.from_pretrained({target_id!r})
drafter = AutoModel.from_pretrained({repo_id!r}, trust_remote_code=True, dtype=target.dtype).to(target.device)

inputs = tokenizer.apply_chat_template(
    [{{"role": "user", "content": "Why is the sky blue?"}}], add_generation_prompt=True, return_tensors="pt", return_dict=True
).to(target.device)
output = drafter.spec_generate(target, **inputs, max_new_tokens=256, return_dict_in_generate=True)
print(tokenizer.decode(output.sequences[0]), output.statistics.accepted_length)
```

The code that `trust_remote_code` runs is in this repository and needs only PyTorch and Transformers. Where the `dspine` package is
installed as well, it uses that package's faster implementations.

## Drafter

{facts}
{results}"""


def _public_name(name: str) -> tuple[str, bool]:
    """What a card may call a model: a Hub id as it is; of a path on this machine only the last folder. Also whether it is an id."""
    is_id = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) is not None and not Path(name).is_dir()
    return (name, True) if is_id else (PureWindowsPath(Path(name).expanduser().resolve().as_posix()).name, False)


def card_text(config, repo_id: str) -> str:
    """The README of a saved drafter: how to use it, its shape, and measured accepted lengths if the configuration holds them.

    Args:
        config: may have `measured_accepted_length`, `{benchmark: {column: accepted length}}`.
        repo_id: Hub id, or the folder it is saved to, of which the last part is shown.
    """
    target_id, target_is_public = _public_name(config.target_name_or_path or "TARGET")
    target_is_public = target_is_public and config.target_name_or_path is not None
    front = "library_name: transformers\npipeline_tag: text-generation\ntags:\n- speculative-decoding\n- dspine\n"
    if target_is_public:
        front = f"base_model: {target_id}\n" + front
    facts = {
        "draft layers": config.num_hidden_layers,
        "slots per block (anchor included)": config.block_size,
        "tapped target layers": config.target_layer_ids,
        "mask token id": config.mask_token_id,
        "transfer rank": config.transfer_rank if config.uses_transfer_space else "none (plain DFlash)",
        "candidates per slot": config.num_candidates,
        "guidance of greedy drafts": config.refinement_guidance,
        "trained with thinking": {None: "not recorded", True: "on", False: "off"}[config.target_thinking],
    }
    if config.target_revision:
        facts["target revision"] = config.target_revision
    repo_id = _public_name(repo_id)[0]
    measured = getattr(config, "measured_accepted_length", None)
    results = ""
    if measured:
        columns = list(dict.fromkeys(name for row in measured.values() for name in row))
        lines = ["| benchmark | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
        lines += [
            f"| {name} | " + " | ".join(f"{row[c]:.2f}" if c in row else "" for c in columns) + " |"
            for name, row in measured.items()
        ]
        results = (
            "\n## Accepted length\n\nTokens committed per verification round, the target's own token included.\n\n"
            + "\n".join(lines)
            + "\n"
        )
    return CARD.format(
        front=front,
        title=repo_id.split("/")[-1],
        target=f"[{target_id}](https://huggingface.co/{target_id})" if target_is_public else f"`{target_id}`",
        target_id=target_id,
        repo_id=repo_id,
        block_size=config.block_size,
        facts="\n".join(f"- {name}: {value}" for name, value in facts.items()),
        results=results,
    )


class DSpineHubMixin:
    """Strict loading and complete saving, on top of `PreTrainedModel`."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info: bool = False, **kwargs):
        """As `PreTrainedModel.from_pretrained`, but a checkpoint must hold exactly the drafter's tensors.

        Raises:
            ValueError: tensors are missing, unknown or misshaped (all are named), or a file is damaged.
        """
        model, info = _load(super().from_pretrained, pretrained_model_name_or_path, *args, **kwargs)
        return (model, info) if output_loading_info else model

    @classmethod
    def from_dflash(
        cls,
        pretrained_model_name_or_path,
        dtype: torch.dtype | str | None = None,
        config_overrides: dict | None = None,
        **kwargs,
    ):
        """A DSpine drafter with the backbone of a DFlash checkpoint and writes that start at zero, so that its outputs are the
        same until it is trained.

        Args:
            pretrained_model_name_or_path: folder or Hub repository of a DFlash drafter (z-lab's naming).
            config_overrides: fields of the new configuration, e.g. `{"injection": False, "refinement": False}` for DFlash itself.
            kwargs: as for `from_pretrained` (`revision`, `token`, ...).

        Raises:
            ValueError: not a DFlash checkpoint, or its tensors are not exactly the backbone's.
        """
        hub = {
            k: kwargs[k] for k in ("revision", "token", "cache_dir", "local_files_only", "subfolder") if k in kwargs
        }
        raw = json.loads(Path(cached_file(pretrained_model_name_or_path, "config.json", **hub)).read_text())
        config = cls.config_class.from_dflash(raw, **(config_overrides or {}))
        new = ("injections.", "transfer.", "transfer_table")
        model, _ = _load(
            super().from_pretrained, pretrained_model_name_or_path, config=config, dtype=dtype, may_lack=new, **kwargs
        )
        with torch.no_grad():
            for module in model.injections.values():
                module.write.weight.zero_()
        model._table_is_current = False
        return model

    def save_pretrained(self, save_directory, *args, **kwargs):
        """Writes configuration, safetensors, the code that loads them without this package, and a model card (kept if there is one).

        Raises:
            ValueError: the configuration wants the transfer table stored, but it was never computed.
        """
        if self.transfer is not None and self.config.store_transfer_table:
            table = self.transfer_table if self._table_is_current else self.ensure_transfer_table()
            if not table.any():  # rows have length one, so this one was never computed
                raise ValueError(
                    "store_transfer_table is set, but the transfer table was never computed; call drafter.bind_target(target) before saving"
                )
        for item in (type(self), type(self.config)):
            if item._auto_class is None:
                item.register_for_auto_class("AutoModel" if item is type(self) else "AutoConfig")
        super().save_pretrained(save_directory, *args, **kwargs)
        card = Path(save_directory) / "README.md"
        if not card.exists():
            card.write_text(card_text(self.config, kwargs.get("repo_id") or str(save_directory)), encoding="utf-8")

    def _upload_modified_files(self, working_dir, repo_id, *args, **kwargs):
        # `push_to_hub` puts a generic card over ours just before the upload, unless the repository has one already
        card = Path(working_dir) / "README.md"
        if not card.exists() or "model card has been automatically generated" in card.read_text(encoding="utf-8"):
            card.write_text(card_text(self.config, repo_id), encoding="utf-8")
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)


def _load(from_pretrained, source, *args, may_lack: tuple[str, ...] = (), **kwargs):
    """Calls `PreTrainedModel.from_pretrained` and refuses a checkpoint that is not exactly the model's, except that tensors whose
    names start with `may_lack` may be absent. Returns the model and its loading information."""
    kwargs.setdefault("use_safetensors", True)
    # with this flag a misshaped tensor is reported with its name and shapes instead of raised as a table
    kwargs["ignore_mismatched_sizes"] = True
    try:
        model, info = from_pretrained(source, *args, output_loading_info=True, **kwargs)
    except SafetensorError as error:
        raise ValueError(f"the weights of {source} are damaged or cut off ({error}); download them again") from error
    missing = sorted(name for name in info["missing_keys"] if not name.startswith(may_lack))
    problems = {
        "missing": missing,
        "unexpected": sorted(info["unexpected_keys"]),
        "misshaped": [
            f"{name} (expected {list(wanted)}, got {list(got)})"
            for name, got, wanted in sorted(info["mismatched_keys"])
        ],
    }
    found = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in problems.items() if names)
    if found:
        only_new = missing and all(name.startswith(("injections.", "transfer")) for name in missing)
        hint = "; a DFlash checkpoint is loaded with DSpineModel.from_dflash" if only_new else ""
        raise ValueError(f"the weights of {source} are not those of its configuration: {found}{hint}")
    model._table_is_current = model.config.uses_transfer_space and model.config.store_transfer_table
    return model, info
