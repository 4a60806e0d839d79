"""What a run is given: `NAME=VALUE` entries and prompts; and what its results call them."""

from collections import defaultdict
from pathlib import Path

from dspine.integrations.evaluation import BENCHMARKS, Prompt, load_prompts, load_token_prompts


THINKING = {"off": False, "on": True, "template": None}


def named(entries: list[str]) -> dict[str, str]:
    """`NAME=VALUE` entries; a value without a name is called by its last part."""
    result = {}
    for entry in entries:
        name, _, value = entry.partition("=") if "=" in entry else (Path(entry).name, "", entry)
        if name in result:
            raise ValueError(f"two entries are called {name!r}; give them different names (NAME=VALUE)")
        if not value:
            raise ValueError(f"expected NAME=VALUE, got {entry!r}")
        result[name] = value
    return result


def read_prompts(args, tokenizer) -> list:
    """All prompts, the sets taken in turns, so that a run that is cut has some of each."""
    if args.prompts is not None:
        names = None if args.datasets == list(BENCHMARKS) else args.datasets
        prompts = load_token_prompts(args.prompts, names, args.max_samples)
    else:
        prompts = load_prompts(
            args.datasets,
            tokenizer,
            args.bench_dir,
            args.max_samples,
            None if args.prompt_seed < 0 else args.prompt_seed,
            THINKING[args.thinking],
            args.max_prompt_tokens,
        )
    if not prompts:
        raise ValueError("no prompts are left; check --datasets, --max-samples and --max-prompt-tokens")
    place = defaultdict(int)
    order = []
    for prompt in prompts:
        order.append(place[prompt.dataset])
        place[prompt.dataset] += 1
    return [prompts[i] for i in sorted(range(len(prompts)), key=lambda i: order[i])]


def name_of_target(path: str) -> str:
    """What results call a target: the name of its folder, without the path to it, or its Hub id."""
    return Path(path).resolve().name if Path(path).is_dir() else path


def request_fields(prompt: Prompt, temperature: float, seed: int, concurrency: int | None) -> dict:
    """What a record says of what was asked."""
    return {
        "dataset": prompt.dataset,
        "index": prompt.index,
        "prompt": prompt.digest,
        "temperature": temperature,
        "seed": seed,
        "concurrency": concurrency,
    }
