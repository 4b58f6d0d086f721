"""A sequence has the reason why no more tokens of its prompt were found in the cache."""

from __future__ import annotations

import pytest

from cache_strategies.types import Salt
from tests.cache_strategies.cache_driver import evict, make_cache, make_paged, open_sequence, read_prompt

TEXT = list(range(10, 24))  # three blocks of 4, and two tokens


def test_what_was_never_there_is_cold() -> None:
    cache = make_paged()
    assert open_sequence(cache, TEXT).miss == "cold"
    assert open_sequence(cache, [*TEXT[:8], *range(60, 70)]).miss == "cold", "behind what was found"


@pytest.mark.parametrize("length", [12, 13, 14])
def test_all_there_could_be_is_no_miss(length: int) -> None:
    cache = make_paged()
    read_prompt(cache, TEXT)
    assert open_sequence(cache, TEXT[:length]).miss is None


@pytest.mark.parametrize("length", [1, 3, 4])
def test_a_prompt_without_a_full_block_is_short(length: int) -> None:
    cache = make_paged()
    read_prompt(cache, TEXT)
    assert open_sequence(cache, TEXT[:length]).miss == "short"


def test_what_had_to_make_room_was_evicted_until_it_comes_again() -> None:
    cache = make_paged()
    read_prompt(cache, TEXT).close()
    evict(cache, 1)
    sequence = open_sequence(cache, TEXT)
    assert (sequence.found, sequence.miss) == (8, "evicted")
    sequence.close()
    evict(cache, 99)
    assert open_sequence(cache, TEXT).miss == "evicted"
    assert open_sequence(cache, TEXT).miss is None, "somebody is at it"


def test_under_another_salt_it_is_told_whose() -> None:
    cache = make_paged()
    read_prompt(cache, TEXT, salt=Salt("me", "one"))
    assert open_sequence(cache, TEXT, salt=Salt("me", "two")).miss == "salt"
    assert open_sequence(cache, TEXT, salt=Salt("you", "one")).miss == "cold"
    assert open_sequence(cache, TEXT, salt=Salt("me", "one")).miss is None


def test_who_wants_nothing_from_the_cache_bypasses_it() -> None:
    cache = make_paged()
    read_prompt(cache, TEXT)
    assert open_sequence(cache, TEXT, max_cached=0).miss == "bypass"
    assert open_sequence(cache, TEXT, max_cached=7).miss == "bypass"
    assert open_sequence(cache, TEXT, max_cached=12).miss is None
    assert open_sequence(make_paged(prefix_cache=False), TEXT).miss == "bypass"


def test_a_window_cannot_be_gone_on_from() -> None:
    assert open_sequence(make_cache("sliding_window", window=10), TEXT).miss == "window"


def test_a_nameless_token_makes_the_rest_short() -> None:
    assert open_sequence(make_paged(), [*TEXT[:4], -1, *TEXT[5:]]).miss == "cold"
    cache = make_paged()
    read_prompt(cache, TEXT)
    assert open_sequence(cache, [*TEXT[:4], -1, *TEXT[5:]]).miss == "short"
