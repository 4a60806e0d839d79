"""Generation of training data from SGLang servers, against a stand-in that speaks real HTTP."""

import asyncio
import gzip
import json

import pytest
from conftest import load_example
from sglang_testing import answer_tokens


parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def client_module():
    return load_example("sglang_client")


@pytest.fixture
def generate(client_module):
    return load_example("generate_sglang")


def prompts_file(folder, count):
    path = folder / "prompts.jsonl.gz"
    with gzip.open(path, "wt") as lines:
        for i in range(count):
            lines.write(json.dumps({"prompt": f"question {i}", "source": f"set-{i % 3}"}) + "\n")
    return path


def run(generate, tmp_path, server_list, count=40, **options):
    arguments = ["--target", "t", "--prompts", str(prompts_file(tmp_path, count)), "--output", str(tmp_path / "out")]
    arguments += ["--url", *(server.url for server in server_list), "--max-new-tokens", "12", "--burst", "3"]
    for name, value in options.items():
        arguments += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list) else [value])]
    counts = generate.main(arguments)
    rows = []
    for name in sorted(counts["files"]):
        rows += parquet.read_table(tmp_path / "out" / name).to_pylist()
    return counts, rows


def test_every_prompt_is_answered_at_every_temperature(generate, sglang_servers, character_tokenizer, tmp_path):
    pair = [sglang_servers(), sglang_servers()]
    counts, rows = run(generate, tmp_path, pair, concurrency=8)
    assert counts["answered"] == len(rows) == 80 and counts["failed"] == counts["unfinished"] == 0
    assert all(0 < server.most <= 8 for server in pair)
    template = character_tokenizer.apply_chat_template
    wanted = {tuple(template([{"content": f"question {i}"}])): f"set-{i % 3}" for i in range(40)}
    for temperature in (0.0, 1.0):
        part = [row for row in rows if row["temperature"] == temperature]
        assert {tuple(row["input_ids"][: row["prompt_length"]]): row["source"] for row in part} == wanted
    for row in rows:
        prompt, answer = row["input_ids"][: row["prompt_length"]], row["input_ids"][row["prompt_length"] :]
        assert len(answer) == 12
        if row["temperature"] == 0:
            assert answer == answer_tokens(prompt, {"max_new_tokens": 12}, None)
    # greedy ones first: the first 40 requests of both servers together
    asked = [body["sampling_params"]["temperature"] for server in pair for body in server.asked]
    assert sorted(asked) == [0.0] * 40 + [1.0] * 40
    schema = parquet.read_schema(tmp_path / "out" / "answers-00.parquet")
    assert [str(schema.field(name).type) for name in ("prompt_length", "source", "temperature")] == [
        "int32", "string", "float",
    ]  # fmt: skip
    assert str(schema.field("input_ids").type.value_type) == "uint16"


def test_what_exists_is_skipped(generate, sglang_servers, character_tokenizer, tmp_path):
    server = sglang_servers()
    run(generate, tmp_path, [server], temperatures=[0])
    before = tmp_path / "before.parquet"
    (tmp_path / "out" / "answers-00.parquet").rename(before)
    counts, rows = run(generate, tmp_path, [server], skip_existing=before)
    assert counts["known"] == 40 and {row["temperature"] for row in rows} == {1.0}
    # a temperature given twice asks for one more sample of everything
    counts, rows = run(generate, tmp_path, [server], skip_existing=before, temperatures=[0, 0])
    assert counts["known"] == 40 and len(rows) == 40


def test_time_limit_and_files(generate, sglang_servers, character_tokenizer, tmp_path):
    counts, rows = run(
        generate, tmp_path, [sglang_servers(delay=0.05)], 200, concurrency=4, time_limit=0.4, max_file_mib=0.0004
    )
    assert 8 <= counts["answered"] < 120 and counts["not_begun"] == 400 - counts["answered"]
    assert len(counts["files"]) > 1 and len(rows) == counts["answered"]
    counts, _ = run(generate, tmp_path, [sglang_servers(delay=5.0)], 5, concurrency=4, time_limit=0.1, grace=0.2)
    assert counts["answered"] == 0 and counts["unfinished"] >= 3 and counts["seconds"] < 3


def test_refused_prompts_are_counted(generate, sglang_servers, character_tokenizer, tmp_path):
    counts, rows = run(generate, tmp_path, [sglang_servers(context=22)], 120)
    assert counts["failed"] > 0 and counts["failed"] + len(rows) == 240
    assert any("longer than the context" in text for text in counts["errors"])
    counts, _ = run(generate, tmp_path, [sglang_servers()], 120, max_prompt_tokens=10)
    assert counts["too_long"] == 110 and counts["answered"] == 20


def test_servers_that_are_not_there_are_left_out(generate, sglang_servers, character_tokenizer, tmp_path):
    nowhere = type("Server", (), {"url": "http://127.0.0.1:1"})
    counts, rows = run(generate, tmp_path, [sglang_servers(), nowhere], wait=0.1)
    assert len(rows) == 80 and counts["servers_not_ready"] == ["http://127.0.0.1:1"]
    with pytest.raises(RuntimeError, match="no server was ready"):
        run(generate, tmp_path, [nowhere], wait=0.1)


def test_answers_end_with_the_end_token(generate):
    meta = {"finish_reason": {"type": "stop", "matched": 2}}
    assert generate.answer_of({"output_ids": [5, 6], "meta_info": meta}, {2}) == [5, 6, 2]
    assert generate.answer_of({"output_ids": [5, 2], "meta_info": meta}, {2}) == [5, 2]
    assert generate.answer_of({"output_ids": [5], "meta_info": {"finish_reason": {"type": "length"}}}, {2}) == [5]
    assert generate.answer_of({"output_ids": [5], "meta_info": {"finish_reason": {"type": "abort"}}}, {2}) is None
    assert generate.answer_of({"output_ids": [], "meta_info": meta}, {2}) is None


def test_client(client_module, sglang_servers):
    server = sglang_servers(context=30)

    async def go():
        client = client_module.Client(server.url)
        answers = await asyncio.gather(*(client.generate([i, 4], {"max_new_tokens": 5}) for i in range(20)))
        assert [len(answer["output_ids"]) for answer in answers] == [5] * 20
        with pytest.raises(client_module.Refused, match="status 400.*longer than the context") as error:
            await client.generate([1] * 30, {})
        assert error.value.status == 400
        assert (await client.json("/server_info"))["version"] == "0.5.17"
        batch = await client.generate([[1, 2], [3]], {"max_new_tokens": 3})
        assert [len(answer["output_ids"]) for answer in batch] == [3, 3]
        client.close()
        gone = client_module.Client("http://127.0.0.1:1")
        with pytest.raises(OSError):
            await gone.json("/health")

    asyncio.run(go())
    with pytest.raises(ValueError, match="must look like"):
        client_module.Client("https://example.org")


def test_chunked_answers(client_module):
    async def go():
        reader = asyncio.StreamReader()
        reader.feed_data(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
        assert await client_module.read_answer(reader) == (200, b"abcde", True)
        reader.feed_data(b"HTTP/1.1 404 No\r\nConnection: close\r\nContent-Length: 2\r\n\r\nno")
        assert await client_module.read_answer(reader) == (404, b"no", False)
        reader.feed_data(b"nonsense\r\n\r\n")
        with pytest.raises(ConnectionError, match="not an HTTP answer"):
            await client_module.read_answer(reader)

    asyncio.run(go())


def test_a_line_without_a_prompt_is_named(generate, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n{"question": "two"}\n')
    with pytest.raises(ValueError, match=r"record 2 of .* must have prompt or turns, got the keys \['question'\]"):
        generate.read_prompts(path)
