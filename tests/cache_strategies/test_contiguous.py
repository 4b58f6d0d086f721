"""contiguous reuses the block of a closed sequence with a common prefix, and no other memory."""

from __future__ import annotations

import pytest

from cache_strategies.contiguous import ContiguousCache
from cache_strategies.types import NO_SALT, Salt, SaltScope
from tests.cache_strategies.cache_driver import (
    assert_nothing_leaked,
    enter,
    evict,
    find_cached,
    get_block_bytes,
    make_cache,
    open_sequence,
    read_prompt,
    stored_tokens,
)

TEXT = list(range(10, 24))


def contiguous(*, blocks: int = 4, **options: bool) -> ContiguousCache:
    """Return a contiguous cache with memory for `blocks` sequences."""
    cache = make_cache("contiguous", blocks=blocks, **options)
    assert isinstance(cache, ContiguousCache)
    return cache


def left(cache: ContiguousCache, *texts: list[int], salt: Salt = NO_SALT) -> None:
    """Prefill and close texts one after another, each in a block of its own."""
    sequences = [read_prompt(cache, text, salt=salt) for text in texts]
    for sequence in sequences:
        sequence.close()
    cache.check_integrity()


@pytest.mark.parametrize(("common", "rest"), [(14, [99]), (13, [99]), (7, [99, 98]), (14, [])])
def test_a_later_sequence_goes_on_behind_what_they_share(common: int, rest: list[int]) -> None:
    cache = contiguous()
    left(cache, TEXT)
    text = TEXT[:common] + rest
    found = min(common, len(text) - 1)
    assert find_cached(cache, text) == found
    sequence = open_sequence(cache, text)
    assert (sequence.found, sequence.length) == (found, found)
    enter(cache, (sequence, text[found:]))
    assert stored_tokens(cache, sequence) == text
    sequence.close()
    assert_nothing_leaked(cache)


def test_the_longest_is_taken_and_of_equal_ones_the_latest() -> None:
    cache = contiguous()
    left(cache, TEXT, [*TEXT[:12], 1, 1], [*TEXT[:12], 2, 2])
    first = open_sequence(cache, [*TEXT, 99])
    assert first.found == 14
    second = open_sequence(cache, [*TEXT[:12], 99])
    assert second.found == 12
    enter(cache, (second, [99]))
    assert find_cached(cache, [*TEXT[:12], 1, 1, 1]) == 14, "the latest was taken, not this one"


def test_a_long_text_is_not_given_up_for_a_short_beginning_while_there_is_other_memory() -> None:
    cache = contiguous(blocks=2)
    left(cache, TEXT)
    other = [*TEXT[:5], *range(70, 80)]
    assert open_sequence(cache, other).found == 0
    assert find_cached(cache, [*TEXT, 99]) == 14
    assert open_sequence(cache, other).found == 5, "there is no other any more"


def test_two_that_run_at_once_share_nothing_and_are_told() -> None:
    cache = contiguous()
    read_prompt(cache, TEXT)
    sequence = open_sequence(cache, [*TEXT, 99])
    assert (sequence.found, sequence.miss) == (0, "busy")
    assert open_sequence(cache, [5, 5, 5]).miss == "cold"


def test_another_salt_finds_nothing() -> None:
    cache = contiguous()
    left(cache, TEXT, salt=Salt("a"))
    other = open_sequence(cache, TEXT, salt=Salt("b"))
    assert (other.found, other.miss) == (0, "cold"), "nobody hears of other tenants"
    other = open_sequence(cache, TEXT, salt=Salt("a", "x"))
    assert (other.found, other.miss) == (0, "salt")
    assert open_sequence(cache, TEXT, salt=Salt("a")).found == 13


def test_max_cached_limits_and_bypasses() -> None:
    cache = contiguous()
    left(cache, TEXT)
    assert find_cached(cache, TEXT, max_cached=0) == 0
    sequence = open_sequence(cache, TEXT, max_cached=9)
    assert (sequence.found, sequence.miss) == (9, "bypass")


def test_idle_memory_goes_to_whoever_needs_it_the_oldest_first() -> None:
    cache = contiguous(blocks=2)
    left(cache, TEXT, [1, 2, 3, 4])
    assert cache.blocks().idle == 2
    open_sequence(cache, [7, 7, 7])
    assert find_cached(cache, [*TEXT, 1]) == 0
    assert find_cached(cache, [1, 2, 3, 4, 5]) == 4
    usage = cache.usage()
    assert (usage.idle, usage.reserved) == (get_block_bytes(cache), 2 * get_block_bytes(cache))


def test_what_was_truncated_or_has_no_name_is_not_found() -> None:
    cache = contiguous()
    sequence = read_prompt(cache, [*TEXT[:6], -1, *TEXT[7:]])
    sequence.truncate(10)
    sequence.close()
    assert find_cached(cache, [*TEXT[:6], -1, *TEXT[7:]]) == 6
    nameless = read_prompt(cache, [-1, 2, 3])
    nameless.close()
    assert cache.blocks().idle == 1


def test_a_fork_is_found_as_well() -> None:
    cache = contiguous()
    parent = read_prompt(cache, TEXT)
    child = parent.fork()
    assert child is not None
    enter(cache, (child, [50, 51]))
    child.close()
    assert find_cached(cache, [*TEXT, 50, 51, 52]) == 16


def test_clear_forgets_what_is_idle_and_what_will_be() -> None:
    cache = contiguous()
    left(cache, TEXT, salt=Salt("a"))
    left(cache, [1, 2, 3, 4], salt=Salt("b"))
    running = read_prompt(cache, [7, 7, 7, 7], salt=Salt("a"))
    assert cache.clear(SaltScope("a")) == get_block_bytes(cache)
    running.close()
    assert find_cached(cache, [7, 7, 7, 7, 7], salt=Salt("a")) == find_cached(cache, TEXT, salt=Salt("a")) == 0
    assert find_cached(cache, [1, 2, 3, 4, 5], salt=Salt("b")) == 4
    assert cache.clear() == get_block_bytes(cache)
    assert_nothing_leaked(cache)


def test_it_can_be_switched_off() -> None:
    cache = contiguous(prefix_cache=False)
    left(cache, TEXT)
    sequence = open_sequence(cache, TEXT)
    assert (sequence.found, sequence.miss) == (0, "bypass")
    assert cache.idle_bytes == 0


def test_what_goes_first_is_what_has_outlived_its_time_then_what_is_worth_least() -> None:
    cache = contiguous(blocks=3)
    texts = [[start, start + 1, start + 2] for start in (10, 20, 30)]
    kept_for = ((1, None), (0, None), (2, 0.0))
    sequences = [
        read_prompt(cache, text, priority=priority, ttl=ttl)
        for text, (priority, ttl) in zip(texts, kept_for, strict=True)
    ]
    for sequence in sequences:
        sequence.close()
    kept = []
    for _ in texts:
        assert evict(cache, 1) == 1
        kept.append([find_cached(cache, [*text, 99]) > 0 for text in texts])
    assert kept == [[True, True, False], [True, False, False], [False, False, False]]


def test_at_its_limit_there_is_no_other_memory() -> None:
    cache = contiguous(blocks=4)
    left(cache, TEXT)
    cache.setup.memory.shared.set_share(cache.name, floor=0, limit=get_block_bytes(cache))
    assert find_cached(cache, [*TEXT[:5], 99]) == 5
