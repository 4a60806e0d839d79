"""Whether a drafter fits a target on paper: one check each for shapes, mask id, template, RoPE, weights and transfer table."""

import json
from pathlib import Path

import torch
from transformers.utils import cached_file

from dspine.integrations.doctor_findings import Examination
from dspine.integrations.evaluation.decoding import end_token_ids
from dspine.modeling_dspine import DSpineConfig, DSpineModel
from dspine.modeling_dspine.target_dspine import plain_weight, transfer_table


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


__all__ = [
    "check_mask",
    "check_rope",
    "check_shapes",
    "check_template",
    "check_transfer",
    "check_weights",
    "load_drafter",
    "read_config",
]
