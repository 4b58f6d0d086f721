"""Tests of block metrics: numbers of blocks by state, lifetimes, idle times and reuse gaps."""

from __future__ import annotations

from functools import partial

import pytest

from cache_strategies import registry
from cache_strategies.base import CacheSetup
from cache_strategies.eviction.block_metrics import MAX_SAMPLES, BlockMetrics
from cache_strategies.types import NO_SALT, BlockEvents, Blocks
from tests.cache_strategies.cache_driver import BLOCK, enter, make_cache, make_paged, open_sequence, read_prompt
from tests.cache_strategies.eviction.test_queue import Clock

TEXT = list(range(10, 20))  # two blocks of 4, and two tokens
OTHER = list(range(30, 40))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock of all caches that the test makes."""
    clock = Clock()
    monkeypatch.setattr(registry, "CacheSetup", partial(CacheSetup, clock=clock))
    return clock


def test_ages_of_paged_blocks(clock: Clock) -> None:
    cache = make_paged(blocks=3)
    clock.now = 1.0
    first = open_sequence(cache, TEXT)  # its two full blocks get their names
    enter(cache, (first, TEXT))
    clock.now = 4.0
    first.close()
    assert cache.collect_block_events() is None, "a block without a name leaves nothing to tell"
    clock.now = 6.0
    second = read_prompt(cache, TEXT)
    assert cache.collect_block_events() == (
        0,
        (),
        (),
        (
            2.0,
            2.0,
        ),
    )
    clock.now = 7.0
    second.close()
    clock.now = 10.0
    read_prompt(cache, OTHER)  # takes all the memory there is
    assert cache.collect_block_events() == (
        0,
        (
            9.0,
            9.0,
        ),
        (
            3.0,
            3.0,
        ),
        (),
    )
    assert cache.collect_block_events() is None, "it is told once"
    cache.check_integrity()


def test_ages_of_contiguous_runs(clock: Clock) -> None:
    cache = make_cache("contiguous", blocks=1)
    clock.now = 1.0
    first = read_prompt(cache, TEXT)
    clock.now = 4.0
    first.close()
    clock.now = 6.0
    second = read_prompt(cache, [*TEXT, 1])
    assert cache.collect_block_events() == (0, (), (), (2.0,))
    second.close()
    clock.now = 9.0
    read_prompt(cache, OTHER)
    assert cache.collect_block_events() == (0, (8.0,), (3.0,), ())
    cache.check_integrity()


def test_what_is_cleared_was_not_evicted(clock: Clock) -> None:
    for cache in (make_paged(), make_cache("contiguous")):
        read_prompt(cache, TEXT).close()
        cache.clear()  # type: ignore[attr-defined]
        cache.check_integrity()
        assert cache.collect_block_events() is None


def test_copies_on_write() -> None:
    cache = make_paged()
    parent = read_prompt(cache, TEXT)
    child = parent.fork()
    assert child is not None
    enter(cache, (child, [1]))
    assert cache.collect_block_events() == BlockEvents(copies=1)
    enter(cache, (parent, [2]))
    assert cache.collect_block_events() is None, "the original is nobody else's any more"


def test_blocks_by_state() -> None:
    cache = make_paged()
    assert cache.blocks() == Blocks()
    parent = read_prompt(cache, TEXT)
    assert parent.fork()
    waiting = open_sequence(cache, OTHER)
    assert cache.blocks() == Blocks(in_use=6, shared=3, pending=2)
    enter(cache, (waiting, OTHER))
    waiting.close()
    pin = cache.pin(OTHER[:BLOCK], salt=NO_SALT, ttl=60)
    assert cache.blocks() == Blocks(in_use=3, shared=3, pinned=1, idle=1)
    assert cache.unpin(pin.id)
    assert cache.blocks() == Blocks(in_use=3, shared=3, idle=2)


@pytest.mark.parametrize(("kind", "left"), [("contiguous", 1), ("sliding_window", 0)])
def test_a_run_is_a_block(kind: str, left: int) -> None:
    cache = make_cache(kind)
    sequences = [read_prompt(cache, text) for text in (TEXT, OTHER)]
    assert cache.blocks() == Blocks(in_use=2)
    sequences[0].close()
    assert cache.blocks() == Blocks(in_use=1, idle=left)


def test_nobody_who_never_asks_pays_for_it() -> None:
    block_metrics = BlockMetrics(Clock())
    for key in range(2 * MAX_SAMPLES):
        block_metrics.on_block_allocated(key)
        block_metrics.on_block_idle(key)
        block_metrics.on_block_evicted(key)
    happened = block_metrics.collect()
    assert happened is not None
    assert len(happened.lifetimes) == MAX_SAMPLES
    block_metrics.check_integrity(set(), set())
