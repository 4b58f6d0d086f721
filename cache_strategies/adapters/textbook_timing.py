"""`python -m cache_strategies.adapters.textbook_timing`: what the textbook's cache saves, in tokens/s.

Random weights, which take as long as trained ones, and one thread. Seconds are the processor's own, so that other
programs on the machine count little. Knows the textbook and nothing else of this project.
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
    """Seconds of a processor to append `tokens` tokens to a prompt of one."""

    tokens: int
    cached: float
    uncached: float

    def format_row(self) -> str:
        """Return a line of the table: tokens per second with the cache and without, and how many times faster."""
        speeds = f"{self.tokens / self.cached:,.0f} | {self.tokens / self.uncached:,.0f}"
        return f"| {self.tokens:,} | {speeds} | {self.uncached / self.cached:.1f} × |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m cache_strategies.adapters.textbook_timing", description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 512], help="how many to generate")
    parser.add_argument("--d-model", type=int, default=256, help="width")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights, keys and values")
    options = parser.parse_args(arguments)
    if min(*options.tokens, options.d_model, options.layers, options.heads) < 1:
        parser.error("every number should be at least 1")
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
    """Generate the same text with a cache and without one."""
    prompt = torch.zeros(1, 1, dtype=torch.int64)
    for cache in (model.new_cache(1), None):
        model.generate(prompt, min(num_tokens, 4), cache)  # warm
    began = time.process_time()
    model.generate(prompt, num_tokens, model.new_cache(1))
    between = time.process_time()
    model.generate(prompt, num_tokens)
    return GenerationTiming(num_tokens, between - began, time.process_time() - between)


if __name__ == "__main__":
    main()
