"""Serves a target with a DSpine drafter in stock SGLang, warms it up, asks three questions and reports how drafting went.

    pip install "dspine[sglang]"        # into the environment that SGLang is installed in
    python examples/serve_sglang.py --target TARGET --drafter DRAFTER [--keep] [-- any option of sglang.launch_server]

Without `--drafter` the target is served alone. `--keep` leaves the server running for other clients (`benchmark_sglang.py`) until
the script is interrupted. Needs a CUDA GPU.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request


QUESTIONS = [
    "A pen costs 3 dollars and a notebook costs 5 dollars. How much do 4 pens and 2 notebooks cost?",
    "Write a Python function that returns the largest of three numbers.",
    "Why is the sky blue? Answer in three sentences.",
]


def request(url: str, body: dict | None = None, timeout: float = 600.0):
    """The JSON answer of a server, None if it has no body.

    Raises:
        RuntimeError: the server answered with an error; the message holds its text.
        OSError: no server answered.
    """
    data = None if body is None else json.dumps(body).encode()
    call = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(call, timeout=timeout) as answer:
            text = answer.read()
    except urllib.error.HTTPError as error:
        detail = error.read().decode(errors="replace")[:500]
        raise RuntimeError(f"{url} answered {error.code}: {detail}") from error
    return json.loads(text) if text.strip() else None


def accepted_length(meta: dict) -> float | None:
    """Tokens committed per verification round, the target's own included; None for a request without rounds.

    The first token of an answer comes from the prefill and belongs to no round.
    """
    rounds = meta.get("spec_verify_ct") or 0
    return (meta["completion_tokens"] - 1) / rounds if rounds else None


def server_command(args: argparse.Namespace) -> list[str]:
    """The command that starts the server."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", args.target]
    command += ["--host", args.host, "--port", str(args.port)]
    if args.drafter:
        command += ["--speculative-algorithm", args.algorithm, "--speculative-draft-model-path", args.drafter]
    if args.draft_tokens:
        command += ["--speculative-num-draft-tokens", str(args.draft_tokens)]
    return command + args.options


def wait_until_ready(url: str, server: subprocess.Popen, limit: float) -> float:
    """Seconds until the server answers `/health`.

    Raises:
        RuntimeError: it ended or did not answer in time.
    """
    start = time.monotonic()
    while time.monotonic() - start < limit:
        if server.poll() is not None:
            raise RuntimeError(
                f"the server ended with status {server.returncode} before it was ready; its log says why"
            )
        try:
            request(f"{url}/health", timeout=5)
            return time.monotonic() - start
        except (OSError, RuntimeError):
            time.sleep(1)
    raise RuntimeError(f"the server was not ready after {limit:.0f} s")


def stop(server: subprocess.Popen) -> None:
    """Ends the server and the processes that it started: they share its group."""
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    argv = sys.argv[1:] if argv is None else argv
    # what follows `--` is the server's
    own, options = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or Hub id")
    parser.add_argument(
        "--drafter", help="folder or Hub id of a DSpine checkpoint (or of a DFlash one, see --algorithm)"
    )
    parser.add_argument("--algorithm", default="DSPINE", help="DFLASH serves a DFlash checkpoint for comparison")
    parser.add_argument(
        "--draft-tokens", type=int, help="slots per block, the anchor included; at most those of training"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--start-limit", type=float, default=600.0, help="seconds to wait for the server")
    parser.add_argument("--keep", action="store_true", help="leave the server running until interrupted")
    args = parser.parse_args(own)
    args.options = options
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    url = f"http://{args.host}:{args.port}"
    command = server_command(args)
    print("starting:", " ".join(command), flush=True)
    server = subprocess.Popen(command, start_new_session=True)
    try:
        print(f"ready after {wait_until_ready(url, server, args.start_limit):.0f} s", flush=True)
        sampling = {"temperature": args.temperature, "max_tokens": args.max_new_tokens}
        for question in [QUESTIONS[0], *QUESTIONS]:  # the first one once more: it warms up
            body = {"model": args.target, "messages": [{"role": "user", "content": question}], **sampling}
            start = time.monotonic()
            # SGLang reports rounds only where it is asked for its own figures
            answer = request(f"{url}/v1/chat/completions", body | {"return_meta_info": True})
            seconds = time.monotonic() - start
            choice = answer["choices"][0]
            tokens, length = answer["usage"]["completion_tokens"], accepted_length(choice.get("meta_info") or {})
            print(f"\n> {question}\n{choice['message']['content'].strip()}")
            drafted = "" if length is None else f", accepted length {length:.2f}"
            print(f"[{tokens} tokens, {tokens / seconds:.0f} tokens/s{drafted}]", flush=True)
        if args.keep:
            print(f"\nserving at {url}; interrupt to stop", flush=True)
            server.wait()
    except KeyboardInterrupt:
        pass
    finally:
        stop(server)


if __name__ == "__main__":
    main()
