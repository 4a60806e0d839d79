"""What the tests of the SGLang integration share: a tiny configuration, and a stand-in for a server that speaks real HTTP."""

import asyncio
import contextlib
import gzip
import json
import random
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import load_example

from dspine.configuration_dspine import DSpineConfig


BLOCK, MASK_ID = 6, 96


def example(name):
    """A fixture with a module of `examples/`, which sees its neighbours."""

    @pytest.fixture
    def module():
        load_example("sglang_client")
        load_example("sglang_checks")
        return load_example(name)

    return module


def tiny_config(**overrides) -> DSpineConfig:
    fields = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "block_size": BLOCK,
        "mask_token_id": MASK_ID,
        "num_target_layers": 6,
        "target_layer_ids": [1, 3],
        "transfer_rank": 8,
        "num_candidates": 8,
        "architectures": ["DSpineModel"],
    }
    return DSpineConfig(**(fields | overrides))


def answer_tokens(prompt: list[int], sampling: dict, seed, skew=0.0) -> list[int]:
    """What the stand-in generates: a function of the prompt alone at temperature 0."""
    count = sampling.get("max_new_tokens", 8)
    if not sampling.get("temperature"):
        seed, skew = str(prompt), 0.0
    draw = random.Random(seed)
    return [3 if skew and draw.random() < skew else draw.randrange(3, 7) for _ in range(count)]


class FakeSGLang:
    """SGLang's HTTP interface as far as the examples use it, in a thread of its own.

    Args:
        context: longest prompt and answer together; a longer request is refused with status 400.
        delay: seconds per answer.
        leak: tokens that the KV pool never gets back for every aborted or disconnected request.
        wrong_after: answers given before greedy ones turn wrong; None: never.
        rounds: tokens of every verification round; None: a server without drafter.
        skew: how often a sampled token is the first one instead of one of four.
        trace: events that the profiler writes once an answer was given after its start; None: it never writes.
        port: 0 takes a free one.
    """

    def __init__(self, context=256, delay=0.0, leak=0, wrong_after=None, rounds=2, skew=0.0, trace=None, port=0):
        self.context, self.delay, self.leak, self.wrong_after, self.rounds = context, delay, leak, wrong_after, rounds
        self.now = self.most = self.answered = self.leaked = self.refused = self.aborted = self.left = 0
        self.asked, self.active, self.serial = [], {}, 0
        self.skew, self.trace, self.trace_folder = skew, trace, None
        self._loop = asyncio.new_event_loop()
        started = threading.Event()

        def serve():
            asyncio.set_event_loop(self._loop)
            self._server = self._loop.run_until_complete(asyncio.start_server(self._connection, "127.0.0.1", port))
            started.set()
            self._loop.run_forever()
            self._server.close()
            tasks = asyncio.all_tasks(self._loop)
            [task.cancel() for task in tasks]
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.close()

        self._thread = threading.Thread(target=serve, daemon=True)
        self._thread.start()
        started.wait()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def close(self):
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # closed by itself since
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)

    async def _connection(self, reader, writer):
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                method, path = head.split()[:2]
                fields = dict(line.lower().split(":", 1) for line in head.split("\r\n")[1:] if ":" in line)
                data = await reader.readexactly(int(fields.get("content-length", 0)))
                await self._answer(method, path, data, reader, writer)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    def _reply(self, writer, status, body):
        data = json.dumps(body).encode() if body is not None else b""
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)

    async def _answer(self, method, path, data, reader, writer):
        if path.startswith("/generate"):
            return await self._generate(data, reader, writer)
        if path.startswith("/v1/chat"):
            message = {"message": {"content": "text"}, "meta_info": {"spec_verify_ct": 2}}
            return self._reply(writer, 200, {"choices": [message], "usage": {"completion_tokens": 5}})
        if path.startswith("/v1/loads"):
            load = {"num_running_reqs": self.now, "num_waiting_reqs": 0, "num_used_tokens": self.now + self.leaked}
            return self._reply(writer, 200, {"loads": [load | {"max_total_num_tokens": 1000, "dp_rank": 0}]})
        if "server_info" in path:
            return self._reply(
                writer, 200, {"version": "0.5.17", "tp_size": 1, "secret": 1, "max_total_num_tokens": 1000}
            )
        if path.startswith("/start_profile") and self.trace is not None:
            self.trace_folder = Path(json.loads(data)["output_dir"])
            return self._reply(writer, 200, None)
        if path.startswith("/abort_request"):
            body = json.loads(data)
            every = body.get("abort_all", False)
            [event.set() for rid, event in self.active.items() if every or rid == body["rid"]]
            return self._reply(writer, 200, None)
        self._reply(writer, 200 if method in ("GET", "POST") else 405, {})

    async def _generate(self, data, reader, writer):
        try:
            body = json.loads(data)
            prompts, sampling = body["input_ids"], body.get("sampling_params") or {}
            single = not prompts or not isinstance(prompts[0], list)
            prompts = [prompts] if single else prompts
            sampling = [sampling] * len(prompts) if isinstance(sampling, dict) else sampling
            for ids, one in zip(prompts, sampling):
                if not ids or not all(isinstance(token, int) and 0 <= token < 50000 for token in ids):
                    raise ValueError("input_ids must be token ids")
                if len(ids) + int(one.get("max_new_tokens", 8)) > self.context:
                    raise ValueError("longer than the context")
                if float(one.get("temperature", 0)) < 0:
                    raise ValueError("temperature must not be negative")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.refused += 1
            return self._reply(writer, 400, {"error": {"message": str(error)}})
        self.asked.append(body)
        self.now += len(prompts)
        self.most = max(self.most, self.now)
        rid, event = body.get("rid") or f"own-{len(self.asked)}", asyncio.Event()
        self.active[rid] = event
        try:
            aborted = await self._wait(event, reader, writer, body.get("stream"))
        finally:
            self.now -= len(prompts)
            self.active.pop(rid, None)
        answers = []
        for ids, one in zip(prompts, sampling):
            self.serial += 1
            tokens = answer_tokens(ids, one, self.serial, self.skew)
            wrong = self.wrong_after is not None and self.answered >= self.wrong_after
            if wrong and not one.get("temperature"):
                tokens = [token + 1 for token in tokens]
            self.answered += 1
            reason = {"type": "abort"} if aborted else {"type": "length", "length": len(tokens)}
            meta = {"completion_tokens": len(tokens), "finish_reason": reason, "id": rid}
            if self.rounds:
                meta["spec_verify_ct"] = -(-(len(tokens) - 1) // self.rounds)
            answers.append({"output_ids": tokens, "meta_info": meta})
        if self.trace_folder is not None:
            with gzip.open(self.trace_folder / "1.trace.json.gz", "wt") as file:
                json.dump({"traceEvents": self.trace}, file)
            self.trace_folder = None
        if body.get("stream"):
            writer.write(b"data: " + json.dumps(answers[0]).encode() + b"\n\ndata: [DONE]\n\n")
            await writer.drain()
            writer.close()
            raise ConnectionError
        self._reply(writer, 200, answers[0] if single else answers)

    async def _wait(self, event, reader, writer, stream) -> bool:
        """Waits for the answer's time, an abort or the client's leaving; True after an abort."""
        if stream:
            writer.write(b"HTTP/1.1 200 X\r\nConnection: close\r\n\r\ndata: {}\n\n")
            await writer.drain()
        for _ in range(max(1, round(self.delay / 0.005))):
            if self.delay:
                await asyncio.sleep(0.005)
            if event.is_set():
                self.aborted += 1
                self.leaked += self.leak
                return True
            if reader.at_eof():
                self.left += 1
                self.leaked += self.leak
                raise ConnectionError
        return False


def trace_of_rounds(rounds=4):
    """Events of a made-up trace: a draft graph of 30 kernels with a tail of 5, a verification graph of 100, a gap with one kernel."""
    events, now, correlation = [], 1000.0, 1

    def kernel(name, duration):
        nonlocal now
        events.append(
            {"cat": "kernel", "name": name, "ts": now, "dur": duration, "args": {"correlation": correlation}}
        )
        now += duration

    for _ in range(rounds):
        for i in range(25):
            kernel("RMSNormKernel" if i == 24 else "gemm", 2.0)
        for i in range(5):
            kernel(f"tail_{i}", 3.0)
        correlation += 1
        now += 4.0
        for _ in range(100):
            kernel("target", 1.0)
        correlation += 1
        now += 5.0
        kernel("commit", 6.0)
        correlation += 1
        now += 10.0
    events.append({"cat": "cpu_op", "name": "x", "ts": 0, "dur": 1})
    random.Random(0).shuffle(events)
    return events


def fake_tokenizer():
    """As much of a tokenizer as the examples use: one token for each character."""

    class Tokenizer:
        eos_token_id = 2

        def apply_chat_template(self, messages, tokenize=True, **kwargs):
            text = messages[0]["content"]
            return [ord(c) % 90 + 3 for c in text] if tokenize else text

        def __call__(self, texts, add_special_tokens=True):
            ids = [[ord(c) % 90 + 3 for c in text] for text in ([texts] if isinstance(texts, str) else texts)]
            return SimpleNamespace(input_ids=ids[0] if isinstance(texts, str) else ids)

    return Tokenizer()
