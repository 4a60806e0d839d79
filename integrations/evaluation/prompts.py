"""The prompts of the seven benchmarks, built as papers on speculative decoding build them.

A prompt is a set's text under the target's chat template, first turn only, as token ids. Texts come from local files of
`{"turns": [text, ...]}` lines, or from the Hub through `datasets`, where the set's rows are put into the wording below.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path


MATH = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
HUMANEVAL = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"
LIVECODEBENCH = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a correct Python "
    "program that matches the specification and passes all tests. You will NOT return anything except for the program\n\n"
    "### Question:\n{question}\n\n### Format: {format}\n```python\n{code}\n```\n\n"
    "### Answer: (use the provided format with backticks)"
)


def _livecodebench(row: dict) -> list[str]:
    code = row.get("starter_code") or ""
    instruction = "Use the following code structure:" if code else "Write your code in the following format:"
    return [
        LIVECODEBENCH.format(question=row["question_content"], format=instruction, code=code or "# YOUR CODE HERE")
    ]


@dataclass(frozen=True)
class Benchmark:
    """Where a set is on the Hub, how a row becomes turns, and how many rows papers use at most."""

    path: str
    turns: Callable[[dict], list[str]]
    cap: int
    name: str | None = None
    split: str = "test"
    data_files: tuple[str, ...] = ()


BENCHMARKS = {
    "gsm8k": Benchmark("openai/gsm8k", lambda row: [MATH.format(row["question"])], 500, "main"),
    "math500": Benchmark("HuggingFaceH4/MATH-500", lambda row: [MATH.format(row["problem"])], 500),
    "humaneval": Benchmark("openai/openai_humaneval", lambda row: [HUMANEVAL.format(row["prompt"])], 164),
    "mbpp": Benchmark("google-research-datasets/mbpp", lambda row: [row["prompt"]], 256, "sanitized"),
    "livecodebench": Benchmark(
        "livecodebench/code_generation_lite",
        _livecodebench,
        500,
        # the repository's own loader is a script, which `datasets` no longer runs: its files are read directly
        data_files=tuple(f"test{part}.jsonl" for part in ("", 2, 3, 4, 5, 6)),
    ),
    "mt-bench": Benchmark("HuggingFaceH4/mt_bench_prompts", lambda row: list(row["prompt"]), 80, split="train"),
    "arena-hard-v2": Benchmark(
        "lmarena-ai/arena-hard-auto",
        lambda row: [row["prompt"]],
        500,
        data_files=("data/arena-hard-v2.0/question.jsonl",),
    ),
}


@dataclass
class Prompt:
    """One request: `input_ids` are the whole prompt, template included. `index` is the row's number in its set, `answer_length` how
    many tokens the target's own stored answer has, if there is one: prompts of like answers go into one batch."""

    dataset: str
    index: int
    input_ids: list[int]
    answer_length: int | None = None

    @property
    def digest(self) -> str:
        """Eight hex digits of the ids, so that a stored result is only reused for the same prompt."""
        return hashlib.sha256(",".join(map(str, self.input_ids)).encode()).hexdigest()[:8]


def read_turns(path: str | Path) -> list[list[str]]:
    """All rows of a file of `{"turns": [text, ...]}` lines.

    Raises:
        ValueError: a line is no such object; the message names file and line.
    """
    rows = []
    # not `splitlines`, which also splits at separators that JSON allows inside a string
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            turns = json.loads(line)["turns"]
        except (json.JSONDecodeError, KeyError, TypeError):
            turns = None
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise ValueError(f'{path} line {number} must be an object {{"turns": [text, ...]}}, got {line[:80]!r}')
        rows.append(turns)
    return rows


def hub_turns(name: str) -> list[list[str]]:
    """All rows (at most the set's cap) of one of [`BENCHMARKS`] from the Hub, in the set's order.

    Raises:
        ValueError: the set is unknown.
        ImportError: `datasets` is missing.
    """
    if name not in BENCHMARKS:
        raise ValueError(f"unknown benchmark {name!r}; available: {list(BENCHMARKS)}, or a folder with {name}.jsonl")
    try:
        import datasets
    except ImportError:
        raise ImportError(
            'reading a benchmark from the Hub requires the optional extra. Install it with `pip install "dspine[eval]"`'
        ) from None
    benchmark = BENCHMARKS[name]
    if benchmark.data_files:
        files = [f"hf://datasets/{benchmark.path}/{file}" for file in benchmark.data_files]
        # streamed: some files hold gigabytes of hidden tests that nobody reads here
        rows: Iterable[dict] = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
        rows = (row for row, _ in zip(rows, range(benchmark.cap)))
    else:
        rows = datasets.load_dataset(benchmark.path, benchmark.name, split=benchmark.split)
    return [benchmark.turns(row) for row in rows]


def select(count: int, limit: int | None, seed: int | None) -> list[int]:
    """Row numbers of a set to use: all if they are few enough, else `limit` of them, drawn with `seed` (None: the first ones)."""
    order = list(range(count))
    if limit is None or limit >= count:
        return order
    if seed is not None:
        random.Random(seed).shuffle(order)
    return sorted(order[:limit])


def template_options(tokenizer, thinking: bool | None) -> dict:
    """What to hand `apply_chat_template` so that thinking is on or off (None: as the template does by itself).

    Raises:
        ValueError: thinking is asked for, but the template has no such switch.
    """
    if thinking is None:
        return {}
    if "enable_thinking" in str(tokenizer.chat_template or ""):
        return {"enable_thinking": thinking}
    if thinking:
        raise ValueError("the target's chat template has no switch `enable_thinking`, so thinking cannot be turned on")
    return {}


def render(tokenizer, text: str, thinking: bool | None = False) -> list[int]:
    """Token ids of one user turn under the target's chat template, ready for the answer; of the bare text without a template."""
    if not tokenizer.chat_template:
        return tokenizer(text).input_ids
    message = [{"role": "user", "content": text}]
    options = template_options(tokenizer, thinking)
    whole = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False, **options)
    return tokenizer(whole, add_special_tokens=False).input_ids


def load_prompts(
    names: list[str],
    tokenizer,
    folder: str | Path | None = None,
    limit: int | None = None,
    seed: int | None = 42,
    thinking: bool | None = False,
    max_prompt_tokens: int | None = None,
) -> list[Prompt]:
    """The first turns of the named sets, from `folder/<name>.jsonl` or, without a folder, from the Hub.

    Args:
        limit: rows per set; default the cap that papers use.
        max_prompt_tokens: longer prompts are left out before rows are selected.

    Raises:
        ValueError: a set is unknown, or its file is malformed.
        FileNotFoundError: `folder` has no such file.
    """
    prompts = []
    for name in names:
        if folder is None:
            turns = hub_turns(name)
        else:
            path = Path(folder) / f"{name}.jsonl"
            if not path.is_file():
                have = sorted(file.stem for file in Path(folder).glob("*.jsonl"))
                raise FileNotFoundError(f"no file {name}.jsonl among the benchmarks of {folder}, which has {have}")
            turns = read_turns(path)
        rows = list(range(len(turns)))
        ids = {}
        if max_prompt_tokens is not None:
            ids = {index: render(tokenizer, turns[index][0], thinking) for index in rows}
            rows = [index for index in rows if len(ids[index]) <= max_prompt_tokens]
        cap = BENCHMARKS[name].cap if name in BENCHMARKS else None
        for i in select(len(rows), cap if limit is None else limit, seed):
            index = rows[i]
            # without a limit of length only what was selected is tokenised
            prompts.append(Prompt(name, index, ids.get(index) or render(tokenizer, turns[index][0], thinking)))
    return prompts


def load_token_prompts(path: str | Path, names: list[str] | None = None, limit: int | None = None) -> list[Prompt]:
    """Prompts that are token ids already: a parquet file with `input_ids`, `prompt_length` and `source`, the first `limit` rows of
    every source."""
    import pyarrow.parquet as parquet

    prompts, taken = [], {}
    for row in parquet.read_table(path, columns=["input_ids", "prompt_length", "source"]).to_pylist():
        index = taken.get(row["source"], 0)
        if (names is None or row["source"] in names) and (limit is None or index < limit):
            ids, length = [int(i) for i in row["input_ids"]], row["prompt_length"]
            prompts.append(Prompt(row["source"], index, ids[:length], len(ids) - length or None))
        taken[row["source"]] = index + 1
    return prompts


__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "Prompt",
    "hub_turns",
    "load_prompts",
    "load_token_prompts",
    "read_turns",
    "render",
    "select",
    "template_options",
]
