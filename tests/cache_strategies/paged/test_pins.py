"""Pinned prefixes stay until they expire, and leave enough memory for the longest sequence of each strategy."""

from __future__ import annotations

import pytest
import torch

from cache_strategies.base import CacheSetup
from cache_strategies.memory import make_memory
from cache_strategies.paged.base import PagedOptions
from cache_strategies.paged.cache import PagedCache
from cache_strategies.types import NO_SALT, Geometry, PinError, Salt, SaltScope
from kernels.reference.backend import ReferenceOps
from tests.cache_strategies.cache_driver import (
    BLOCK,
    LAYER,
    assert_nothing_leaked,
    evict,
    find_cached,
    get_block_bytes,
    make_paged,
    open_sequence,
    read_prompt,
)

TEXT = list(range(10, 24))  # three blocks of 4, and two tokens


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def with_clock(**options: object) -> tuple[PagedCache, Clock]:
    clock, geometry = Clock(), Geometry([LAYER], torch.float32, 8, 64, 64)
    memory = make_memory(1 << 20)
    setup = CacheSetup("it", geometry, memory.add_instance("it"), ReferenceOps(), clock=clock)
    cache = PagedCache(setup, PagedOptions.model_validate({"block_size": BLOCK, **options}))
    memory.set_owner("it", cache)
    return cache, clock


def test_a_pinned_prefix_survives_every_want_of_memory() -> None:
    cache = make_paged()
    read_prompt(cache, TEXT).close()
    pin = cache.pin([*TEXT, 99], salt=NO_SALT, ttl=60)
    assert (pin.num_tokens, pin.num_bytes) == (12, 3 * get_block_bytes(cache))
    assert cache.pins() == [pin]
    evict(cache, 99)
    cache.check_integrity()
    assert find_cached(cache, TEXT) == 12
    assert cache.usage().reserved == pin.num_bytes
    assert cache.unpin(pin.id)
    assert not cache.unpin(pin.id)
    evict(cache, 99)
    assert find_cached(cache, TEXT) == 0
    assert_nothing_leaked(cache)


def test_its_time_is_over_by_itself() -> None:
    cache, clock = with_clock()
    read_prompt(cache, TEXT).close()
    cache.pin(TEXT, salt=NO_SALT, ttl=10)
    for now, pins in ((109.9, 1), (110.0, 0)):
        clock.now = now
        cache.poll()
        assert len(cache.pins()) == pins
    assert_nothing_leaked(cache)


def test_two_pins_on_the_same_blocks_are_two() -> None:
    cache = make_paged()
    read_prompt(cache, TEXT).close()
    first, second = (cache.pin(TEXT, salt=NO_SALT, ttl=60) for _ in range(2))
    assert first.id != second.id
    cache.unpin(first.id)
    evict(cache, 99)
    assert find_cached(cache, TEXT) == 12
    cache.check_integrity()


def test_what_is_not_there_or_not_computed_yet_cannot_be_pinned() -> None:
    cache = make_paged()
    open_sequence(cache, TEXT)
    with pytest.raises(PinError, match="no block of this prefix is cached: send it as a prompt first"):
        cache.pin(TEXT, salt=NO_SALT, ttl=60)
    read_prompt(cache, [1, 2, 3, 4, 5], salt=Salt("a"))
    with pytest.raises(PinError, match="no block of this prefix"):
        cache.pin([1, 2, 3, 4, 5], salt=Salt("b"), ttl=60)


def test_pins_leave_room_for_the_longest_sequence() -> None:
    cache = make_paged(blocks=18)  # the longest has 16 blocks
    read_prompt(cache, TEXT).close()
    with pytest.raises(
        PinError, match=r"longest sequence of strategy 'it', .* bytes, would not fit: pin a shorter prefix"
    ):
        cache.pin(TEXT, salt=NO_SALT, ttl=60)
    pin = cache.pin(TEXT[:9], salt=NO_SALT, ttl=60)
    assert pin.num_tokens == 8
    longest = read_prompt(cache, list(range(1000, 1064)))
    assert longest.length == 64
    cache.check_integrity()


def test_who_writes_behind_a_pinned_beginning_does_not_change_it() -> None:
    cache = make_paged()
    sequence = read_prompt(cache, TEXT[:12])
    cache.pin(TEXT[:12], salt=NO_SALT, ttl=60)
    sequence.truncate(10)
    assert sequence.reserve(2)
    assert sequence.blocks[2] not in cache.pinned.blocks
    cache.check_integrity()


def test_clear_takes_pins_along_under_its_salt() -> None:
    cache = make_paged()
    for salt in (Salt("a"), Salt("b")):
        read_prompt(cache, TEXT, salt=salt).close()
        cache.pin(TEXT, salt=salt, ttl=60)
    assert cache.clear(SaltScope("a")) == 3 * get_block_bytes(cache)
    assert [pin.salt for pin in cache.pins()] == [Salt("b")]
    assert (find_cached(cache, TEXT, salt=Salt("a")), find_cached(cache, TEXT, salt=Salt("b"))) == (0, 12)
    cache.clear()
    assert_nothing_leaked(cache)


def test_clear_hides_what_is_in_use_from_everybody_new() -> None:
    cache = make_paged()
    sequence, waiting = open_sequence(cache, TEXT), open_sequence(cache, TEXT)
    assert waiting.found == 12
    cache.clear()
    cache.check_integrity()
    assert find_cached(cache, TEXT) == 0
    other = open_sequence(cache, TEXT)
    assert other.found == 0
    sequence.close()  # whoever waits inherits, cleared or not
    assert waiting.ready()
    cache.check_integrity()
    waiting.close()
    other.close()
    assert_nothing_leaked(cache)


def test_what_is_left_goes_by_priority_then_by_time() -> None:
    cache, clock = with_clock()
    texts = {name: [ord(name)] * 5 for name in "abc"}
    for name, priority, ttl in (("a", 1, None), ("b", 0, None), ("c", 2, 5.0)):
        read_prompt(cache, texts[name], priority=priority, ttl=ttl).close()
    clock.now += 6
    gone = []
    for _ in range(3):
        before = {name for name in texts if find_cached(cache, texts[name])}
        evict(cache, 1)
        gone += before - {name for name in texts if find_cached(cache, texts[name])}
    assert gone == ["c", "b", "a"]


def test_an_instance_has_a_time_to_live() -> None:
    cache, clock = with_clock(ttl=30)
    read_prompt(cache, [1] * 5).close()
    clock.now += 31
    read_prompt(cache, [2] * 5).close()
    read_prompt(cache, [1] * 5, max_cached=0).close()
    evict(cache, 1)
    assert find_cached(cache, [2] * 5) == 4
