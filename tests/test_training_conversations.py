"""Conversations to token sequences: columns, templates, response masks, and the counts of what is left out."""

import gzip
import json
from collections import Counter

import pytest
from training_helpers import CHATML, tiny_tokenizer

from dspine.integrations.training import ConversationEncoder, PackedDataset, load_sequences, report_table
from dspine.integrations.training.conversations import LeftOut, detect_format


MARKED = CHATML.replace(
    "message['content'] + '<|im_end|>'",
    "(message['content'] + '<|im_end|>' if message['role'] != 'assistant' else '') }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% endif %}{{ ''",
)
# as Qwen3: thinking can be switched off in the generation prompt, and only the last turn keeps its thinking
THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}"
    "{{ '<think>\n' + (message['reasoning_content'] or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
TURNS = [("user", "what is two plus two"), ("assistant", "four"), ("user", "and three"), ("assistant", "seven then")]


def conversation(turns=TURNS):
    return [{"role": role, "content": content} for role, content in turns]


def responses(tokenizer, ids, mask):
    """The marked text, one string per run."""
    runs, before = [], False
    for token, marked in zip(ids, mask):
        if marked and not before:
            runs.append([])
        if marked:
            runs[-1].append(token)
        before = marked
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefix difference", "generation blocks"])
@pytest.mark.parametrize("last", [False, True])
def test_response_mask(template, last):
    tokenizer = tiny_tokenizer(template)
    encoder = ConversationEncoder(tokenizer, last_turn_only=last)
    assert encoder.marks_itself == (template == MARKED)
    ((ids, mask, note),) = encoder.encode(conversation())
    wanted = ["four<|im_end|>", "seven then<|im_end|>"]
    assert responses(tokenizer, ids, mask) == wanted[-1:] if last else wanted
    assert note is None
    # what the target is asked with in serving is a prefix of the sequence
    prompt = tokenizer.apply_chat_template(conversation(TURNS[:3]), add_generation_prompt=True, return_dict=False)
    assert ids[: len(prompt)] == prompt and mask[len(prompt)]


def test_a_turn_after_the_last_answer_is_not_trained():
    tokenizer = tiny_tokenizer(CHATML)
    ((ids, mask, _),) = ConversationEncoder(tokenizer).encode(conversation(TURNS[:3]))
    assert mask[-1] and responses(tokenizer, ids, mask) == ["four<|im_end|>"]


def test_templates_that_rewrite_earlier_turns_give_one_sequence_per_answer():
    tokenizer = tiny_tokenizer(THINKING)
    sequences = ConversationEncoder(tokenizer, thinking=False).encode(conversation())
    assert [note for *_, note in sequences] == ["split_by_turn"] * 2
    assert [responses(tokenizer, ids, mask) for ids, mask, _ in sequences] == [
        ["four<|im_end|>"],
        ["seven then<|im_end|>"],
    ]
    # with thinking on, the model writes its thoughts itself
    thoughtful = [*conversation(TURNS[:1]), {"role": "assistant", "content": "four", "reasoning_content": "two two"}]
    ((ids, mask, _),) = ConversationEncoder(tokenizer, thinking=True).encode(thoughtful)
    assert responses(tokenizer, ids, mask) == ["<think>\ntwo two\n</think>\n\nfour<|im_end|>"]


def test_thinking_that_the_template_ignores_is_said(caplog):
    ConversationEncoder(tiny_tokenizer(CHATML), thinking=True)
    assert "does not use enable_thinking" in caplog.text


FORMATS = {
    "messages": [{"messages": conversation(TURNS[:2]), "source": "a"}],
    "sharegpt": [{"conversations": [{"from": "human", "value": TURNS[0][1]}, {"from": "gpt", "value": "four"}]}],
    "alpaca": [{"instruction": "what is", "input": "two plus two", "output": "four"}],
}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("suffix", ["json", "jsonl", "jsonl.gz", "parquet", "dataset", "folder"])
def test_columns_and_files(tmp_path, kind, suffix):
    datasets = pytest.importorskip("datasets")
    records = FORMATS[kind] * 3
    assert detect_format(records[0]) == kind
    source = tmp_path / f"data.{suffix}"
    lines = "\n".join(json.dumps(record) for record in records)
    if suffix == "json":
        source.write_text(json.dumps(records))
    elif suffix == "jsonl":
        source.write_text(lines)
    elif suffix == "jsonl.gz":
        source.write_bytes(gzip.compress(lines.encode()))
    elif suffix == "parquet":
        datasets.Dataset.from_list(records).to_parquet(source)
    elif suffix == "folder":
        datasets.DatasetDict({"train": datasets.Dataset.from_list(records)}).save_to_disk(source)
    else:
        source = datasets.Dataset.from_list(records)
    tokenizer = tiny_tokenizer(CHATML)
    sequences = load_sequences(source, tokenizer)
    assert len(sequences) == 3 and sequences.report == Counter(conversations=3)
    assert responses(tokenizer, sequences.input_ids[0], sequences.loss_mask[0]) == ["four<|im_end|>"]
    assert sequences.sources[0] == ("a" if kind == "messages" else "")


def test_token_sequences_and_conversations_together(tmp_path):
    datasets = pytest.importorskip("datasets")
    tokens = datasets.Dataset.from_list([{"input_ids": [5, 6, 7, 8], "prompt_length": 2, "source": "t", "other": 1}])
    sequences = load_sequences(
        [tokens, datasets.Dataset.from_list(FORMATS["messages"])], tiny_tokenizer(CHATML), workers=2
    )
    assert sequences.loss_mask[0].tolist() == [False, False, True, True] and sequences.sources == ["t", "a"]
    with pytest.raises(ValueError, match="need the target's tokenizer"):
        load_sequences(datasets.Dataset.from_list(FORMATS["messages"]))
    with pytest.raises(ValueError, match="must have columns"):
        load_sequences(datasets.Dataset.from_list([{"text": "a"}]))
    with pytest.raises(ValueError, match=r"\.json, \.jsonl or \.parquet"):
        (tmp_path / "data.csv").write_text("a,b")
        load_sequences(tmp_path / "data.csv")


PICKY = (
    "{% for message in messages %}{% if message['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}" + CHATML.split("%}", 1)[1]
)


def test_patterns_and_folders_of_files(tmp_path):
    pandas = pytest.importorskip("pandas")
    for number, thinking in enumerate((False, None)):
        # files of different runs differ in types and columns
        ids = [list(range(5, 15))] if number else [[5, 6, 7, 8]]
        table = pandas.DataFrame({"input_ids": ids, "prompt_length": [2], "thinking": [thinking]})
        table.to_parquet(tmp_path / f"part{number}.parquet")
    for source in (f"{tmp_path}/part*.parquet", str(tmp_path), [f"{tmp_path}/part[01].parquet"]):
        sequences = load_sequences(source)
        assert [len(ids) for ids in sequences.input_ids] == [4, 10] and sequences.thinking == {False}
    with pytest.raises(ValueError, match="matches no file"):
        load_sequences(f"{tmp_path}/none*.parquet")


def test_what_is_left_out_is_counted_by_reason_and_reported(caplog):
    datasets = pytest.importorskip("datasets")
    records = [
        conversation(TURNS[:2]),
        conversation(TURNS[:1]),
        conversation([TURNS[0], ("assistant", "  ")]),
        conversation([("critic", "hm"), *TURNS[:2]]),
        conversation([TURNS[0], ("assistant", "four " * 200)]),
        conversation([("user", "two " * 200), TURNS[1]]),
        None,
    ]
    data = datasets.Dataset.from_list([{"messages": record} for record in records])
    sequences = load_sequences(data, tiny_tokenizer(PICKY))
    report = PackedDataset(sequences, 128, 8).report
    wanted = {
        "conversations": 7,
        "left_out_no_response": 1,
        "left_out_empty_response": 1,
        "left_out_template_error": 1,
        "left_out_not_a_conversation": 1,
        "left_out_prompt_too_long": 1,
        "cut_too_long": 1,
        "documents": 2,
    }
    assert {name: report[name] for name in wanted} == wanted
    assert "unknown role critic" in caplog.text
    table = report_table(report).splitlines()
    assert any("left out template error" in line and line.split()[-1] == "1" for line in table)
    assert "left out" not in table[0] and "left out" in table[-1]


@pytest.mark.parametrize(
    "template, reason",
    [
        ("{{ raise_exception('no') }}", "left_out_template_error.*no"),
        ("{% for message in messages %}{{ message['nothing'] }}{% endfor %}", "left_out_no_response_tokens"),
        ("{{ messages[-1]['content'] }}", "left_out_no_response_tokens"),
        (CHATML + "{% generation %}{% endgeneration %}", "left_out_no_response_tokens"),
    ],
    ids=["refuses", "renders nothing", "forgets the prompt", "marks nothing"],
)
def test_a_wrong_template_is_an_error_that_names_the_reason(template, reason):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(FORMATS["messages"] * 2)
    with pytest.raises(ValueError, match=f"no conversation can be trained on, mostly because of {reason}"):
        load_sequences(data, tiny_tokenizer(template))


def test_no_template_at_all():
    with pytest.raises(ValueError, match="must have a chat template"):
        ConversationEncoder(tiny_tokenizer(None))
    with pytest.raises(LeftOut, match="no_response"):
        ConversationEncoder(tiny_tokenizer(CHATML)).encode([])
