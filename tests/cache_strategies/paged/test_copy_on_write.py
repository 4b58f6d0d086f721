"""paged never writes a block that another sequence shares or that has a hash: it copies the block first."""

from __future__ import annotations

import pytest

from cache_strategies.types import Text
from tests.cache_strategies.cache_driver import (
    assert_nothing_leaked,
    count_free_blocks,
    count_held_blocks,
    enter,
    find_cached,
    make_paged,
    open_sequence,
    read_prompt,
    stored_tokens,
    write,
)

TEXT = list(range(10, 20))  # 10 tokens: two blocks of 4, and two tokens


# ---------------------------------------------------------------- fork
def test_a_fork_shares_everything_until_somebody_writes() -> None:
    cache = make_paged()
    parent = read_prompt(cache, TEXT)
    held = count_held_blocks(cache)
    child = parent.fork()
    assert child is not None
    assert (child.length, child.found) == (parent.length, parent.found)
    assert count_held_blocks(cache) == held
    assert stored_tokens(cache, child) == TEXT
    cache.check_integrity()


def test_the_first_to_write_gets_a_copy_and_the_other_the_original() -> None:
    cache = make_paged()
    parent = read_prompt(cache, TEXT)
    child = parent.fork()
    assert child is not None
    shared = list(parent.blocks)
    enter(cache, (child, [1]))
    assert child.blocks[:2] == shared[:2]  # type: ignore[attr-defined]
    assert child.blocks[2] != shared[2]  # type: ignore[attr-defined]
    enter(cache, (parent, [2]))
    assert parent.blocks == shared
    assert stored_tokens(cache, parent) == [*TEXT, 2]
    assert stored_tokens(cache, child) == [*TEXT, 1]
    cache.check_integrity()


@pytest.mark.parametrize("forks", [1, 2, 5])
def test_all_forks_may_write_in_the_same_step(forks: int) -> None:
    cache = make_paged()
    sequences = [read_prompt(cache, TEXT)]
    for _ in range(forks):
        sequences.append(sequences[0].fork())  # type: ignore[arg-type]
    enter(cache, *((sequence, [100 + i] * (1 + i % 2)) for i, sequence in enumerate(sequences)))
    for i, sequence in enumerate(sequences):
        assert stored_tokens(cache, sequence) == [*TEXT, *[100 + i] * (1 + i % 2)]
    for sequence in sequences:
        sequence.close()
    assert_nothing_leaked(cache)


def test_a_fork_at_the_end_of_a_block_copies_nothing() -> None:
    cache = make_paged()
    parent = read_prompt(cache, TEXT[:8])
    child = parent.fork()
    assert child is not None
    enter(cache, (parent, [1]), (child, [2]))
    assert count_held_blocks(cache) == 4
    assert stored_tokens(cache, parent) == [*TEXT[:8], 1]
    assert stored_tokens(cache, child) == [*TEXT[:8], 2]


def test_forks_of_one_text_name_the_blocks_they_fill_by_what_is_in_them() -> None:
    cache = make_paged()
    parent = read_prompt(cache, TEXT)
    child = parent.fork()
    assert child is not None
    enter(cache, (parent, [1, 2, 3]), (child, [4, 5, 6]))
    assert find_cached(cache, [*TEXT, 1, 2, 9]) == find_cached(cache, [*TEXT, 4, 5, 9]) == 12
    assert find_cached(cache, [*TEXT, 1, 5, 9]) == 8


def test_there_is_no_fork_half_way_through_a_prompt() -> None:
    cache = make_paged()
    sequence = open_sequence(cache, TEXT)
    enter(cache, (sequence, TEXT[:6]))
    assert sequence.fork() is None
    waiting = open_sequence(cache, TEXT)
    assert waiting.fork() is None
    enter(cache, (sequence, TEXT[6:]))
    assert sequence.fork() is not None
    cache.check_integrity()


def test_there_is_no_fork_of_a_copy_that_has_not_run() -> None:
    cache = make_paged()
    parent = read_prompt(cache, TEXT)
    child = parent.fork()
    assert child is not None
    assert child.reserve(1)
    assert child.fork() is None
    write(cache, (child, [1]))
    assert child.fork() is not None


def test_there_is_no_fork_without_a_free_row() -> None:
    cache = make_paged(seats=1)
    assert read_prompt(cache, TEXT).fork() is None
    cache.check_integrity()


# ---------------------------------------------------------------- sources of copies
def test_the_source_stays_until_the_copy_has_run() -> None:
    cache = make_paged(blocks=4)
    parent = read_prompt(cache, TEXT)
    child = parent.fork()
    assert child is not None
    assert child.reserve(1)
    source = parent.blocks[2]
    parent.close()
    assert count_free_blocks(cache) == 0
    assert cache.open(Text([1])) is None, "the source's block is not free yet"
    cache.check_integrity()
    write(cache, (child, [1]))
    assert stored_tokens(cache, child) == [*TEXT, 1]
    taken = open_sequence(cache, [1])
    assert taken.blocks == [source]


def test_a_writer_that_leaves_before_its_copy_ran_lets_go_of_both() -> None:
    cache = make_paged()
    parent = read_prompt(cache, TEXT)
    child = parent.fork()
    assert child is not None
    assert child.reserve(1)
    child.close()
    cache.check_integrity()
    enter(cache, (parent, [1]))
    assert stored_tokens(cache, parent) == [*TEXT, 1]
    assert count_held_blocks(cache) == 3
    parent.close()
    assert_nothing_leaked(cache)


def test_a_writer_may_be_truncated_before_its_copy_ran() -> None:
    cache = make_paged()
    parent = read_prompt(cache, TEXT)
    child = parent.fork()
    assert child is not None
    assert child.reserve(1)
    child.truncate(7)
    enter(cache, (child, [1, 2]), (parent, [3]))
    assert stored_tokens(cache, child) == [*TEXT[:7], 1, 2]
    assert stored_tokens(cache, parent) == [*TEXT, 3]
    cache.check_integrity()


def test_room_for_a_copy_may_be_missing_and_nothing_is_lost() -> None:
    cache = make_paged(blocks=3)
    parent = read_prompt(cache, TEXT)
    child = parent.fork()
    assert child is not None
    assert not child.reserve(1)
    cache.check_integrity()
    parent.close()
    enter(cache, (child, [1]))
    assert stored_tokens(cache, child) == [*TEXT, 1]


def test_reserving_twice_copies_once() -> None:
    cache = make_paged()
    parent = read_prompt(cache, TEXT)
    child = parent.fork()
    assert child is not None
    cache.poll()
    assert child.reserve(1)
    held = count_held_blocks(cache)
    assert child.reserve(1)
    assert count_held_blocks(cache) == held
    write(cache, (child, [1]))
    assert stored_tokens(cache, child) == [*TEXT, 1]
    cache.check_integrity()


# ---------------------------------------------------------------- truncate
def test_truncating_into_a_shared_block_copies_before_it_writes() -> None:
    cache = make_paged()
    first, second = read_prompt(cache, TEXT), read_prompt(cache, TEXT)
    second.truncate(6)
    assert stored_tokens(cache, second) == TEXT[:6]
    enter(cache, (second, [1, 2, 3]))
    assert stored_tokens(cache, first) == TEXT
    assert stored_tokens(cache, second) == [*TEXT[:6], 1, 2, 3]
    assert find_cached(cache, TEXT) == 8
    cache.check_integrity()


def test_truncating_into_a_block_of_its_own_takes_the_name_away_when_it_is_written() -> None:
    cache = make_paged()
    sequence = read_prompt(cache, TEXT)
    sequence.truncate(6)
    assert find_cached(cache, TEXT) == 8, "it still holds what it held"
    enter(cache, (sequence, [1, 2, 3]))
    assert find_cached(cache, TEXT) == 4
    assert find_cached(cache, [*TEXT[:6], 1, 2, 3]) == 8
    assert stored_tokens(cache, sequence) == [*TEXT[:6], 1, 2, 3]
    sequence.close()
    assert_nothing_leaked(cache)


@pytest.mark.parametrize("length", [0, 3, 4, 8, 10])
def test_truncating_gives_back_what_lies_behind(length: int) -> None:
    cache = make_paged(prefix_cache=False)
    sequence = read_prompt(cache, TEXT)
    sequence.truncate(length)
    assert sequence.length == length
    assert count_held_blocks(cache) == -(-length // 4)
    enter(cache, (sequence, [1, 2]))
    assert stored_tokens(cache, sequence) == [*TEXT[:length], 1, 2]


def test_truncating_below_what_was_found_lowers_found() -> None:
    cache = make_paged()
    read_prompt(cache, TEXT)
    sequence = read_prompt(cache, TEXT)
    assert sequence.found == 8
    sequence.truncate(5)
    assert sequence.found == 5
