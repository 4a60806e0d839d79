"""The serving examples against a stand-in for the server: no SGLang, no GPU, real HTTP."""

import asyncio
import json
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from conftest import load_example


@pytest.fixture
def server():
    """Answers like `/generate`: four tokens in two rounds; refuses prompts that start with 13; counts what is in flight."""
    state = SimpleNamespace(now=0, most=0, aborted=0, lock=threading.Lock(), asked=[])

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
            if "abort" in self.path:
                state.aborted += body["abort_all"]
                return self.reply(200, {})
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
    load_example("sglang_client")
    return load_example("benchmark_sglang")


def busy(benchmark, url, prompts, concurrency, burst=1, seconds=0.5):
    async def run():
        client = benchmark.Client(url)
        try:
            return await benchmark.keep_busy(client, prompts, {"temperature": 0.0}, concurrency, burst, seconds)
        finally:
            client.close()

    return asyncio.run(run())


def test_concurrency_is_kept(server, benchmark):
    answers = busy(benchmark, server.url, [[i, 1] for i in range(20, 44)], 6)
    assert server.most == 6 and len(answers) > 24  # the prompts start again
    assert {body["input_ids"][0] for body in server.asked[:6]} == set(range(20, 26))
    figures = benchmark.summarise(answers, 0.1, 0.4)
    assert figures["errors"] == 0 and figures["in_flight"] == pytest.approx(6, rel=0.25)
    assert figures["accepted_length"] == pytest.approx(2.0) and server.aborted == 1
    latency = sorted(figures["latencies"])[len(figures["latencies"]) // 2]
    assert figures["tokens_per_second"] == pytest.approx(figures["in_flight"] * 4 / latency, rel=0.4)
    assert figures["tokens_per_second"] == pytest.approx(
        figures["in_flight"] * figures["accepted_length"] / figures["seconds_per_round"]
    )


def test_slots_are_filled_in_bursts(benchmark):
    order, sizes, last = random.Random(0), [], [-1.0]

    class Client:
        async def generate(self, ids, sampling):
            now = asyncio.get_running_loop().time()
            # those of one burst start before anything else can happen, thus within microseconds
            sizes.append(1) if now - last[0] > 0.002 else sizes.__setitem__(-1, sizes[-1] + 1)
            last[0] = now
            await asyncio.sleep(0.01 + 0.05 * order.random())
            return {"meta_info": {"completion_tokens": 1}}

        async def json(self, path, body):
            raise OSError("does not answer")

    asyncio.run(benchmark.keep_busy(Client(), [[1]], {}, 8, 4, 0.5))
    assert sizes[0] == 8 and max(sizes) <= 8 and len(sizes) > 4
    assert sum(size >= 4 for size in sizes) >= 0.8 * len(sizes), sizes


def test_what_lies_across_the_window_counts_by_its_share(benchmark):
    def answer(sent, answered, tokens, rounds=4, kind="stop", burst=0):
        meta = {"completion_tokens": tokens, "spec_verify_ct": rounds, "finish_reason": {"type": kind}}
        return {"sent": sent, "answered": answered, "burst": burst, "meta": meta}

    answers = [answer(0, 2, 11), answer(1, 3, 12, 5, burst=1), answer(3, 5, 11, burst=2), answer(5, 6, 11, burst=3)]
    answers += [answer(0, 0.5, 11), answer(2, 3.5, 7, 3, kind="abort", burst=1)]
    figures = benchmark.summarise(answers, 1, 4)
    assert figures["tokens_per_second"] == pytest.approx((5 + 11 + 5 + 6) / 3)
    assert figures["in_flight"] == pytest.approx(5.5 / 3) and figures["bursts"] == 2
    # what was aborted counts for rounds and tokens, not as an answer
    assert figures["requests"] == 2 and figures["latencies"] == [2, 2] and figures["tokens_per_request"] == [11, 12]
    assert figures["accepted_length"] == pytest.approx(27 / 12) and figures["seconds_per_round"] == pytest.approx(
        5.5 / 12
    )


def test_what_is_running_at_the_end_is_aborted(benchmark, sglang_servers):
    slow = sglang_servers(delay=5.0)
    began = time.monotonic()
    answers = busy(benchmark, slow.url, [[20, 1]], 3, burst=3, seconds=0.3)
    assert time.monotonic() - began < 3 and slow.aborted == 3
    assert [answer["meta"]["finish_reason"]["type"] for answer in answers] == ["abort"] * 3
    figures = benchmark.summarise(answers, 0.1, 0.3)
    assert figures["requests"] == figures["errors"] == 0 and figures["in_flight"] == pytest.approx(3, rel=0.2)


def test_a_speed_up_is_a_product(benchmark):
    def window(tokens, rounds, busy, bursts=4):
        figures = {
            "requests": 1,
            "errors": 0,
            "bursts": bursts,
            "in_flight": busy / 2,
            "tokens_per_second": tokens / 2,
        }
        figures |= {"accepted_length": tokens / rounds, "seconds_per_round": busy / rounds}
        return figures | {"tokens_per_request": [20], "latencies": [0.4]}

    plain = benchmark.together([window(200, 200, 4), window(210, 210, 4), window(100, 100, 4)], 2.0, 0.01)
    other = benchmark.together([window(400, 100, 4), window(404, 101, 4), window(500, 125, 4)], 2.0, 0.01)
    assert plain["tokens_per_second"] == 100 and plain["tokens_per_second_range"] == [50, 105]
    assert plain["accepted_length"] == 1 and plain["prefill_share_at_most"] == pytest.approx(0.02)
    assert plain["windows"] == 3 and plain["requests"] == 3 and plain["latency_median"] == 0.4
    ratios = benchmark.over_first(other, plain)
    assert ratios["tokens_per_second"] == pytest.approx(202 / 100)
    assert ratios["tokens_per_second"] == pytest.approx(ratios["accepted_length"] * ratios["rounds_per_second"])


def test_errors_are_counted(server, benchmark):
    answers = busy(benchmark, server.url, [[13]], 2, seconds=5)
    assert 2 < len(answers) < 6 and "status 400" in answers[0]["error"] and "too long" in answers[0]["error"]
    assert benchmark.summarise(answers, 0, 1)["errors"] == len(answers)


def test_servers_without_drafter(benchmark):
    answers = [{"sent": 0.0, "answered": 1.0, "burst": 0, "meta": {"completion_tokens": 5}}] * 2
    figures = benchmark.summarise(answers, 0.0, 2.0)
    assert figures["accepted_length"] == 1 and figures["tokens_per_second"] == 4
    assert figures["seconds_per_round"] == 0.25


def test_prompts_with_long_answers(benchmark):
    class Client:
        async def generate(self, ids, sampling):
            return {"meta_info": {"completion_tokens": min(ids[0], sampling["max_new_tokens"])}}

    def kept(least):
        prompts = [[3], [30], [10], [40]]
        return asyncio.run(benchmark.with_long_answers(Client(), prompts, {"max_new_tokens": 20}, least))

    assert kept(10) == [[30], [10], [40]] and kept(20) == [[30], [40]]
    with pytest.raises(ValueError, match="none of 4 has an answer of 21 tokens"):
        kept(21)


def test_whole_run(server, benchmark, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    tokenizer = SimpleNamespace(apply_chat_template=lambda messages, **kwargs: [len(messages[0]["content"]), 2, 3])
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: tokenizer)
    (tmp_path / "a.jsonl").write_text('{"turns": ["one"]}\n{"turns": ["three"]}\n')
    (tmp_path / "b.jsonl").write_text('{"turns": ["four", "unused"]}\n')
    out = tmp_path / "out.json"
    arguments = [
        "--target",
        "t",
        "--server",
        f"a={server.url}",
        f"b={server.url}",
        "--prompts",
        str(tmp_path),
        "--concurrency",
        "1",
        "2",
    ]
    arguments += ["--windows", "2", "--min-answer", "5", "--output", str(out)]
    benchmark.main([*arguments, "--seconds", "0.3", "--warm-up", "0.1"])
    result = json.loads(out.read_text())
    assert set(result["servers"]) == {"a", "b"} and result["prompts"] == 3
    found = result["servers"]["b"]
    assert [one["concurrency"] for one in found["runs"]] == [1, 2]
    assert {body["input_ids"][0] for body in server.asked[:3]} == {3, 4, 5}
    assert found["facts"] == {"version": "0.5.17", "tp_size": 1} and found["one_token_seconds"] > 0.01
    assert all(one["tokens_per_second"] > 0 and one["windows"] == 2 for one in found["runs"])
    assert all(one["over_first"]["accepted_length"] == pytest.approx(1) for one in found["runs"])
    assert "over_first" not in result["servers"]["a"]["runs"][0]
    assert benchmark.load_prompts(tmp_path, 2) == ["one", "four"]
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
