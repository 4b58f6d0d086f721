"""paged finds the full blocks of common prefixes and no others, and evicts idle blocks in a sensible order."""

from __future__ import annotations

import math

import pytest
import torch

from cache_strategies.base import Rows
from cache_strategies.paged.cache import PagedCache, PagedSequence
from cache_strategies.types import NO_SALT, Salt, Text
from tests.cache_strategies.cache_driver import (
    BLOCK,
    assert_nothing_leaked,
    count_bytes,
    count_free_blocks,
    count_held_blocks,
    enter,
    evict,
    find_cached,
    get_block_bytes,
    get_token_bytes,
    make_cache,
    make_paged,
    open_sequence,
    read_prompt,
    stored_tokens,
)

TEXT = list(range(10, 24))  # 14 tokens: three blocks of 4, and two tokens


def test_a_prompt_that_begins_alike_finds_the_full_blocks() -> None:
    cache = make_paged()
    first = read_prompt(cache, TEXT)
    second = open_sequence(cache, [*TEXT[:13], 99])
    assert (second.found, second.length) == (12, 12)
    assert second.blocks[:3] == first.blocks[:3]
    assert second.blocks[3] != first.blocks[3]
    enter(cache, (second, [21, 99]))
    assert stored_tokens(cache, second) == [*TEXT[:12], 21, 99]
    assert stored_tokens(cache, first) == TEXT


@pytest.mark.parametrize(("common", "found"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (12, 12), (14, 12)])
def test_only_full_blocks_are_found(common: int, found: int) -> None:
    cache = make_paged()
    read_prompt(cache, TEXT)
    assert open_sequence(cache, [*TEXT[:common], *range(70, 80)]).found == found


@pytest.mark.parametrize(("length", "found"), [(8, 4), (9, 8), (4, 0), (5, 4), (1, 0)])
def test_the_last_token_is_always_computed(length: int, found: int) -> None:
    cache = make_paged()
    read_prompt(cache, TEXT)
    assert find_cached(cache, TEXT[:length]) == found
    assert open_sequence(cache, TEXT[:length]).found == found


def test_a_block_is_found_only_behind_the_same_beginning() -> None:
    cache = make_paged()
    read_prompt(cache, TEXT)
    assert find_cached(cache, [1, *TEXT[1:]]) == 0
    assert find_cached(cache, TEXT[4:]) == 0


def test_tokens_that_were_generated_are_found_too() -> None:
    cache = make_paged()
    sequence = read_prompt(cache, TEXT[:3])
    for token in TEXT[3:]:
        enter(cache, (sequence, [token]))
    assert find_cached(cache, TEXT) == 12


def test_salts_share_nothing() -> None:
    cache = make_paged()
    read_prompt(cache, TEXT, salt=Salt("a"))
    assert find_cached(cache, TEXT) == find_cached(cache, TEXT, salt=Salt("b")) == 0
    assert find_cached(cache, TEXT, salt=Salt("a")) == 12
    assert open_sequence(cache, TEXT, salt=Salt("b")).found == 0
    assert open_sequence(cache, TEXT, salt=Salt("a")).found == 12


def test_without_prefix_cache_nothing_is_found_or_kept() -> None:
    cache = make_paged(prefix_cache=False)
    sequence = read_prompt(cache, TEXT)
    assert find_cached(cache, TEXT) == open_sequence(cache, TEXT).found == 0
    held = count_held_blocks(cache)
    sequence.close()
    assert count_held_blocks(cache) == held - 4


def test_a_caller_may_limit_how_much_is_taken() -> None:
    cache = make_paged()
    read_prompt(cache, TEXT)
    assert find_cached(cache, TEXT, max_cached=11) == 8
    assert find_cached(cache, TEXT, max_cached=0) == 0
    sequence = read_prompt(cache, TEXT, max_cached=5)
    assert sequence.found == 4
    assert stored_tokens(cache, sequence) == TEXT
    cache.check_integrity()


@pytest.mark.parametrize("at", [0, 5, 13])
def test_blocks_with_negative_ids_and_all_behind_them_are_never_shared(at: int) -> None:
    cache = make_paged()
    text = [*TEXT[:at], -1, *TEXT[at:]]
    sequence = read_prompt(cache, text)
    for token in (-7, *range(6)):
        enter(cache, (sequence, [token]))
    before = at // BLOCK * BLOCK
    assert find_cached(cache, [*text, -7, *range(6)]) == before
    assert open_sequence(cache, text).found == before
    assert stored_tokens(cache, sequence) == [*text, -7, *range(6)]
    cache.check_integrity()


# ---------------------------------------------------------------- idle blocks
def test_blocks_nobody_uses_any_more_are_still_found() -> None:
    cache = make_paged()
    read_prompt(cache, TEXT).close()
    assert cache.usage().idle == 3 * BLOCK * get_token_bytes(cache)
    sequence = open_sequence(cache, TEXT)
    assert sequence.found == 12
    assert cache.usage().idle == 0
    enter(cache, (sequence, TEXT[12:]))
    assert stored_tokens(cache, sequence) == TEXT
    sequence.close()
    assert_nothing_leaked(cache)


def test_ends_of_texts_leave_before_their_beginnings() -> None:
    cache = make_paged()
    read_prompt(cache, TEXT).close()
    assert [find_cached(cache, TEXT), *(after_eviction(cache) for _ in range(3))] == [12, 8, 4, 0]
    assert_nothing_leaked(cache)


def after_eviction(cache: PagedCache) -> int:
    assert evict(cache, 1) == 1
    return find_cached(cache, TEXT)


def test_what_was_used_last_leaves_last() -> None:
    cache = make_paged()
    texts = [[n] * 9 for n in range(3)]
    for text in texts:
        read_prompt(cache, text).close()
    read_prompt(cache, texts[0]).close()
    evict(cache, 2)
    assert [find_cached(cache, text) for text in texts] == [8, 0, 8]
    evict(cache, 2)
    assert [find_cached(cache, text) for text in texts] == [8, 0, 0]


def test_a_look_up_changes_nothing() -> None:
    cache = make_paged()
    texts = [[n] * 9 for n in range(2)]
    for text in texts:
        read_prompt(cache, text).close()
    before = cache.usage()
    assert find_cached(cache, texts[0]) == 8
    assert cache.usage() == before
    evict(cache, 2)
    assert [find_cached(cache, text) for text in texts] == [0, 8]


def test_idle_blocks_make_room_for_new_texts_and_used_ones_do_not() -> None:
    cache = make_paged(blocks=4)
    sequence = read_prompt(cache, TEXT[:8])
    read_prompt(cache, [5] * 8).close()
    other = read_prompt(cache, [6] * 8)
    assert cache.open(Text([7] * 5)) is None
    assert stored_tokens(cache, sequence) == TEXT[:8]
    assert stored_tokens(cache, other) == [6] * 8
    cache.check_integrity()


def test_what_open_is_about_to_use_is_not_evicted_for_it() -> None:
    cache = make_paged(blocks=4)
    read_prompt(cache, [*TEXT[:8], 1]).close()
    read_prompt(cache, [7] * 5).close()
    sequence = open_sequence(cache, TEXT)
    assert sequence.found == 8
    enter(cache, (sequence, TEXT[8:]))
    assert stored_tokens(cache, sequence) == TEXT


def test_an_open_that_fails_leaves_no_trace() -> None:
    cache = make_paged(blocks=5)
    read_prompt(cache, TEXT[:9]).close()
    sequence = read_prompt(cache, [7] * 9)
    before = (cache.usage(), count_free_blocks(cache), len(cache.sequences))
    assert cache.open(Text([*TEXT, *range(6)])) is None
    assert (cache.usage(), count_free_blocks(cache), len(cache.sequences)) == before
    assert find_cached(cache, [*TEXT[:9], 5]) == 8
    sequence.close()
    assert_nothing_leaked(cache)


def test_nothing_is_evicted_for_a_text_there_is_no_room_for_anyway() -> None:
    cache = make_paged(blocks=6)
    read_prompt(cache, TEXT[:9]).close()
    sequence = read_prompt(cache, [7] * 9)
    assert cache.open(Text([8] * 16)) is None
    assert not sequence.reserve(16)
    assert find_cached(cache, TEXT) == 8
    cache.check_integrity()


def test_there_is_a_sequence_for_as_many_as_were_announced() -> None:
    cache = make_paged(seats=2)
    first, _ = open_sequence(cache, [1]), open_sequence(cache, [2])
    assert cache.open(Text([3])) is None
    first.close()
    assert cache.open(Text([3])) is not None


# ---------------------------------------------------------------- books
def test_usage_counts_shared_tokens_once() -> None:
    cache = make_paged()
    read_prompt(cache, TEXT)
    read_prompt(cache, TEXT)
    usage, size = cache.usage(), get_block_bytes(cache)
    assert (usage.seats, usage.tokens) == (2, 12 + 2 + 2)
    assert usage.reserved == (3 + 1 + 1) * size
    assert usage.used == 16 * get_token_bytes(cache)
    assert usage.reserved == usage.used + usage.idle + usage.wasted
    assert usage.limit == 200 * size


def test_books_that_do_not_add_up_are_noticed() -> None:
    for spoil in (
        lambda cache, sequence: cache.pool.incref(sequence.blocks[0]),
        lambda cache, sequence: cache.setup.memory.regions[0].allocate(),
        lambda cache, sequence: sequence.blocks.append(sequence.blocks[0]),
        lambda cache, sequence: cache.pending.add(sequence.blocks[3], sequence),
        lambda cache, sequence: sequence.tokens.pop(),
    ):
        cache = make_paged()
        sequence = read_prompt(cache, TEXT)
        cache.check_integrity()
        spoil(cache, sequence)
        with pytest.raises(AssertionError):
            cache.check_integrity()


@pytest.mark.parametrize("block_size", [1, 3, 4, 64])
def test_sizes_are_what_a_sequence_comes_to(block_size: int) -> None:
    cache = make_paged(block_size=block_size)
    for length in (1, 3, 4, 5, 64):
        sequence = read_prompt(cache, [length] * length)
        assert cache.usage().reserved == count_bytes(cache, length)
        sequence.close()
        evict(cache, 1000)


def test_a_block_is_never_longer_than_the_longest_text() -> None:
    cache = make_cache("paged", block_size=1024, max_seq_len=64)
    assert cache.block_layout(cache.options, cache.setup.geometry) == (64, 1)


def spoil(cache: PagedCache, sequence: PagedSequence, blocks: slice) -> None:
    for block in sequence.blocks[blocks]:
        cache.store.v(0)[block, 0, -1, 2] = math.nan


def test_what_is_not_finite_is_found_by_nobody_new() -> None:
    cache = make_paged()
    text = list(range(20))
    read_prompt(cache, text[:8]).close()
    sound, unsound = read_prompt(cache, text[:8] + [77] * 8), read_prompt(cache, text)
    waits, alike = open_sequence(cache, [*text, 1]), open_sequence(cache, text[:12])
    spoil(cache, unsound, slice(2, None))
    unsound.spoiled = True
    unsound.close()
    assert find_cached(cache, [*text, 1]) == 8, "what is sound stays"
    enter(cache, (sound, [1] * 4), (waits, [1] * 4), (alike, text[8:12]))  # those that hold it go on
    assert find_cached(cache, [*text[:8], *[77] * 8, 1, 1, 1, 1, 1]) == 20
    for sequence in (sound, waits, alike):
        cache.check_integrity()
        sequence.close()
    read_prompt(cache, text).close()
    assert find_cached(cache, [*text, 1, 1, 1, 1, 1]) == 20, "computed anew; what `waits` had behind it is not found"
    assert_nothing_leaked(cache)


def test_pins_of_sound_blocks_stay_found() -> None:
    cache = make_paged()
    text = list(range(20))
    read_prompt(cache, text[:8]).close()
    pin = cache.pin(text[:8], salt=NO_SALT, ttl=60)
    sequence = read_prompt(cache, text)
    spoil(cache, sequence, slice(4, None))
    sequence.spoiled = True
    sequence.close()
    assert find_cached(cache, text) == 16
    cache.unpin(pin.id)
    assert_nothing_leaked(cache)


def test_what_is_unsound_before_it_is_whole_is_computed_by_who_waits_for_it() -> None:
    cache = make_paged()
    text = list(range(20))
    unsound, heir = open_sequence(cache, text), open_sequence(cache, text)
    enter(cache, (unsound, text[:8]))
    spoil(cache, unsound, slice(1, 2))
    unsound.spoiled = True
    unsound.close()
    assert heir.length == 8
    enter(cache, (heir, text[8:]))
    heir.close()
    assert find_cached(cache, [*text, 1]) == 4
    assert_nothing_leaked(cache)


def test_scales_tell_of_numbers_in_int8() -> None:
    cache = make_paged(k_dtype="int8", v_dtype="int8")
    sequence = read_prompt(cache, list(range(8)))
    assert cache.store.find_finite_blocks(sequence.blocks) == [True, True]
    assert sequence.reserve(4)
    (location,) = cache.locate(Rows([sequence], [4])).by_layer
    assert location is not None
    k = torch.full((4, 1, 4), math.nan)
    cache.setup.ops.write_kv(location.store, 0, k, k, location.at)
    sequence.commit([1] * 4)
    assert cache.store.find_finite_blocks(sequence.blocks) == [True, True, False]
    assert cache.store.find_finite_blocks([]) == []
