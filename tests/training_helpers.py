"""A tokenizer for the tiny targets, shared by the training tests."""

import string

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_tokenizer(chat_template=CHATML):
    """One token per character of a small alphabet, ids below the 97 of `tiny_target`; 0 pads, 1 and 2 begin and end a turn."""
    letters = string.ascii_letters + string.digits + ".,'?!-<>/:_"
    vocab = {token: i for i, token in enumerate(["<pad>", "<|im_start|>", "<|im_end|>", "Ġ", "Ċ", *letters])}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<pad>", "<|im_start|>", "<|im_end|>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<pad>")
    tokenizer.chat_template = chat_template
    return tokenizer
