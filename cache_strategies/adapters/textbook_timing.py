"""`python -m cache_strategies.adapters.textbook_timing`: the textbook model's speed with and without its KV cache.

Uses random weights, which take as long as trained ones, and one thread. Measures CPU time, so that other programs on
the machine matter little. Knows the textbook and nothing else of this project.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from cache_strategies.adapters.textbook import GPTWithCache

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class GenerationTiming(NamedTuple):
    """The CPU seconds that it took to append `tokens` tokens to a prompt of one token, with and without the cache."""

    tokens: int
    cached: float
    uncached: float

    def format_row(self) -> str:
        """Return a row of the Markdown table: tokens/s with the cache and without, and their ratio."""
        speeds = f"{self.tokens / self.cached:,.0f} | {self.tokens / self.uncached:,.0f}"
        return f"| {self.tokens:,} | {speeds} | {self.uncached / self.cached:.1f} × |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m cache_strategies.adapters.textbook_timing", description=__doc__)
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[64, 256, 512],
        help="numbers of tokens to generate, measured one after the other",
    )
    parser.add_argument("--d-model", type=int, default=256, help="width of the model (d_model)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of weights, keys and values")
    options = parser.parse_args(arguments)
    if min(*options.tokens, options.d_model, options.layers, options.heads) < 1:
        parser.error("--tokens, --d-model, --layers and --heads should be at least 1")
    if options.d_model % options.heads:
        parser.error(f"--heads {options.heads} does not divide --d-model {options.d_model}")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    longest = max(options.tokens)
    model = GPTWithCache(512, options.d_model, options.heads, options.layers, longest).to(DTYPES[options.dtype]).eval()
    print("| tokens | with the cache, tokens/s | without, tokens/s | faster |\n|---:|---:|---:|---:|")
    for num_tokens in options.tokens:
        print(measure_generation(model, num_tokens).format_row(), flush=True)


def measure_generation(model: GPTWithCache, num_tokens: int) -> GenerationTiming:
    """Return the CPU times of generating the same tokens with a cache and without one."""
    prompt = torch.zeros(1, 1, dtype=torch.int64)
    for cache in (model.new_cache(1), None):
        model.generate(prompt, min(num_tokens, 4), cache)  # warm-up
    began = time.process_time()
    model.generate(prompt, num_tokens, model.new_cache(1))
    between = time.process_time()
    model.generate(prompt, num_tokens)
    return GenerationTiming(num_tokens, between - began, time.process_time() - between)


if __name__ == "__main__":
    main()
