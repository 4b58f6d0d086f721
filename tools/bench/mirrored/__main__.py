"""`python -m tools.bench.mirrored`: what a repeated, head-major mirror of the KV cache costs, beside reading in place.

Runs decode steps of an engine in this process: under `contiguous`, whose kernels read grouped heads in place, and under
`mirrored`, which multiplies by a mirror in torch. Both take turns in several rounds, as other processes disturb the
machine. Both hold the same keys and values, so the tokens differ by rounding only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

from config.errors import SettingsError
from config.settings import load_settings
from server.engine.build import Engine, build_engine
from server.profiling.steps import measure_decode
from tools.bench.table.models import LLAMA, cache_folder, make_model

KINDS = ("contiguous", "mirrored")
SEQUENCES = (1, 8)
CONTEXTS = (256, 2048)
STEPS = 40
KV_MEMORY = "2GiB"  # for the largest load
MARGIN = 128  # tokens for the steps after the prompt


class Point(NamedTuple):
    """The decode speed of one strategy in all rounds, at one load."""

    kind: str
    sequences: int
    context: int
    tokens_per_second: Sequence[float]  # by round


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.mirrored", description=__doc__)
    add = parser.add_argument
    add("--model", help=f"as for `kvmux serve` (default: the shape of {LLAMA.name} with random weights)")
    add("--dtype", default="auto", help="as for `kvmux serve`")
    add("--threads", type=int, default=1, help="threads of the engine (default: 1)")
    add("--kernels", default="auto", help="as for `kvmux serve`; reference: both compute in torch")
    add("--rounds", type=int, default=5, help="rounds in which both strategies take turns (default: 5)")
    add("--steps", type=int, default=STEPS, help=f"steps of a measurement (default: {STEPS})")
    options = parser.parse_args(arguments)
    model = options.model or make_model(LLAMA, cache_folder(), lambda status: print(status, file=sys.stderr))
    settings = {"model": str(model), **{name: getattr(options, name) for name in ("dtype", "kernels", "threads")}}
    try:
        engine = build_comparison(settings)
    except SettingsError as error:
        parser.error(str(error))
    print(describe_memory(engine))
    print(as_table(measure(engine, options.rounds, options.steps)))
    return 0


def build_comparison(settings: dict[str, Any]) -> Engine:
    """Build an engine with these settings and an instance of each kind. Raises SettingsError."""
    return build_engine(
        load_settings(
            None,
            settings
            | {
                "strategies": {kind: {"kind": kind} for kind in KINDS},
                "default_strategy": KINDS[0],
                "max_num_seqs": max(SEQUENCES),
                "max_seq_len": max(CONTEXTS) + MARGIN,
                "kv_memory": KV_MEMORY,
            },
        )
    )


def describe_memory(engine: Engine) -> str:
    """Return a line with the bytes that a token takes under each strategy."""
    sizes = []
    for name in KINDS:
        cache = engine.core.instances[name].strategy
        geometry = cache.setup.geometry
        size = sum(type(cache).sizes(cache.options, geometry).block_bytes) / geometry.max_seq_len
        sizes.append(f"{name} {size:,.0f}")
    return f"bytes per token, {str(geometry.kv_dtype).removeprefix('torch.')}: {', '.join(sizes)}"


def measure(engine: Engine, rounds: int, steps: int) -> Iterator[Point]:
    """Yield the points of each load, measured in rounds in which the strategies take turns."""
    for sequences in SEQUENCES:
        for context in CONTEXTS:
            speeds: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for _ in range(rounds):
                for kind in KINDS:
                    seconds = measure_decode(engine, kind, sequences, context, steps).total
                    speeds[kind].append(sequences / seconds)
            for kind in KINDS:
                yield Point(kind, sequences, context, speeds[kind])


def as_table(points: Iterator[Point]) -> str:
    """Return a table in Markdown: the median of all rounds, and their range."""
    lines = ["| sequences | context | strategy | tokens/s | range |", "|---:|---:|---|---:|---:|"]
    for point in points:
        speeds = point.tokens_per_second
        lines.append(
            f"| {point.sequences} | {point.context:,} | `{point.kind}` | {median(speeds):,.0f} "
            f"| {min(speeds):,.0f} to {max(speeds):,.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
