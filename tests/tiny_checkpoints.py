"""Folders of tiny targets and drafters, as commands take them."""

from tiny_models import tiny_drafter, tiny_target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


CHAT_TEMPLATE = "{% for message in messages %}<user> {{ message['content'] }} {% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
THINKING_TEMPLATE = CHAT_TEMPLATE + "{% if enable_thinking %} <think>{% endif %}"


def tiny_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Words `w0`..`w89` and a few special tokens, 97 in all: as many as a tiny target's embedding has rows."""
    special = ["<pad>", "<bos>", "<unk>", "<user>", "<answer>", "<think>"]
    words = special + [f"w{i}" for i in range(90)] + ["<mask>"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([*special, "<mask>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", unk_token="<unk>", mask_token="<mask>"
    )
    fast.chat_template = chat_template
    return fast


def save_pair(folder, chat_template: str | None = CHAT_TEMPLATE, **drafter_fields):
    """A target with tokenizer in `folder/target` and a drafter for it in `folder/drafter`; returns both models and the tokenizer."""
    target = tiny_target(initializer_range=0.2)
    tokenizer = tiny_tokenizer(chat_template)
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    fields = {"target_chat_template_hash": _hash(chat_template), "target_thinking": False}
    drafter = tiny_drafter(target, **(fields | drafter_fields))
    drafter.save_pretrained(folder / "drafter")
    return target, drafter, tokenizer


def _hash(template):
    from dspine.modeling_dspine import DSpineConfig

    return DSpineConfig.chat_template_hash(template)
