"""Benchmarks of drafters: prompts, decoding, results and reports. The report needs `pip install dspine[eval]`."""

from .acceptance import gain, mean_over_sets, summarise
from .decoding import (
    Decoded,
    NearTieCheck,
    decode_alone,
    decode_in_transformers_loop,
    decode_prompt_lookup,
    decode_with_drafter,
)
from .prompts import BENCHMARKS, Prompt, load_prompts, load_token_prompts
from .results import ResultStore, summarise_records
from .serving import Served, Server


__all__ = [
    "BENCHMARKS",
    "Decoded",
    "NearTieCheck",
    "Prompt",
    "ResultStore",
    "Served",
    "Server",
    "decode_alone",
    "decode_in_transformers_loop",
    "decode_prompt_lookup",
    "decode_with_drafter",
    "gain",
    "load_prompts",
    "load_token_prompts",
    "mean_over_sets",
    "summarise",
    "summarise_records",
]
