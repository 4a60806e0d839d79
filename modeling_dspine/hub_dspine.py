"""Saving, loading and the model card: what makes a folder or Hub repository a DSpine drafter."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers.utils import cached_file


CARD = """---
{front}---

# {title}

A [DSpine](https://arxiv.org/abs/2609.36173) drafter for speculative decoding with {target}: it drafts blocks of {block_size} tokens that
the target verifies in one pass. The text generated is the target's own. The method is a reconstruction from the paper's abstract.

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

With the `dspine` package installed the same call uses its Triton kernels on CUDA devices.

## Drafter

{facts}
{results}"""


def card_text(config, repo_id: str) -> str:
    """The README of a saved drafter: how to use it, its shape, and measured accepted lengths if the configuration holds them."""
    target_id = config.target_name_or_path or "TARGET"
    front = "library_name: transformers\npipeline_tag: text-generation\ntags:\n- speculative-decoding\n- dspine\n- dflash\n"
    if config.target_name_or_path and not Path(config.target_name_or_path).is_absolute():
        front = f"base_model: {config.target_name_or_path}\n" + front
    facts = {
        "draft layers": config.num_hidden_layers,
        "slots per block (anchor included)": config.block_size,
        "tapped target layers": config.target_layer_ids,
        "mask token id": config.mask_token_id,
        "transfer rank": config.transfer_rank if config.uses_transfer_space else "none (plain DFlash)",
        "candidates per slot": config.num_candidates,
        "trained with thinking": {None: "not recorded", True: "on", False: "off"}[config.target_thinking],
    }
    measured = getattr(config, "measured_accepted_length", None)
    results = ""
    if measured:
        columns = sorted({name for row in measured.values() for name in row})
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
        title=Path(repo_id).name,
        target=f"[{target_id}](https://huggingface.co/{target_id})"
        if target_id != "TARGET" and "base_model" in front
        else target_id,
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
        kwargs.setdefault("use_safetensors", True)
        try:
            model, info = super().from_pretrained(
                pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
            )
        except SafetensorError as error:
            raise ValueError(
                f"the weights of {pretrained_model_name_or_path} are damaged or cut off ({error}); download them again"
            ) from error
        except RuntimeError as error:
            if "size mismatch" not in str(error) and "mismatched" not in str(error):
                raise
            raise ValueError(f"{pretrained_model_name_or_path} does not fit its configuration: {error}") from error
        _refuse_partial(pretrained_model_name_or_path, info, allowed_missing=())
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
        model, info = super().from_pretrained(
            pretrained_model_name_or_path,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            use_safetensors=True,
            **kwargs,
        )
        _refuse_partial(
            pretrained_model_name_or_path, info, allowed_missing=("injections.", "transfer.", "transfer_table")
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
        if self.transfer is not None and self.config.store_transfer_table and not self._table_is_current:
            self.ensure_transfer_table()
        for item in (type(self), type(self.config)):
            if item._auto_class is None:
                item.register_for_auto_class("AutoModel" if item is type(self) else "AutoConfig")
        super().save_pretrained(save_directory, *args, **kwargs)
        card = Path(save_directory) / "README.md"
        if not card.exists():
            card.write_text(card_text(self.config, kwargs.get("repo_id") or str(save_directory)))


def _refuse_partial(source, info: dict, allowed_missing: tuple[str, ...]) -> None:
    missing = sorted(k for k in info["missing_keys"] if not k.startswith(allowed_missing or ("\0",)))
    problems = {
        "missing": missing,
        "unexpected": sorted(info["unexpected_keys"]),
        "misshaped": sorted(str(k) for k in info.get("mismatched_keys") or ()),
    }
    found = "; ".join(f"{kind} {names}" for kind, names in problems.items() if names)
    if found:
        raise ValueError(f"the weights of {source} are not this drafter's: {found}")
