"""Tests of contiguous and sliding_window: one block per sequence, allocated by open() and freed by close()."""

from __future__ import annotations

import pytest

from cache_strategies.base import Rows
from cache_strategies.types import Text
from tests.cache_strategies.cache_driver import (
    assert_nothing_leaked,
    count_bytes,
    enter,
    evict,
    get_token_bytes,
    make_cache,
    open_sequence,
    read_prompt,
    stored_tokens,
)

KINDS = {"contiguous": {"prefix_cache": False}, "sliding_window": {"window": 10, "sinks": 2, "max_row": 7}}
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
def test_a_sequence_is_one_block_from_open_to_close(kind: str) -> None:
    cache = make_cache(kind, **KINDS[kind])
    memory, size = cache.setup.memory, count_bytes(cache, 1)
    for sequences in (1, 2, 3):
        sequence = open_sequence(cache, [1, 2, 3])
        assert memory.held_bytes == sequences * size
    enter(cache, (sequence, [1, 2, 3]))
    sequence.close()
    assert memory.held_bytes == 2 * size


@kinds
def test_a_sequence_needs_the_same_memory_however_long_it_is(kind: str) -> None:
    cache = make_cache(kind, **KINDS[kind])
    assert count_bytes(cache, 1) == count_bytes(cache, 64)


@kinds
def test_without_room_there_is_no_sequence_until_one_closes(kind: str) -> None:
    cache = make_cache(kind, blocks=2, **KINDS[kind])
    first, _ = open_sequence(cache, [1]), open_sequence(cache, [1])
    assert cache.open(Text([1])) is None
    assert first.fork() is None
    first.close()
    assert cache.open(Text([1])) is not None
    cache.check_integrity()


@kinds
def test_there_is_a_sequence_for_as_many_as_were_announced(kind: str) -> None:
    cache = make_cache(kind, seats=2, **KINDS[kind])
    first, _ = open_sequence(cache, [1]), open_sequence(cache, [2])
    assert cache.open(Text([3])) is None
    first.close()
    assert cache.open(Text([3])) is not None


@kinds
def test_nothing_is_shared_or_waited_for(kind: str) -> None:
    cache = make_cache(kind, **KINDS[kind])
    read_prompt(cache, [1, 2, 3, 4])
    sequence = open_sequence(cache, [1, 2, 3, 4, 5])
    assert (sequence.found, sequence.ready(), evict(cache, 5)) == (0, True, 0)
    assert cache.setup.memory.held_bytes == 2 * count_bytes(cache, 5)


@kinds
def test_usage_tells_what_is_held_and_empty(kind: str) -> None:
    cache = make_cache(kind, **KINDS[kind])
    sequence = open_sequence(cache, [1] * 7)
    enter(cache, (sequence, [1] * 7))
    usage = cache.usage()
    assert (usage.seats, usage.tokens, usage.idle) == (1, 7, 0)
    assert usage.used == int(7 * get_token_bytes(cache))
    assert usage.reserved == count_bytes(cache, 7) == usage.used + usage.wasted
    for _ in range(6):
        enter(cache, (sequence, [1] * 7))
    assert cache.usage().tokens == 49
    assert cache.usage().used <= usage.reserved, "a ring that wrapped holds no more than it has slots"


@kinds
def test_closing_everything_frees_everything(kind: str) -> None:
    cache = make_cache(kind, seats=4, **KINDS[kind])
    sequences = [read_prompt(cache, [n] * n) for n in (1, 5, 7)]
    child = sequences[1].fork()
    assert child is not None
    for sequence in (sequences[2], sequences[0], child, sequences[1]):
        sequence.close()
        cache.check_integrity()
    assert_nothing_leaked(cache)


@kinds
def test_books_that_do_not_add_up_are_noticed(kind: str) -> None:
    for spoil in (
        lambda cache, sequences: cache.setup.memory.regions[0].allocate(),
        lambda cache, sequences: sequences[0].blocks.__setitem__(0, sequences[1].blocks[0]),
        lambda cache, sequences: setattr(sequences[0], "length", 65),
    ):
        cache = make_cache(kind, **KINDS[kind])
        sequences = [read_prompt(cache, [n]) for n in range(2)]
        cache.check_integrity()
        spoil(cache, sequences)
        with pytest.raises(AssertionError):
            cache.check_integrity()


@kinds
def test_a_fork_of_a_block_is_a_copy(kind: str) -> None:
    cache = make_cache(kind, seats=3)
    parent = read_prompt(cache, [1, 2, 3, 4, 5])
    child = parent.fork()
    assert child is not None
    enter(cache, (parent, [6]), (child, [7, 8]))
    assert stored_tokens(cache, parent) == [1, 2, 3, 4, 5, 6]
    assert stored_tokens(cache, child) == [1, 2, 3, 4, 5, 7, 8]
    for sequence in (parent, child):
        sequence.close()
    assert_nothing_leaked(cache)


def test_contiguous_rewinds_to_any_length_and_goes_on() -> None:
    cache = make_cache("contiguous")
    sequence = read_prompt(cache, [1, 2, 3, 4, 5])
    sequence.truncate(2)
    enter(cache, (sequence, [7, 8]))
    assert stored_tokens(cache, sequence) == [1, 2, 7, 8]
    assert cache.contract.rewind is None


def test_a_ring_that_never_wraps_rewinds_too() -> None:
    cache = make_cache("sliding_window", window=100)
    sequence = read_prompt(cache, [1, 2, 3, 4, 5])
    sequence.truncate(2)
    enter(cache, (sequence, [7, 8]))
    assert stored_tokens(cache, sequence) == [1, 2, 7, 8]


@pytest.mark.parametrize("more", [8, 60])
def test_rows_longer_than_announced_are_caught(more: int) -> None:
    cache = make_cache("sliding_window", **KINDS["sliding_window"])
    with pytest.raises(AssertionError, match="must end at `stop`"):
        open_sequence(cache, [1]).reserve(more)


@pytest.mark.parametrize("kind", ["contiguous", "mirrored", "paged", "quest", "sliding_window"])
def test_texts_longer_than_announced_are_caught(kind: str) -> None:
    cache = make_cache(kind)
    sequence = read_prompt(cache, list(range(60)))
    assert sequence.reserve(4)
    with pytest.raises(AssertionError):
        sequence.reserve(5)


@pytest.mark.parametrize("kind", ["contiguous", "mirrored", "paged", "quest", "sliding_window"])
def test_a_sequence_that_is_closed_twice_is_caught(kind: str) -> None:
    cache = make_cache(kind)
    sequence = read_prompt(cache, [1, 2, 3])
    sequence.close()
    with pytest.raises((AssertionError, KeyError)):
        sequence.close()


@pytest.mark.parametrize("kind", ["contiguous", "mirrored", "paged", "quest", "sliding_window"])
def test_chunks_before_decode_rows_are_caught(kind: str) -> None:
    cache = make_cache(kind)
    sequences = [open_sequence(cache, [n, n]) for n in range(2)]
    for sequence in sequences:
        assert sequence.reserve(2)
    with pytest.raises(AssertionError, match="decode rows must come first"):
        cache.locate(Rows(sequences, [2, 1]))
