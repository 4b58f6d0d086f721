"""paged shares blocks that are still computed: one sequence computes, others wait and take over if it closes."""

from __future__ import annotations

from cache_strategies.types import Text
from tests.cache_strategies.cache_driver import (
    assert_nothing_leaked,
    count_free_blocks,
    enter,
    evict,
    find_cached,
    get_token_bytes,
    make_paged,
    open_sequence,
    stored_tokens,
    write,
)

TEXT = list(range(10, 24))  # 14 tokens: three blocks of 4, and two tokens


def test_a_second_sequence_waits_until_the_first_has_computed() -> None:
    cache = make_paged()
    first, second = open_sequence(cache, TEXT), open_sequence(cache, TEXT)
    assert (first.found, second.found) == (0, 12)
    assert first.ready()
    assert not second.ready()
    enter(cache, (first, TEXT))
    assert second.ready()
    enter(cache, (second, TEXT[12:]))
    assert stored_tokens(cache, second) == TEXT
    cache.check_integrity()


def test_it_is_ready_in_the_step_that_computes_what_it_waits_for() -> None:
    cache = make_paged()
    first, second = open_sequence(cache, TEXT), open_sequence(cache, TEXT)
    cache.poll()
    assert first.reserve(14)
    assert second.ready()
    assert second.reserve(2)
    write(cache, (first, TEXT), (second, TEXT[12:]))
    assert stored_tokens(cache, first) == stored_tokens(cache, second) == TEXT


def test_a_part_of_the_prompt_is_not_enough() -> None:
    cache = make_paged()
    first, second = open_sequence(cache, TEXT), open_sequence(cache, TEXT)
    short = open_sequence(cache, TEXT[:5])
    for start, end in ((0, 3), (3, 7), (7, 11)):
        cache.poll()
        assert first.reserve(end - start)
        assert not second.ready()
        assert short.ready() is (end >= 4)
        write(cache, (first, TEXT[start:end]))
        assert not second.ready()
    cache.poll()
    assert first.reserve(1)
    assert second.ready()


def test_a_step_that_was_granted_and_did_not_happen_grants_nothing() -> None:
    cache = make_paged()
    first, second = open_sequence(cache, TEXT), open_sequence(cache, TEXT)
    cache.poll()
    assert first.reserve(14)
    write(cache, (first, TEXT), commit=False)  # failed
    cache.poll()
    assert not second.ready()
    enter(cache, (first, TEXT))
    assert second.ready()


def test_a_step_that_entered_less_than_was_granted_grants_nothing_more() -> None:
    cache = make_paged()
    first, second = open_sequence(cache, TEXT), open_sequence(cache, TEXT)
    cache.poll()
    assert first.reserve(14)
    write(cache, (first, TEXT), commit=False)
    first.commit(TEXT[:6])
    cache.poll()
    assert not second.ready()


def test_a_grant_ends_when_who_gave_it_leaves() -> None:
    cache = make_paged()
    first, second, third = (open_sequence(cache, TEXT) for _ in range(3))
    cache.poll()
    assert first.reserve(14)
    assert third.ready()
    first.close()
    assert not third.ready(), "nobody computes it in this step"
    assert second.ready()
    assert second.reserve(14)
    assert third.ready()


# ---------------------------------------------------------------- heirs
def test_who_waits_inherits_when_the_owner_closes() -> None:
    cache = make_paged()
    first, second, third = (open_sequence(cache, TEXT) for _ in range(3))
    first.close()
    assert (second.length, second.found) == (0, 0)
    assert (third.length, third.found) == (12, 12)
    assert second.ready()
    assert not third.ready()
    enter(cache, (second, TEXT))
    enter(cache, (third, TEXT[12:]))
    assert stored_tokens(cache, second) == stored_tokens(cache, third) == TEXT
    cache.check_integrity()


def test_an_heir_goes_on_where_the_owner_stopped() -> None:
    cache = make_paged()
    first, second = open_sequence(cache, TEXT), open_sequence(cache, TEXT)
    enter(cache, (first, TEXT[:7]))
    first.close()
    assert (second.length, second.found) == (4, 4), "a block that was half computed is computed again"
    enter(cache, (second, TEXT[4:]))
    assert stored_tokens(cache, second) == TEXT


def test_heirs_with_beginnings_of_different_lengths_share_the_work() -> None:
    cache = make_paged()
    other = [*TEXT[:8], *range(50, 60)]
    owner, short, long, full = (
        open_sequence(cache, TEXT),
        open_sequence(cache, other),
        open_sequence(cache, TEXT[:13]),
        open_sequence(cache, TEXT),
    )
    assert [sequence.length for sequence in (short, long, full)] == [8, 12, 12]
    enter(cache, (owner, TEXT[:5]))
    owner.close()
    assert [sequence.length for sequence in (short, long, full)] == [4, 8, 12]
    assert [sequence.ready() for sequence in (short, long, full)] == [True, False, False]
    enter(cache, (short, other[4:9]))
    assert [sequence.ready() for sequence in (short, long, full)] == [True, True, False]
    long.close()
    assert full.length == 8
    enter(cache, (full, TEXT[8:]), (short, other[9:]))
    assert stored_tokens(cache, full) == TEXT
    assert stored_tokens(cache, short) == other
    for sequence in (short, full):
        sequence.close()
    assert_nothing_leaked(cache)


def test_one_that_waits_may_leave() -> None:
    cache = make_paged()
    first, second, third = (open_sequence(cache, TEXT) for _ in range(3))
    second.close()
    enter(cache, (first, TEXT))
    assert third.ready()
    cache.check_integrity()


def test_a_prompt_nobody_finishes_is_forgotten() -> None:
    cache = make_paged()
    first, second = open_sequence(cache, TEXT), open_sequence(cache, TEXT)
    enter(cache, (first, TEXT[:6]))
    second.close()
    first.close()
    assert find_cached(cache, TEXT) == 4
    assert cache.usage().idle == 4 * get_token_bytes(cache)
    assert_nothing_leaked(cache)


def test_what_waits_is_not_evicted() -> None:
    cache = make_paged(blocks=5)
    first, second = open_sequence(cache, TEXT), open_sequence(cache, TEXT)
    assert count_free_blocks(cache) == 0
    assert evict(cache, 5) == 0
    assert cache.open(Text([1])) is None
    enter(cache, (first, TEXT))
    enter(cache, (second, TEXT[12:]))
    assert stored_tokens(cache, second) == TEXT


# ---------------------------------------------------------------- a prompt that is changed half-way
def test_tokens_that_replace_a_prompts_rest_do_not_go_by_its_name() -> None:
    cache = make_paged()
    sequence = open_sequence(cache, TEXT)
    enter(cache, (sequence, TEXT[:7]))
    sequence.truncate(6)
    cut = sequence.length
    assert cut <= 6
    enter(cache, (sequence, [*TEXT[cut:6], 90, 91, 92]))
    assert stored_tokens(cache, sequence) == [*TEXT[:6], 90, 91, 92]
    assert find_cached(cache, TEXT) == 4
    assert find_cached(cache, [*TEXT[:6], 90, 91, 92]) == 8
    cache.check_integrity()


def test_who_waited_for_the_rest_of_a_prompt_computes_it_when_it_is_truncated() -> None:
    cache = make_paged()
    first, second = open_sequence(cache, TEXT), open_sequence(cache, TEXT)
    enter(cache, (first, TEXT[:7]))
    first.truncate(6)
    assert second.length == 4
    cut = first.length
    enter(cache, (first, [*TEXT[cut:6], 90, 91, 92]), (second, TEXT[4:]))
    assert stored_tokens(cache, first) == [*TEXT[:6], 90, 91, 92]
    assert stored_tokens(cache, second) == TEXT
    for sequence in (first, second):
        sequence.close()
    assert_nothing_leaked(cache)


def test_one_that_waits_can_be_truncated() -> None:
    cache = make_paged()
    first, second = open_sequence(cache, TEXT), open_sequence(cache, TEXT)
    second.truncate(6)
    cut = second.length
    assert cut <= 6
    enter(cache, (first, TEXT))
    assert second.ready()
    enter(cache, (second, [*TEXT[cut:6], 90, 91, 92]))
    assert stored_tokens(cache, first) == TEXT
    assert stored_tokens(cache, second) == [*TEXT[:6], 90, 91, 92]
    assert find_cached(cache, TEXT) == 12
    cache.check_integrity()


def test_one_that_waits_and_is_truncated_writes_nothing_that_another_computes() -> None:
    cache = make_paged()
    first, second = open_sequence(cache, TEXT), open_sequence(cache, TEXT)
    enter(cache, (first, TEXT[:5]))
    second.truncate(6)
    cut = second.length
    if second.ready():
        enter(cache, (second, [*TEXT[cut:6], 90, 91, 92]))
    enter(cache, (first, TEXT[5:]))
    assert stored_tokens(cache, first) == TEXT
    assert find_cached(cache, TEXT) == 12
    cache.check_integrity()


def test_one_that_waits_and_was_truncated_inherits_nothing_but_its_own() -> None:
    cache = make_paged()
    first, second = open_sequence(cache, TEXT), open_sequence(cache, TEXT)
    second.truncate(6)
    first.close()
    cut = second.length
    assert second.ready()
    enter(cache, (second, [*TEXT[cut:6], 90, 91, 92]))
    assert stored_tokens(cache, second) == [*TEXT[:6], 90, 91, 92]
    assert find_cached(cache, TEXT) == 4
    second.close()
    assert_nothing_leaked(cache)


def test_an_heir_writes_through_no_block_that_another_holds() -> None:
    """The start of the prefix was evicted and its end was not: the new owner must copy the shared end."""
    cache = make_paged()
    ids = list(range(2, 30))
    first, other = (
        open_sequence(cache, ids[:2]),
        open_sequence(cache, ids[:2]),
    )  # both fill the same block, the first one's is named
    enter(cache, (first, ids[:2]), (other, ids[:2]))
    enter(cache, (first, ids[2:4]), (other, ids[2:4]))
    first.close()
    enter(cache, (other, ids[4:8]))
    assert evict(cache, 1) == 1
    owner = open_sequence(cache, ids[:12])
    heir = open_sequence(cache, ids[:12])
    assert heir.blocks[1] == other.blocks[1]
    owner.close()
    assert heir.length == 0
    enter(cache, (heir, ids[:12]))
    assert not {*heir.blocks} & {*other.blocks}
    assert stored_tokens(cache, heir) == ids[:12]
    assert stored_tokens(cache, other) == ids[:8]
    cache.check_integrity()
