"""Tests of contiguous and sliding_window: one block per seat, allocated by open() and freed by close()."""

from __future__ import annotations

import pytest

from cache_strategies.base import Row
from tests.cache_strategies.cache_driver import (
    assert_nothing_leaked,
    count_bytes,
    enter,
    evict,
    get_token_bytes,
    make_cache,
    open_seat,
    read_prompt,
    stored_tokens,
)

KINDS = {"contiguous": {"prefix_cache": False}, "sliding_window": {"window": 10, "sinks": 2, "max_row": 7}}
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
def test_a_seat_is_one_block_from_open_to_close(kind: str) -> None:
    cache = make_cache(kind, **KINDS[kind])
    memory, size = cache.setup.memory, count_bytes(cache, 1)
    for seats in (1, 2, 3):
        seat = open_seat(cache, [1, 2, 3])
        assert memory.held_bytes == seats * size
    enter(cache, (seat, [1, 2, 3]))
    cache.close(seat)
    assert memory.held_bytes == 2 * size


@kinds
def test_a_sequence_needs_the_same_memory_however_long_it_is(kind: str) -> None:
    cache = make_cache(kind, **KINDS[kind])
    assert count_bytes(cache, 1) == count_bytes(cache, 64)


@kinds
def test_without_room_there_is_no_seat_until_one_closes(kind: str) -> None:
    cache = make_cache(kind, blocks=2, **KINDS[kind])
    first, _ = open_seat(cache, [1]), open_seat(cache, [1])
    assert cache.open([1]) is None
    assert cache.fork(first) is None
    cache.close(first)
    assert cache.open([1]) is not None
    cache.check_integrity()


@kinds
def test_there_is_a_seat_for_as_many_as_were_announced(kind: str) -> None:
    cache = make_cache(kind, seats=2, **KINDS[kind])
    first, _ = open_seat(cache, [1]), open_seat(cache, [2])
    assert cache.open([3]) is None
    cache.close(first)
    assert cache.open([3]) is not None


@kinds
def test_nothing_is_shared_or_waited_for(kind: str) -> None:
    cache = make_cache(kind, **KINDS[kind])
    read_prompt(cache, [1, 2, 3, 4])
    seat = open_seat(cache, [1, 2, 3, 4, 5])
    assert (seat.cached, cache.ready(seat), evict(cache, 5)) == (0, True, 0)
    assert cache.setup.memory.held_bytes == 2 * count_bytes(cache, 5)


@kinds
def test_usage_tells_what_is_held_and_empty(kind: str) -> None:
    cache = make_cache(kind, **KINDS[kind])
    seat = open_seat(cache, [1] * 7)
    enter(cache, (seat, [1] * 7))
    usage = cache.usage()
    assert (usage.seats, usage.tokens, usage.idle) == (1, 7, 0)
    assert usage.used == int(7 * get_token_bytes(cache))
    assert usage.reserved == count_bytes(cache, 7) == usage.used + usage.wasted
    for _ in range(6):
        enter(cache, (seat, [1] * 7))
    assert cache.usage().tokens == 49
    assert cache.usage().used <= usage.reserved, "a ring that wrapped holds no more than it has slots"


@kinds
def test_closing_everything_frees_everything(kind: str) -> None:
    cache = make_cache(kind, seats=4, **KINDS[kind])
    seats = [read_prompt(cache, [n] * n) for n in (1, 5, 7)]
    child = cache.fork(seats[1])
    assert child is not None
    for seat in (seats[2], seats[0], child, seats[1]):
        cache.close(seat)
        cache.check_integrity()
    assert_nothing_leaked(cache)


@kinds
def test_books_that_do_not_add_up_are_noticed(kind: str) -> None:
    for spoil in (
        lambda cache, seats: cache.setup.memory.regions[0].allocate(),
        lambda cache, seats: seats[0].blocks.__setitem__(0, seats[1].blocks[0]),
        lambda cache, seats: setattr(seats[0], "length", 65),
    ):
        cache = make_cache(kind, **KINDS[kind])
        seats = [read_prompt(cache, [n]) for n in range(2)]
        cache.check_integrity()
        spoil(cache, seats)
        with pytest.raises(AssertionError):
            cache.check_integrity()


@kinds
def test_a_fork_of_a_slab_is_a_copy(kind: str) -> None:
    cache = make_cache(kind, seats=3)
    parent = read_prompt(cache, [1, 2, 3, 4, 5])
    child = cache.fork(parent)
    assert child is not None
    enter(cache, (parent, [6]), (child, [7, 8]))
    assert stored_tokens(cache, parent) == [1, 2, 3, 4, 5, 6]
    assert stored_tokens(cache, child) == [1, 2, 3, 4, 5, 7, 8]
    for seat in (parent, child):
        cache.close(seat)
    assert_nothing_leaked(cache)


def test_contiguous_rewinds_to_any_length_and_goes_on() -> None:
    cache = make_cache("contiguous")
    seat = read_prompt(cache, [1, 2, 3, 4, 5])
    cache.crop(seat, 2)
    enter(cache, (seat, [7, 8]))
    assert stored_tokens(cache, seat) == [1, 2, 7, 8]
    assert cache.contract.rewind is None


def test_a_ring_that_never_wraps_rewinds_too() -> None:
    cache = make_cache("sliding_window", window=100)
    seat = read_prompt(cache, [1, 2, 3, 4, 5])
    cache.crop(seat, 2)
    enter(cache, (seat, [7, 8]))
    assert stored_tokens(cache, seat) == [1, 2, 7, 8]


@pytest.mark.parametrize("more", [8, 60])
def test_rows_longer_than_announced_are_caught(more: int) -> None:
    cache = make_cache("sliding_window", **KINDS["sliding_window"])
    with pytest.raises(AssertionError, match="max_row"):
        cache.grow(open_seat(cache, [1]), more)


@pytest.mark.parametrize("kind", ["contiguous", "mirrored", "paged", "quest", "sliding_window"])
def test_texts_longer_than_announced_are_caught(kind: str) -> None:
    cache = make_cache(kind)
    seat = read_prompt(cache, list(range(60)))
    assert cache.grow(seat, 4)
    with pytest.raises(AssertionError):
        cache.grow(seat, 5)


@pytest.mark.parametrize("kind", ["contiguous", "mirrored", "paged", "quest", "sliding_window"])
def test_a_seat_that_is_closed_twice_is_caught(kind: str) -> None:
    cache = make_cache(kind)
    seat = read_prompt(cache, [1, 2, 3])
    cache.close(seat)
    with pytest.raises((AssertionError, KeyError)):
        cache.close(seat)


@pytest.mark.parametrize("kind", ["contiguous", "mirrored", "paged", "quest", "sliding_window"])
def test_chunks_before_decode_rows_are_caught(kind: str) -> None:
    cache = make_cache(kind)
    seats = [open_seat(cache, [n, n]) for n in range(2)]
    for seat in seats:
        assert cache.grow(seat, 2)
    with pytest.raises(AssertionError, match="decode rows must come first"):
        cache.plan([Row(seats[0], 2), Row(seats[1], 1)])
