"""A running server as a decoder: SGLang's own `/generate`, or any OpenAI-compatible `/v1/completions`.

Prompts are sent as token ids, so that the template is the one used everywhere else. SGLang tells how many verification passes a
request took (`spec_verify_ct`) and a histogram of accepted drafts; a server that tells nothing still gives tokens per second.
"""

import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from .acceptance import lengths_of_histogram


@dataclass
class Served:
    """One answer of a server.

    Args:
        new_tokens: tokens generated, as the server counts them.
        output_ids: None if the server returns text only.
        rounds: verification passes; None if the server does not tell.
        accepted_lengths: tokens of every round, in no particular order; None without a histogram.
        seconds: from sending the request to the last byte.
    """

    new_tokens: int
    output_ids: list[int] | None
    rounds: int | None
    accepted_lengths: list[int] | None
    seconds: float


class Server:
    """Client of one server.

    Args:
        url: base address, e.g. `http://127.0.0.1:30000`.
        api: `"sglang"` (native) or `"openai"`.
        timeout: seconds a request may take.
    """

    def __init__(self, url: str, api: str = "sglang", timeout: float = 600.0):
        if api not in ("sglang", "openai"):
            raise ValueError(f"api must be 'sglang' or 'openai', got {api!r}")
        self.url, self.api, self.timeout = url.rstrip("/"), api, timeout
        self._model: str | None = None

    def _request(self, path: str, body: dict | None = None, timeout: float | None = None) -> dict:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout or self.timeout) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")[:300]
            raise RuntimeError(f"{self.url}{path} answered {error.code}: {detail}") from None
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            raise RuntimeError(f"{self.url}{path} cannot be reached ({getattr(error, 'reason', error)})") from None
        except json.JSONDecodeError:
            raise RuntimeError(f"{self.url}{path} did not answer with JSON") from None

    def info(self) -> dict:
        """What the server says about itself, reduced to what results depend on; empty if it says nothing.

        Raises:
            RuntimeError: the server cannot be reached.
        """
        raw, problem = {}, None
        for path in ("/server_info", "/get_server_info", "/v1/models"):
            try:
                raw = self._request(path, timeout=30)
                break
            except RuntimeError as error:
                problem = error
                if "cannot be reached" in str(error):
                    raise
        if not raw and problem is not None:
            return {}
        kept = ("version", "model_path", "dtype", "tp_size", "attention_backend", "max_running_requests", "id")
        if isinstance(raw.get("data"), list) and raw["data"]:  # a list of models
            raw = raw["data"][0]
        return {k: v for k, v in raw.items() if k in kept or (k.startswith("speculative_") and v is not None)}

    def flush_cache(self) -> None:
        """Empties SGLang's prefix cache, so that a repeated prompt costs its prefill again; ignored where there is none."""
        try:
            self._request("/flush_cache", {}, timeout=30)
        except RuntimeError:
            pass

    def generate(
        self, input_ids: list[int], max_new_tokens: int, temperature: float = 0.0, seed: int | None = None
    ) -> Served:
        """One request.

        Raises:
            RuntimeError: the server cannot be reached or refuses; the message holds its answer.
        """
        began = time.perf_counter()
        if self.api == "sglang":
            sampling = {"temperature": temperature, "max_new_tokens": max_new_tokens}
            if temperature > 0:
                sampling |= {"top_p": 1.0, "top_k": -1} | ({} if seed is None else {"sampling_seed": seed})
            raw = self._request("/generate", {"input_ids": input_ids, "sampling_params": sampling})
            meta, ids = raw.get("meta_info") or {}, raw.get("output_ids")
            count = meta.get("completion_tokens", len(ids or ()))
        else:
            if self._model is None:
                self._model = self._request("/v1/models", timeout=30)["data"][0]["id"]
            body = {
                "model": self._model,
                "prompt": input_ids,
                "max_tokens": max_new_tokens,
                "temperature": temperature,
                "top_p": 1.0,
                "return_meta_info": True,
            }
            raw = self._request("/v1/completions", body | ({} if seed is None or not temperature else {"seed": seed}))
            choice = (raw.get("choices") or [{}])[0]
            meta, ids = choice.get("meta_info") or raw.get("meta_info") or {}, choice.get("output_ids")
            count = (raw.get("usage") or {}).get("completion_tokens", 0)
        rounds, histogram = meta.get("spec_verify_ct") or None, meta.get("spec_accept_histogram")
        lengths = lengths_of_histogram(histogram) if histogram else None
        return Served(int(count), ids, rounds, lengths, time.perf_counter() - began)

    def load(
        self, prompts, concurrency: int, max_new_tokens: int, temperature: float = 0.0, seeds=None, advance=None
    ) -> tuple[list[Served], float]:
        """All prompts with `concurrency` requests under way at a time; the answers in the order of the prompts, and the seconds taken."""
        seeds = seeds or [None] * len(prompts)

        def one(pair):
            answer = self.generate(pair[0].input_ids, max_new_tokens, temperature, pair[1])
            if advance is not None:
                advance()
            return answer

        began = time.perf_counter()
        with ThreadPoolExecutor(max_workers=concurrency) as pool:
            answers = list(pool.map(one, zip(prompts, seeds)))
        return answers, time.perf_counter() - began


__all__ = ["Served", "Server"]
