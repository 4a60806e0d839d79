"""The load test's client, against a stand-in for a server that can leak, answer wrongly, or go away."""

import json
import threading

import pytest
from conftest import load_example


@pytest.fixture
def stress():
    load_example("sglang_client")
    return load_example("stress_sglang")


@pytest.fixture
def run(stress, sglang_servers, tmp_path):
    def go(during=None, requests=300, options=(), **server_options):
        server = sglang_servers(**{"delay": 0.01, "context": 256} | server_options)
        if during is not None:
            threading.Timer(0.3, during, [server]).start()
        arguments = ["--url", server.url, "--output", str(tmp_path / "stress.json"), "--requests", str(requests)]
        arguments += ["--concurrency", "16", "--vocabulary", "900", "--max-prompt-tokens", "100", "--linger", "0.2"]
        arguments += ["--max-new-tokens", "40", "--context-length", "256", "--canaries", "4", "--canary-tokens", "6"]
        arguments += ["--patience", "0.01", "--settle", "1", "--timeout", "5", "--canary-share", "0.2", *options]
        result = stress.main(arguments)
        assert json.loads((tmp_path / "stress.json").read_text()) == json.loads(json.dumps(result))
        return result, server

    return go


def test_a_healthy_server_passes(run):
    result, server = run()
    assert result["passed"], result["failures"]
    assert sum(count for name, count in result["kinds"].items() if name != "not sent") == 300
    assert {"ordinary", "canary", "abort", "leave-stream", "leave", "too-long", "malformed"} <= set(result["kinds"])
    assert server.most > 8 and server.aborted and server.left and server.refused
    outcomes = result["outcomes"]
    assert outcomes["canary: same text"] == result["canaries"]["asked"] > 10 and result["canaries"]["parted"] == 0
    assert outcomes["too-long: refused 400"] + outcomes["malformed: refused 400"] == server.refused
    assert result["pool_before"] == result["pool_after"]
    assert result["output_tokens"] > 0 and result["latency_median"] >= 0.01


def test_a_leak_is_found(run):
    result, _ = run(leak=3)
    assert not result["passed"] and any("KV pool did not become empty" in text for text in result["failures"])
    assert result["pool_after"]["num_used_tokens"] > 0


def test_wrong_answers_are_found(run):
    result, _ = run(wrong_after=100)
    assert not result["passed"] and any(
        "canaries asked alone were answered in another way" in text for text in result["failures"]
    )
    assert result["canaries"]["parted"] > 0 and result["canaries"]["parted_texts"]


def test_a_server_that_goes_away_is_found(run):
    result, _ = run(lambda server: server.close(), requests=3000, options=["--timeout", "1"])
    assert not result["passed"] and "cannot be used" in result["failures"][0]


def test_answers_that_break_the_request_are_found(stress):
    args = stress.parse_arguments(["--output", "x", "--vocabulary", "50"])
    load = stress.Load(None, args, [])
    sampling = {"max_new_tokens": 3}

    def reply(ids, reason="length"):
        return {"output_ids": ids, "meta_info": {"finish_reason": {"type": reason}}}

    assert load.checked(reply([1, 2, 3]), sampling) == "answered"
    assert load.checked(reply([1], "stop"), sampling) == "answered"
    for ids, reason in (([], "stop"), ([1, 2, 3, 4], "length"), ([99], "stop"), ([1], "length"), ([1], "abort")):
        with pytest.raises(ValueError):
            load.checked(reply(ids, reason), sampling)


def test_lengths_cover_the_range(stress):
    args = stress.parse_arguments(["--output", "x", "--vocabulary", "50", "--max-prompt-tokens", "200"])
    load = stress.Load(None, args, [])
    lengths = sorted(len(load.prompt()) for _ in range(2000))
    assert lengths[0] == 1 and lengths[-1] > 180 and 8 < lengths[1000] < 25
    assert all(10 <= token < 50 for token in load.prompt(50))
    settings = [load.sampling() for _ in range(500)]
    assert {0.0, 0.5, 0.7, 1.0, 1.3} == {one["temperature"] for one in settings}
    assert max(one["max_new_tokens"] for one in settings) <= 256


def test_gap_of_texts_that_part(stress, monkeypatch):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    class Target(torch.nn.Module):
        def forward(self, ids):
            logits = torch.arange(10.0).expand(*ids.shape, 10)
            return type("Out", (), {"logits": logits})

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda folder, dtype: Target())
    assert stress.tie_gaps("t", [([1], [2, 3], [2, 7]), ([1], [2], [2, 7])]) == [4.0, float("inf")]
