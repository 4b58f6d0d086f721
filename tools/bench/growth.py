"""`python -m tools.bench.growth`: what grows with what, in steps of the engine in this process.

Time by length of the context, beside what its keys and values must cost, and by sequences decoded together; and,
without a clock, calls of functions by requests that wait and by blocks in the prefix cache, which ought to stay so.
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
from cache_strategies.base import Geometry, KVCache, Row
from config.errors import SettingsError
from config.settings import Weights, load
from kernels.ops import Ops
from kernels.types import LayerSpec
from server.engine.build import Engine, build_engine
from server.engine.ipc.messages import Sampling, Submit
from server.profiling.machine import bandwidth_over
from server.profiling.steps import decode
from tools.bench.plot import Point, draw


def calls_of(work: Callable[[], object]) -> int:
    """Functions that were called, in Python and in C. What runs within one in C is not seen."""
    calls = 0

    def count(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()  # whoever wants to know of collections is called at each
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
SEATS = 4  # of the engine whose requests wait
TEXT, ROOM = 2048, 64  # tokens of the texts that fill the prefix cache, which are all different, and of the one counted
BLOCK = 4


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.growth", description=__doc__)
    add = parser.add_argument
    add("--part", nargs="+", choices=PARTS, default=PARTS, help="only these (default: all)")
    add("--most", type=int, default=sys.maxsize, help="the largest context, number of requests and of blocks")
    add("--model", default="tiny", help="as for `kvmux serve` (default: the embedded one); only times depend on it")
    add("--dtype", default="auto", help="as for `kvmux serve`")
    add("--weights", default="auto", choices=get_args(Weights), help="as for `kvmux serve`")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    add("--plot", type=Path, metavar="FILE", help="draw them there: .png or .svg; needs kvmux[evaluate]")
    options = parser.parse_args(arguments)
    model = {name: getattr(options, name) for name in ("model", "dtype", "weights")}
    ways: dict[str, Callable[[int], Iterator[Point]]] = {
        "context": partial(by_context, model),
        "sequences": partial(by_sequences, model),
        "waiting": by_waiting,
        "blocks": by_blocks,
    }
    points = []
    with Console(stderr=True).status("starting") as status:
        try:
            for part in options.part:
                for point in ways[part](options.most):
                    status.update(f"{point.part} {point.at:,}")
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
def by_context(model: dict[str, Any], most: int) -> Iterator[Point]:
    """Milliseconds of a step of one sequence; the least is that of the shortest text and the further keys' reading."""
    engine = _engine(model, max(CONTEXTS) + 8 * STEPS, 1)
    fits = [length for length in CONTEXTS if length <= min(most, engine.max_seq_len - 4 * STEPS)]
    first = None
    for length in fits:
        steps = decode(engine, "paged", 1, length, STEPS)
        size = sum(steps.bytes.values())
        if first is None:
            first, read = (steps.total, size), bandwidth_over(size, torch.get_num_threads())
        least = first[0] + (size - first[1]) / read
        yield Point("context", length, "ms a step", 1e3 * steps.total, 1e3 * least)


def by_sequences(model: dict[str, Any], most: int) -> Iterator[Point]:
    """Tokens a second; the most that reading allows stands as `least`."""
    engine = _engine(model, 512, max(SEQUENCES))
    read = None
    for count in SEQUENCES:
        if count > most:
            return
        steps = decode(engine, "paged", count, 128, STEPS)
        size = sum(steps.bytes.values())
        read = read or bandwidth_over(size, torch.get_num_threads())
        yield Point("sequences", count, "tokens/s", count / steps.total, count * read / size)


def _engine(model: dict[str, Any], length: int, sequences: int) -> Engine:
    """With room for so many texts of that length, or of the longest that the model knows."""
    try:
        return build_engine(load(None, model | {"max_seq_len": length, "max_num_seqs": sequences}))
    except SettingsError as error:
        if "positions" not in str(error):
            raise
        return build_engine(load(None, model | {"max_num_seqs": sequences}))


# -------------------------------------------------------------------- counts
def by_waiting(most: int) -> Iterator[Point]:
    """Calls of a step's scheduling, and of one more request that is taken in line, while all seats are taken."""
    settings = {"model": "tiny", "max_num_seqs": SEATS, "max_seq_len": 512, "max_queued_requests": 2 * max(WAITING)}
    core = build_engine(load(None, settings)).core
    count = 0

    def submit() -> None:
        nonlocal count
        count += 1
        sampling = Sampling(max_tokens=400, temperature=0.0, ignore_eos=True)
        refused = core.submit(0, Submit(str(count), list(range(5, 70)), sampling, "paged"))
        assert refused is None, refused

    for _ in range(SEATS):
        submit()
    for _ in range(SEATS + 2):
        core.step()
    for waiting in WAITING:
        if waiting > most:
            return
        while len(core.scheduler.waiting) < waiting:
            submit()
        yield Point("waiting", waiting, "calls to schedule a step", calls_of(core.scheduler.schedule))
        yield Point("waiting", waiting, "calls to take in line", calls_of(submit))


def by_blocks(most: int) -> Iterator[Point]:
    """Calls to open, enter and close a text of some blocks, in a cache that is full of others."""
    ops = build_engine(load(None, {"model": "tiny", "max_num_seqs": 1})).kernels.ops
    for blocks in BLOCKS:
        if blocks > most:
            return
        cache = _cache(blocks, ops)
        for text in range(blocks * BLOCK // TEXT + 1):
            _read(cache, [text, *range(TEXT - 1)])
        assert cache.setup.arena.free == 0
        for work, calls in _counted(cache, [blocks, *range(ROOM - 1)]).items():
            yield Point("blocks", blocks, f"calls to {work}", calls)


def _cache(blocks: int, ops: Ops) -> KVCache:
    """A paged one of one tiny layer, whose memory is so many blocks."""
    instances = registry.declared(load(None, {"strategies": {"paged": {"block_size": BLOCK}}}).strategies)
    paged = [instance for instance in instances if instance.name == "paged"]
    geometry = Geometry([LayerSpec(1, 1, 2, 2)], torch.float32, 4, TEXT, TEXT)
    arena = Arena(blocks, registry.page_bytes(paged, geometry))
    return registry.build(paged, geometry, arena, ops, "model")["paged"]


def _read(cache: KVCache, text: list[int]) -> None:
    """Its blocks stay, idle."""
    seat = cache.open(text)
    assert seat is not None
    _enter(cache, seat, text)
    cache.close(seat)


def _enter(cache: KVCache, seat: Any, text: Sequence[int]) -> None:
    cache.poll()
    rest = text[seat.length :]
    assert cache.grow(seat, len(rest))
    cache.commit(cache.plan([Row(seat, len(rest))]), [rest])


def _counted(cache: KVCache, text: list[int]) -> dict[str, int]:
    """Calls for a text that is not there, and of the beginning of one that is."""
    seats: list[Any] = []
    found = {"open": calls_of(lambda: seats.append(cache.open(text)))}
    found["enter"] = calls_of(lambda: _enter(cache, seats[0], text))
    found["close"] = calls_of(lambda: cache.close(seats[0]))
    found["find"] = calls_of(lambda: cache.match(text))
    return found


# -------------------------------------------------------------------- telling it
def as_text(points: Sequence[Point]) -> str:
    """GitHub's Markdown, a table for each part."""
    parts = dict.fromkeys(point.part for point in points)
    return "\n\n".join(_table(part, [point for point in points if point.part == part]) for part in parts)


def _table(part: str, points: Sequence[Point]) -> str:
    whats = list(dict.fromkeys(point.what for point in points))
    bounds = any(point.least is not None for point in points)
    head = [part, *whats, *(["the machine allows"] if bounds else [])]
    lines = ["| " + " | ".join(head) + " |", "|" + "---:|" * len(head)]
    for at in dict.fromkeys(point.at for point in points):
        here = [point for point in points if point.at == at]
        cells = [f"{at:,}", *(f"{point.value:,.4g}" for point in here)]
        cells += [f"{point.least:,.4g}" for point in here if point.least is not None]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
