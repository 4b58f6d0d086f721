"""`python -m tools.bench.compression.seconds`: how long one compaction takes, by scorer, and of `streaming`.

Builds a cache over random keys and values, appends tokens to one sequence without computing them, and measures the
compactions that drop keys: the time in the scorer, in all layers, and the time of all else (choosing the highest
scores, moving what stays). Keys of a head are random numbers around a random mean, as keys of trained models have one;
`--mean 0` makes keys that do not resemble each other.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cache_strategies import registry
from cache_strategies.base import Rows
from cache_strategies.compressed.cache import CompressedCache, CompressedSequence
from cache_strategies.compressed.options import make_scorer
from cache_strategies.memory import make_memory
from cache_strategies.scorers import list_scorers
from cache_strategies.scorers.base import Past, Scorer
from cache_strategies.spaces import find_space
from cache_strategies.types import Geometry, Text
from config.errors import SettingsError
from config.settings import StrategySettings
from kernels.backends import load_ops
from kernels.composite import shift_rope
from kernels.device import get_device
from kernels.ops import Ops
from kernels.types import LayerSpec
from server.models.config import Rope
from server.models.rope import compute_rope_tables

STREAMING = "streaming"  # the strategy, which has no scorer
STREAMING_WINDOW = 1024
THETA = 1e6
WARM_UP = 2  # compactions that are not measured
SIZES = ("layers", "kv_heads", "q_heads", "head_dim", "budget", "every")
Clock = Callable[[], float]


@dataclass(frozen=True)
class Shape:
    """A model's attention layers, and what is kept of a sequence."""

    layers: int = 24
    kv_heads: int = 2
    q_heads: int = 14
    head_dim: int = 64
    budget: int = 2048
    every: int = 256
    dtype: torch.dtype = torch.bfloat16
    mean: float = 1.0  # size of a head's mean key, relative to the deviations from it


class Compaction(NamedTuple):
    """The milliseconds of the compactions with one scorer, by round."""

    name: str
    score: Sequence[float]
    rest: Sequence[float]


class TimedScorer(Scorer):
    """Adds up the seconds of another scorer, which reads keys and values from the memory."""

    def __init__(self, scorer: Scorer, clock: Clock) -> None:
        super().__init__(scorer.options)
        self.num_queries = scorer.num_queries
        self.seconds = 0.0
        self._scorer, self._clock = scorer, clock

    def score(self, past: Past) -> Tensor:
        start = self._clock()
        scores = self._scorer.score(past)
        self.seconds += self._clock() - start
        return scores


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.compression.seconds", description=__doc__)
    add = parser.add_argument
    add("--scorer", action="append", help=f"scorer, or {STREAMING!r}; may be given several times (default: all)")
    add("--rounds", type=int, default=15, help="compactions that are measured, after two others (default: 15)")
    add("--threads", type=int, default=2, help="threads of torch and of the kernels (default: 2)")
    add("--cpu-time", action="store_true", help="measure CPU time, if the machine is busy; use it with one thread")
    for name in SIZES:
        add(f"--{name.replace('_', '-')}", type=int, default=getattr(Shape, name), help="(default: %(default)s)")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="(default: %(default)s)")
    add("--mean", type=float, default=Shape.mean, help="size of a head's mean key (default: %(default)s)")
    options = parser.parse_args(arguments)
    sizes = {name: getattr(options, name) for name in SIZES}
    shape = Shape(**sizes, dtype=getattr(torch, options.dtype), mean=options.mean)
    names = options.scorer or [*sorted(list_scorers()), STREAMING]
    clock = time.process_time if options.cpu_time else time.perf_counter
    torch.set_num_threads(options.threads)
    try:
        print(as_table(measure(names, shape, options.rounds, clock)))
    except SettingsError as error:
        parser.error(str(error))
    return 0


def measure(names: Sequence[str], shape: Shape, rounds: int, clock: Clock) -> Iterator[Compaction]:
    """Yield the times of each scorer. Raises SettingsError."""
    ops = load_ops(get_device("cpu"), shape.dtype).ops
    for name in names:
        yield measure_scorer(name, shape, ops, rounds, clock)


def build_cache(name: str, shape: Shape, ops: Ops, rounds: int) -> CompressedCache:
    """Build a cache for a sequence that is compacted `rounds` times. Raises SettingsError."""
    settings: dict[str, Any] = {"kind": "compressed", "scorer": name, "budget": shape.budget, "every": shape.every}
    length = shape.budget + (rounds + 1) * shape.every
    if name == STREAMING:
        settings = {"kind": STREAMING, "window": min(STREAMING_WINDOW, shape.budget), "every": shape.every}
    instances = registry.resolve_instances({"it": StrategySettings(**settings)})
    geometry = Geometry(list(make_layers(shape, ops, length)), shape.dtype, 1, length, length)
    least = registry.compute_least_bytes(instances, geometry, find_space("cpu").round_block)
    cache = registry.build_caches(instances, geometry, make_memory(2 * least), ops)["it"]
    assert isinstance(cache, CompressedCache)
    return cache


def make_layers(shape: Shape, ops: Ops, length: int) -> Iterator[LayerSpec]:
    """Yield the layers of a shape, which rotate keys as a model's do."""
    rope = Rope(THETA, shape.head_dim, length, length)
    tables = compute_rope_tables(rope, length, torch.device("cpu"))
    for _ in range(shape.layers):
        yield LayerSpec(
            shape.kv_heads,
            shape.q_heads,
            shape.head_dim,
            shape.head_dim,
            scale=shape.head_dim**-0.5,
            rotate=partial(_rotate, ops, tables),
        )


def _rotate(ops: Ops, tables: tuple[Tensor, Tensor], x: Tensor, delta: Tensor) -> Tensor:
    return shift_rope(ops, x, tables, delta)


def measure_scorer(name: str, shape: Shape, ops: Ops, rounds: int, clock: Clock) -> Compaction:
    """Return the times of compactions that drop keys, after two of which the memory is warm."""
    cache = build_cache(name, shape, ops, WARM_UP + rounds)
    seat = cache.open(Text(()))
    assert seat is not None
    means = shape.mean * torch.randn(shape.layers, shape.kv_heads, shape.head_dim)
    scorer = TimedScorer(make_scorer("it", cache.options, cache.setup.geometry.layers), clock)
    compactor = cache.make_compactor(scorer)
    score: list[float] = []
    rest: list[float] = []
    while len(score) < WARM_UP + rounds:
        append_tokens(cache, seat, means)
        scorer.seconds, start = 0.0, clock()
        is_shorter = compactor.compact(seat)
        total = clock() - start
        if cache.queries is not None:
            cache.queries.release(seat)
        if is_shorter:
            score.append(1e3 * scorer.seconds)
            rest.append(1e3 * (total - scorer.seconds))
    return Compaction(name, score[WARM_UP:], rest[WARM_UP:])


def append_tokens(cache: CompressedCache, seat: CompressedSequence, means: Tensor) -> None:
    """Append random tokens to a sequence up to its next boundary; `means` are those of keys, [layers, H, D]."""
    assert seat.stop is not None
    count = seat.stop - seat.length
    assert seat.reserve(count), "the memory is large enough"
    located = cache.locate(Rows([seat], [count]))
    for layer, mean in enumerate(means):
        location = located.by_layer[layer]
        assert location is not None
        keys, values = torch.randn(2, count, *mean.shape)
        dtype = location.store.dtype
        cache.setup.ops.write_kv(location.store, layer, (keys + mean).to(dtype), values.to(dtype), location.at)
    for queries in located.tap.queries if located.tap is not None else ():
        if queries is not None:
            queries.normal_()
    seat.commit([0] * count)


def as_table(compactions: Iterator[Compaction]) -> str:
    """Return the medians of the rounds as a table in Markdown, with the least in brackets."""
    lines = ["| scorer | ms of scoring | ms of choosing and moving |", "|---|---:|---:|"]
    for each in compactions:
        cells = " | ".join(f"{median(times):.1f} ({min(times):.1f})" for times in (each.score, each.rest))
        lines.append(f"| `{each.name}` | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
