"""A seat says why no more of its prompt was found."""

from __future__ import annotations

import pytest

from tests.cache_strategies.cache_driver import cache_of, opened, paged, read

TEXT = list(range(10, 24))  # three blocks of 4, and two tokens


def test_what_was_never_there_is_cold() -> None:
    cache = paged()
    assert opened(cache, TEXT).miss == "cold"
    assert opened(cache, [*TEXT[:8], *range(60, 70)]).miss == "cold", "behind what was found"


@pytest.mark.parametrize("length", [12, 13, 14])
def test_all_there_could_be_is_no_miss(length: int) -> None:
    cache = paged()
    read(cache, TEXT)
    assert opened(cache, TEXT[:length]).miss is None


@pytest.mark.parametrize("length", [1, 3, 4])
def test_a_prompt_without_a_full_block_is_short(length: int) -> None:
    cache = paged()
    read(cache, TEXT)
    assert opened(cache, TEXT[:length]).miss == "short"


def test_what_had_to_make_room_was_evicted_until_it_comes_again() -> None:
    cache = paged()
    cache.close(read(cache, TEXT))
    cache.reclaim(1)
    seat = opened(cache, TEXT)
    assert (seat.cached, seat.miss) == (8, "evicted")
    cache.close(seat)
    cache.reclaim(99)
    assert opened(cache, TEXT).miss == "evicted"
    assert opened(cache, TEXT).miss is None, "somebody is at it"


def test_under_another_salt_it_is_told_whose() -> None:
    cache = paged()
    read(cache, TEXT, salt="me/one")
    assert opened(cache, TEXT, salt="me/two").miss == "salt"
    assert opened(cache, TEXT, salt="you/one").miss == "cold"
    assert opened(cache, TEXT, salt="me/one").miss is None


def test_who_wants_nothing_from_the_cache_bypasses_it() -> None:
    cache = paged()
    read(cache, TEXT)
    assert opened(cache, TEXT, max_cached=0).miss == "bypass"
    assert opened(cache, TEXT, max_cached=7).miss == "bypass"
    assert opened(cache, TEXT, max_cached=12).miss is None
    assert opened(paged(prefix_cache=False), TEXT).miss == "bypass"


def test_a_window_cannot_be_gone_on_from() -> None:
    assert opened(cache_of("sliding_window", window=10), TEXT).miss == "window"


def test_a_nameless_token_makes_the_rest_short() -> None:
    assert opened(paged(), [*TEXT[:4], -1, *TEXT[5:]]).miss == "cold"
    cache = paged()
    read(cache, TEXT)
    assert opened(cache, [*TEXT[:4], -1, *TEXT[5:]]).miss == "short"
