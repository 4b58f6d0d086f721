"""`python -m tools.bench.growth`: measures how the engine's costs grow with load, in this process.

The time of a step by the context's length and by the number of sequences, each beside the bound that memory bandwidth
sets; and the number of function calls by the number of waiting requests and of cached blocks, which should be constant.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console

from cache_strategies import registry
from cache_strategies.arena import Arena
from cache_strategies.base import KVCache, Row
from cache_strategies.types import Geometry
from config.errors import SettingsError
from config.settings import Weights, load_settings
from kernels.ops import Ops
from kernels.types import LayerSpec
from server.engine.build import Engine, build_engine
from server.engine.ipc.messages import SamplingParams, Submit
from server.profiling.machine import measure_bandwidth
from server.profiling.steps import measure_decode
from tools.bench.plot import GrowthPoint, draw


def count_calls(work: Callable[[], object]) -> int:
    """Return the number of Python and C functions that `work` calls; calls made by C functions are not counted."""
    calls = 0

    def count(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()  # a collection would add calls
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


PARTS = ("context", "sequences", "waiting", "blocks")
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192, 16_384)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64)
WAITING = (0, 10, 100, 1000, 10_000)
BLOCKS = (1000, 10_000, 100_000, 1_000_000)
STEPS = 12
SEATS = 4  # seats of the engine in the part "waiting"
TEXT_TOKENS = 2048  # tokens of each text that fills the prefix cache; all texts are different
COUNTED_TEXT_TOKENS = 64  # tokens of the text whose calls are counted
BLOCK_SIZE = 4


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.growth", description=__doc__)
    add = parser.add_argument
    add("--part", nargs="+", choices=PARTS, default=PARTS, help="parts to measure (default: all)")
    add("--max-size", type=int, default=sys.maxsize, help="largest context length, number of requests and of blocks")
    add("--model", default="tiny", help="as for `kvmux serve` (default: the embedded one); only times depend on it")
    add("--dtype", default="auto", help="as for `kvmux serve`")
    add("--weights", default="auto", choices=get_args(Weights), help="as for `kvmux serve`")
    add("--json", type=Path, metavar="FILE", help="write the figures to this file as JSON")
    add("--plot", type=Path, metavar="FILE", help="plot the figures to this .png or .svg; needs kvmux[evaluate]")
    options = parser.parse_args(arguments)
    model = {name: getattr(options, name) for name in ("model", "dtype", "weights")}
    measures: dict[str, Callable[[int], Iterator[GrowthPoint]]] = {
        "context": partial(measure_by_context, model),
        "sequences": partial(measure_by_sequences, model),
        "waiting": measure_by_waiting,
        "blocks": measure_by_blocks,
    }
    points = []
    with Console(stderr=True).status("starting") as status:
        try:
            for part in options.part:
                for point in measures[part](options.max_size):
                    status.update(f"{point.part} {point.size:,}")
                    points.append(point)
        except SettingsError as error:
            parser.error(str(error))
    print(as_text(points))
    if options.json:
        options.json.write_text(json.dumps([point._asdict() for point in points], indent=2) + "\n")
    if options.plot:
        draw(points, options.plot)
    return 0


# -------------------------------------------------------------------- times
def measure_by_context(model: dict[str, Any], largest: int) -> Iterator[GrowthPoint]:
    """Yield the milliseconds of a step of one sequence, by context length up to `largest`.

    The bound is the time at the shortest length, and that to read the further keys and values.
    """
    engine = _build_engine(model, max(CONTEXTS) + 8 * STEPS, 1)
    fits = [length for length in CONTEXTS if length <= min(largest, engine.max_seq_len - 4 * STEPS)]
    first = None
    for length in fits:
        steps = measure_decode(engine, "paged", 1, length, STEPS)
        size = sum(steps.bytes.values())
        if first is None:
            first, bandwidth = (steps.total, size), measure_bandwidth(size, torch.get_num_threads())
        bound = first[0] + (size - first[1]) / bandwidth
        yield GrowthPoint("context", length, "ms a step", 1e3 * steps.total, 1e3 * bound)


def measure_by_sequences(model: dict[str, Any], largest: int) -> Iterator[GrowthPoint]:
    """Yield tokens per second by the number of sequences up to `largest`; the bound is set by memory bandwidth."""
    engine = _build_engine(model, 512, max(SEQUENCES))
    bandwidth = None
    for count in SEQUENCES:
        if count > largest:
            return
        steps = measure_decode(engine, "paged", count, 128, STEPS)
        size = sum(steps.bytes.values())
        bandwidth = bandwidth or measure_bandwidth(size, torch.get_num_threads())
        yield GrowthPoint("sequences", count, "tokens/s", count / steps.total, count * bandwidth / size)


def _build_engine(model: dict[str, Any], length: int, sequences: int) -> Engine:
    """Build an engine for `sequences` texts of `length` tokens, or of the model's context if that is shorter."""
    try:
        return build_engine(load_settings(None, model | {"max_seq_len": length, "max_num_seqs": sequences}))
    except SettingsError as error:
        if "positions" not in str(error):
            raise
        return build_engine(load_settings(None, model | {"max_num_seqs": sequences}))


# -------------------------------------------------------------------- counts
def measure_by_waiting(largest: int) -> Iterator[GrowthPoint]:
    """Yield the calls to schedule a step, and to queue a request, by waiting requests, while all seats are taken."""
    settings = {"model": "tiny", "max_num_seqs": SEATS, "max_seq_len": 512, "max_queued_requests": 2 * max(WAITING)}
    core = build_engine(load_settings(None, settings)).core
    count = 0

    def submit() -> None:
        nonlocal count
        count += 1
        sampling = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
        refused = core.submit(0, Submit(str(count), list(range(5, 70)), sampling, "paged"))
        assert refused is None, refused

    for _ in range(SEATS):
        submit()
    for _ in range(SEATS + 2):
        core.step()
    for waiting in WAITING:
        if waiting > largest:
            return
        while len(core.scheduler.waiting) < waiting:
            submit()
        yield GrowthPoint("waiting", waiting, "calls to schedule a step", count_calls(core.scheduler.schedule))
        yield GrowthPoint("waiting", waiting, "calls to take in line", count_calls(submit))


def measure_by_blocks(largest: int) -> Iterator[GrowthPoint]:
    """Yield the calls to open, compute, close and reopen a text in a paged cache that is full of others' blocks."""
    ops = build_engine(load_settings(None, {"model": "tiny", "max_num_seqs": 1})).kernels.ops
    for blocks in BLOCKS:
        if blocks > largest:
            return
        cache = _build_cache(blocks, ops)
        for text in range(blocks * BLOCK_SIZE // TEXT_TOKENS + 1):
            _cache_text(cache, [text, *range(TEXT_TOKENS - 1)])
        assert cache.setup.arena.num_free_pages == 0
        for work, calls in _count_text_calls(cache, [blocks, *range(COUNTED_TEXT_TOKENS - 1)]).items():
            yield GrowthPoint("blocks", blocks, f"calls to {work}", calls)


def _build_cache(blocks: int, ops: Ops) -> KVCache:
    """Build a paged cache of one tiny layer, with `blocks` blocks of memory."""
    instances = registry.resolve_instances(
        load_settings(None, {"strategies": {"paged": {"block_size": BLOCK_SIZE}}}).strategies
    )
    paged = [instance for instance in instances if instance.name == "paged"]
    geometry = Geometry([LayerSpec(1, 1, 2, 2)], torch.float32, 4, TEXT_TOKENS, TEXT_TOKENS)
    arena = Arena(blocks, registry.page_bytes(paged, geometry))
    return registry.build_caches(paged, geometry, arena, ops, "model")["paged"]


def _cache_text(cache: KVCache, text: list[int]) -> None:
    """Commit a text to the cache and close it; its blocks stay there as idle blocks."""
    seat = cache.open(text)
    assert seat is not None
    _append_tokens(cache, seat, text)
    cache.close(seat)


def _append_tokens(cache: KVCache, seat: Any, text: Sequence[int]) -> None:
    cache.poll()
    rest = text[seat.length :]
    assert cache.grow(seat, len(rest))
    cache.commit(cache.plan([Row(seat, len(rest))]), [rest])


def _count_text_calls(cache: KVCache, text: list[int]) -> dict[str, int]:
    """Return the calls to open, enter and close a text that is not cached, and to open it again, once it is cached."""
    seats: list[Any] = []
    calls = {"open": count_calls(lambda: seats.append(cache.open(text)))}
    calls["enter"] = count_calls(lambda: _append_tokens(cache, seats[0], text))
    calls["close"] = count_calls(lambda: cache.close(seats[0]))
    calls["open again"] = count_calls(lambda: seats.append(cache.open(text)))
    assert seats[-1].cached > 0
    return calls


# -------------------------------------------------------------------- report
def as_text(points: Sequence[GrowthPoint]) -> str:
    """Return the points as Markdown, one table for each part."""
    parts = dict.fromkeys(point.part for point in points)
    return "\n\n".join(_format_table(part, [point for point in points if point.part == part]) for part in parts)


def _format_table(part: str, points: Sequence[GrowthPoint]) -> str:
    metrics = list(dict.fromkeys(point.metric for point in points))
    bounds = any(point.bound is not None for point in points)
    head = [part, *metrics, *(["the machine allows"] if bounds else [])]
    lines = ["| " + " | ".join(head) + " |", "|" + "---:|" * len(head)]
    for at in dict.fromkeys(point.size for point in points):
        here = [point for point in points if point.size == at]
        cells = [f"{at:,}", *(f"{point.value:,.4g}" for point in here)]
        cells += [f"{point.bound:,.4g}" for point in here if point.bound is not None]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
