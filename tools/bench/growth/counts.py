"""Counts the function calls that should not grow with the waiting requests, or with the blocks of the prefix cache."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
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
from server.engine.ipc.messages import SamplingParams, Submit
from tools.bench.growth.points import GrowthPoint

WAITING = (0, 10, 100, 1000, 10_000)
BLOCKS = (1000, 10_000, 100_000, 1_000_000)
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
        assert cache.setup.memory.shared.free_bytes == 0
        for work, calls in _count_text_calls(cache, [blocks, *range(COUNTED_TEXT_TOKENS - 1)]).items():
            yield GrowthPoint("blocks", blocks, f"calls to {work}", calls)


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
