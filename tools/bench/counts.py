"""Counts the function calls that should not grow with the waiting requests, or with the blocks of the prefix cache."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cache_strategies import registry
from cache_strategies.base import KVCache, Rows
from cache_strategies.memory import make_memory
from cache_strategies.spaces import find_space
from cache_strategies.types import Geometry, Text
from config.settings import load_settings
from kernels.ops import Ops
from kernels.types import LayerSpec
from server.engine.build import build_engine
from server.engine.core import Core
from server.engine.ipc.messages import SamplingParams, Submit
from tools.bench.runner import Case, Measure, Reading, Row, Table

WAITING = (0, 10, 100, 1000, 10_000)
BLOCKS = (1000, 10_000, 100_000, 1_000_000)
SIZES = {"waiting": WAITING, "blocks": BLOCKS}
SEATS = 4  # seats of the engine in the part "waiting"
TEXT_TOKENS = 2048  # tokens of each text that fills the prefix cache; all texts are different
COUNTED_TEXT_TOKENS = 64  # tokens of the text whose calls are counted
BLOCK_SIZE = 4


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


def list_counts(parts: Sequence[str], largest: int) -> Iterator[Case]:
    """Yield a case for each part, "waiting" or "blocks", with sizes of at most `largest`."""
    for part in parts:
        sizes = [f"{size:,}" for size in SIZES[part] if size <= largest]
        table = Table(part, variants_are_rows=True)
        set_up = _queue_requests if part == "waiting" else _load_ops
        yield Case(part, table, MEASURES[part], sizes, set_up, max_turns=1, is_timed=False)


@contextmanager
def _queue_requests() -> Iterator[Callable[[int], Core]]:
    """Yield a function that puts requests in the line of an engine, all of whose seats are taken, up to a number."""
    settings = {"model": "tiny", "max_num_seqs": SEATS, "max_seq_len": 512, "max_queued_requests": 2 * max(WAITING)}
    core = build_engine(load_settings(None, settings)).core
    for _ in range(SEATS):
        _submit(core)
    for _ in range(SEATS + 2):
        core.step()

    def fill(waiting: int) -> Core:
        while len(core.scheduler.waiting) < waiting:
            _submit(core)
        return core

    yield fill


def _submit(core: Core) -> None:
    sampling = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    number = len(core.scheduler.waiting) + len(core.scheduler.running)
    refused = core.submit(0, Submit(str(number), list(range(5, 70)), sampling, "paged"))
    assert refused is None, refused


def _measure_waiting(fill: Callable[[int], Core], size: str) -> Iterator[Reading]:
    """Yield the calls to schedule a step, and to queue a request, while so many requests wait."""
    core = fill(_parse_size(size))
    yield Reading(Row("calls to schedule a step"), count_calls(core.scheduler.schedule))
    yield Reading(Row("calls to take in line"), count_calls(lambda: _submit(core)))


@contextmanager
def _load_ops() -> Iterator[Ops]:
    yield build_engine(load_settings(None, {"model": "tiny", "max_num_seqs": 1})).kernels.ops


def _measure_blocks(ops: Ops, size: str) -> Iterator[Reading]:
    """Yield the calls to open, compute, close and reopen a text in a paged cache that is full of others' blocks."""
    blocks = _parse_size(size)
    cache = _build_cache(blocks, ops)
    for text in range(blocks * BLOCK_SIZE // TEXT_TOKENS + 1):
        _cache_text(cache, [text, *range(TEXT_TOKENS - 1)])
    assert cache.setup.memory.shared.free_bytes == 0
    for work, calls in _count_text_calls(cache, [blocks, *range(COUNTED_TEXT_TOKENS - 1)]).items():
        yield Reading(Row(f"calls to {work}"), calls)


def _parse_size(size: str) -> int:
    return int(size.replace(",", ""))


MEASURES: Mapping[str, Measure] = {"waiting": _measure_waiting, "blocks": _measure_blocks}


def _build_cache(blocks: int, ops: Ops) -> KVCache:
    """Build a paged cache of one tiny layer, with `blocks` blocks of memory."""
    instances = registry.resolve_instances(
        load_settings(None, {"strategies": {"paged": {"block_size": BLOCK_SIZE}}}).strategies
    )
    paged = [instance for instance in instances if instance.name == "paged"]
    geometry = Geometry([LayerSpec(1, 1, 2, 2)], torch.float32, 4, TEXT_TOKENS, TEXT_TOKENS)
    (block_bytes,) = paged[0].cls.sizes(paged[0].options, geometry).block_bytes
    memory = make_memory(blocks * find_space("cpu").round_block(block_bytes))
    return registry.build_caches(paged, geometry, memory, ops, "model")["paged"]


def _cache_text(cache: KVCache, text: list[int]) -> None:
    """Commit a text to the cache and close it; its blocks stay there as idle blocks."""
    sequence = cache.open(Text(text))
    assert sequence is not None
    _append_tokens(cache, sequence, text)
    sequence.close()


def _append_tokens(cache: KVCache, sequence: Any, text: Sequence[int]) -> None:
    cache.poll()
    rest = text[sequence.length :]
    assert sequence.reserve(len(rest))
    cache.locate(Rows([sequence], [len(rest)]))
    sequence.commit(rest)


def _count_text_calls(cache: KVCache, text: list[int]) -> dict[str, int]:
    """Return the calls to open, enter and close a text that is not cached, and to open it again, once it is cached."""
    sequences: list[Any] = []
    calls = {"open": count_calls(lambda: sequences.append(cache.open(Text(text))))}
    calls["enter"] = count_calls(lambda: _append_tokens(cache, sequences[0], text))
    calls["close"] = count_calls(lambda: sequences[0].close())
    calls["open again"] = count_calls(lambda: sequences.append(cache.open(Text(text))))
    assert sequences[-1].found > 0
    return calls
