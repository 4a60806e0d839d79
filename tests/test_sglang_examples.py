"""The serving examples against a stand-in for the server: no SGLang, no GPU, real HTTP."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from conftest import load_example


@pytest.fixture
def server():
    """Answers like `/generate`: four tokens in two rounds; refuses prompts that start with 13; counts what is in flight."""
    state = SimpleNamespace(now=0, most=0, lock=threading.Lock(), asked=[])

    class Handler(BaseHTTPRequestHandler):
        def reply(self, status, body):
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            self.reply(200, {"version": "0.5.17", "tp_size": 1, "secret": 1} if "info" in self.path else {})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with state.lock:
                state.now += 1
                state.most = max(state.most, state.now)
                state.asked.append(body)
            threading.Event().wait(0.02)
            with state.lock:
                state.now -= 1
            if body["input_ids"][0] == 13:
                return self.reply(400, {"error": "too long"})
            tokens = [body["input_ids"][0]] * 5
            self.reply(200, {"output_ids": tokens, "meta_info": {"completion_tokens": 5, "spec_verify_ct": 2}})

        def log_message(self, *args):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    state.url = f"http://127.0.0.1:{http.server_address[1]}"
    yield state
    http.shutdown()


@pytest.fixture
def benchmark():
    load_example("serve_sglang")
    return load_example("benchmark_sglang")


def test_concurrency_is_kept(server, benchmark):
    answers, seconds = benchmark.run(server.url, [[i, 1] for i in range(20, 44)], {"temperature": 0.0}, 6)
    assert server.most == 6 and [answer["output_ids"][0] for answer in answers] == list(range(20, 44))
    figures = benchmark.summarise(answers, seconds)
    assert figures["errors"] == 0 and figures["output_tokens"] == 24 * 5 and figures["rounds"] == 48
    assert figures["accepted_length"] == figures["accepted_length_per_request"] == 2.0
    assert figures["tokens_per_second"] == pytest.approx(24 * 5 / seconds)


def test_errors_are_counted(server, benchmark):
    answers, seconds = benchmark.run(server.url, [[13], [14]], {}, 1)
    assert "answered 400" in answers[0]["error"] and "too long" in answers[0]["error"]
    assert benchmark.summarise(answers, seconds)["errors"] == 1


def test_servers_without_drafter(benchmark):
    answers = [
        {"latency": 1.0, "meta_info": {"completion_tokens": 5}},
        {"latency": 2.0, "meta_info": {"completion_tokens": 5}},
    ]
    figures = benchmark.summarise(answers, 2.0)
    assert figures["rounds"] == 0 and "accepted_length" not in figures and figures["tokens_per_second"] == 5


def test_comparison_of_two_servers(benchmark):
    one = [{"concurrency": 1, "tokens": [[1, 2, 3], [4, 5], [6]]}, {"concurrency": 8, "tokens": [[1]]}]
    other = [{"concurrency": 1, "tokens": [[1, 2, 3], [4, 6], [6, 7]]}]
    assert benchmark.compare(one, other) == [{"concurrency": 1, "equal": 1, "first_differences": [1, 1]}]


def test_whole_run(server, benchmark, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    tokenizer = SimpleNamespace(apply_chat_template=lambda messages, **kwargs: [len(messages[0]["content"]), 2, 3])
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: tokenizer)
    (tmp_path / "a.jsonl").write_text('{"turns": ["one"]}\n{"turns": ["three"]}\n')
    (tmp_path / "b.jsonl").write_text('{"turns": ["four", "unused"]}\n')
    out = tmp_path / "out.json"
    arguments = ["--target", "t", "--url", server.url, "--prompts", str(tmp_path), "--concurrency", "1", "2"]
    benchmark.main([*arguments, "--requests", "2", "--output", str(out), "--keep-tokens"])
    result = json.loads(out.read_text())
    assert [one["concurrency"] for one in result["runs"]] == [1, 2]
    assert [prompt[0] for prompt in result["runs"][1]["prompts"]] == [3, 4, 5, 4]
    assert result["server"] == {"version": "0.5.17", "tp_size": 1}
    benchmark.main([*arguments, "--requests", "2", "--output", str(out), "--keep-tokens", "--compare-with", str(out)])
    assert [pair["first_differences"] for pair in json.loads(out.read_text())["comparison"]] == [[], []]
    with pytest.raises(ValueError, match="found none"):
        benchmark.load_prompts(tmp_path / "nothing", 1)


def test_server_command():
    serve = load_example("serve_sglang")
    args = serve.parse_arguments(["--target", "T", "--drafter", "D", "--draft-tokens", "8", "--", "--tp", "2"])
    command = serve.server_command(args)
    assert command[1:5] == ["-m", "sglang.launch_server", "--model-path", "T"]
    assert command[-8:] == ["--speculative-algorithm", "DSPINE", "--speculative-draft-model-path", "D"] + [
        "--speculative-num-draft-tokens", "8", "--tp", "2",
    ]  # fmt: skip
    assert "--speculative-algorithm" not in serve.server_command(serve.parse_arguments(["--target", "T"]))


def test_a_server_that_ends_is_reported(monkeypatch):
    serve = load_example("serve_sglang")
    with pytest.raises(RuntimeError, match="ended with status 3 before it was ready"):
        serve.wait_until_ready("http://127.0.0.1:1", SimpleNamespace(poll=lambda: 3, returncode=3), 5)


def test_accepted_length():
    serve = load_example("serve_sglang")
    assert serve.accepted_length({"completion_tokens": 13, "spec_verify_ct": 4}) == 3.0
    assert serve.accepted_length({"completion_tokens": 13}) is None
