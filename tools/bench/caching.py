"""`python -m tools.bench.caching`: measures tokens per second of one sequence with each strategy and without a cache.

Runs the model and the caches without HTTP and without other sequences, to measure the caches alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, get_args

from config.errors import SettingsError
from config.settings import ModelImpl, load_settings
from server.engine.build import Engine, build_engine
from server.engine.ipc.messages import SamplingParams, Submit, Tokens
from server.models.no_cache import debug_generate_full_context

LENGTHS = (64, 256, 1024)
FULL_CONTEXT = "full context"


class CachingResult(NamedTuple):
    """The speed at which a strategy generates `tokens` tokens after a prompt of one token."""

    strategy: str
    tokens: int
    tokens_per_second: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.caching", description=__doc__)
    parser.add_argument("--model", default="tiny", help="as for `kvmux serve` (default: the embedded one)")
    parser.add_argument("--model-impl", default="auto", choices=get_args(ModelImpl), help="implementation of the model")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument("--tokens", type=int, nargs="+", default=LENGTHS, help="numbers of tokens to generate")
    parser.add_argument("--json", action="store_true", help="print one JSON line per figure instead of a table")
    options = parser.parse_args(arguments)
    try:
        names = ("model", "model_impl", "dtype", "threads")
        flags = {name: getattr(options, name) for name in names} | {"max_num_seqs": 4}
        engine = build_engine(load_settings(None, flags))
    except SettingsError as error:
        parser.error(str(error))
    if max(options.tokens) > engine.max_seq_len:
        parser.error(f"--tokens: the model's context is {engine.max_seq_len} tokens")
    results = measure(engine, options.tokens)
    print("\n".join(json.dumps(r._asdict()) for r in results) if options.json else format_table(results))


def measure(engine: Engine, lengths: Sequence[int]) -> list[CachingResult]:
    """Measure every strategy, and generation without a cache, at every length; show progress on stderr."""
    runs: dict[str, Callable[[int], object]] = {
        name: partial(generate_cached, engine, name) for name in engine.core.instances
    }
    runs[FULL_CONTEXT] = partial(debug_generate_full_context, engine.core.model, [0])
    results = []
    for length in lengths:
        for name, generate_tokens in runs.items():
            print(f"\r{name}, {length} tokens ...\033[K", end="", file=sys.stderr, flush=True)
            generate_tokens(8)  # warm
            start = time.perf_counter()
            generate_tokens(length)
            results.append(CachingResult(name, length, length / (time.perf_counter() - start)))
    print("\r\033[K", end="", file=sys.stderr)
    return results


def generate_cached(engine: Engine, strategy: str, num_tokens: int) -> list[int]:
    """Return `num_tokens` token ids that a strategy generates greedily after token 0, one step each."""
    sampling = SamplingParams(num_tokens, temperature=0.0, ignore_eos=True)
    engine.core.submit(0, Submit("it", [0], sampling, kv_cache=strategy))
    tokens: list[int] = []
    while engine.core.busy:
        for _, message in engine.core.step().events:
            tokens += message.tokens if isinstance(message, Tokens) else []
    return tokens


def format_table(results: Sequence[CachingResult]) -> str:
    """Return a Markdown table: a row per strategy, a column per length; cells are tokens/s (speedup over no cache)."""
    lengths = sorted({r.tokens for r in results})
    speed = {(r.strategy, r.tokens): r.tokens_per_second for r in results}
    lines = ["| tokens/s | " + " | ".join(f"{n:,} tokens" for n in lengths) + " |", "|---|" + "---:|" * len(lengths)]
    for name in dict.fromkeys(r.strategy for r in results):
        cells = (f"{speed[name, n]:,.0f} ({speed[name, n] / speed[FULL_CONTEXT, n]:.1f} ×)" for n in lengths)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
