"""paged shares blocks that are still computed: one seat computes, others wait and take over if it closes."""

from __future__ import annotations

from cache_strategies.base import Row
from tests.cache_strategies.cache_driver import (
    assert_nothing_leaked,
    count_free_blocks,
    enter,
    evict,
    find_cached,
    get_token_bytes,
    make_paged,
    open_seat,
    stored_tokens,
    write,
)

TEXT = list(range(10, 24))  # 14 tokens: three blocks of 4, and two tokens


def test_a_second_seat_waits_until_the_first_has_computed() -> None:
    cache = make_paged()
    first, second = open_seat(cache, TEXT), open_seat(cache, TEXT)
    assert (first.cached, second.cached) == (0, 12)
    assert cache.ready(first)
    assert not cache.ready(second)
    enter(cache, (first, TEXT))
    assert cache.ready(second)
    enter(cache, (second, TEXT[12:]))
    assert stored_tokens(cache, second) == TEXT
    cache.check_integrity()


def test_it_is_ready_in_the_step_that_computes_what_it_waits_for() -> None:
    cache = make_paged()
    first, second = open_seat(cache, TEXT), open_seat(cache, TEXT)
    cache.poll()
    assert cache.grow(first, 14)
    assert cache.ready(second)
    assert cache.grow(second, 2)
    write(cache, (first, TEXT), (second, TEXT[12:]))
    assert stored_tokens(cache, first) == stored_tokens(cache, second) == TEXT


def test_a_part_of_the_prompt_is_not_enough() -> None:
    cache = make_paged()
    first, second = open_seat(cache, TEXT), open_seat(cache, TEXT)
    short = open_seat(cache, TEXT[:5])
    for start, end in ((0, 3), (3, 7), (7, 11)):
        cache.poll()
        assert cache.grow(first, end - start)
        assert not cache.ready(second)
        assert cache.ready(short) is (end >= 4)
        write(cache, (first, TEXT[start:end]))
        assert not cache.ready(second)
    cache.poll()
    assert cache.grow(first, 1)
    assert cache.ready(second)


def test_a_step_that_was_granted_and_did_not_happen_grants_nothing() -> None:
    cache = make_paged()
    first, second = open_seat(cache, TEXT), open_seat(cache, TEXT)
    cache.poll()
    assert cache.grow(first, 14)
    write(cache, (first, TEXT), commit=False)  # failed
    cache.poll()
    assert not cache.ready(second)
    enter(cache, (first, TEXT))
    assert cache.ready(second)


def test_a_step_that_entered_less_than_was_granted_grants_nothing_more() -> None:
    cache = make_paged()
    first, second = open_seat(cache, TEXT), open_seat(cache, TEXT)
    cache.poll()
    assert cache.grow(first, 14)
    plan = cache.plan([Row(first, 14)])
    cache.commit(plan, [TEXT[:6]])
    assert not cache.ready(second)


def test_a_grant_ends_when_who_gave_it_leaves() -> None:
    cache = make_paged()
    first, second, third = (open_seat(cache, TEXT) for _ in range(3))
    cache.poll()
    assert cache.grow(first, 14)
    assert cache.ready(third)
    cache.close(first)
    assert not cache.ready(third), "nobody computes it in this step"
    assert cache.ready(second)
    assert cache.grow(second, 14)
    assert cache.ready(third)


# ---------------------------------------------------------------- heirs
def test_who_waits_inherits_when_the_owner_closes() -> None:
    cache = make_paged()
    first, second, third = (open_seat(cache, TEXT) for _ in range(3))
    cache.close(first)
    assert (second.length, second.cached) == (0, 0)
    assert (third.length, third.cached) == (12, 12)
    assert cache.ready(second)
    assert not cache.ready(third)
    enter(cache, (second, TEXT))
    enter(cache, (third, TEXT[12:]))
    assert stored_tokens(cache, second) == stored_tokens(cache, third) == TEXT
    cache.check_integrity()


def test_an_heir_goes_on_where_the_owner_stopped() -> None:
    cache = make_paged()
    first, second = open_seat(cache, TEXT), open_seat(cache, TEXT)
    enter(cache, (first, TEXT[:7]))
    cache.close(first)
    assert (second.length, second.cached) == (4, 4), "a block that was half computed is computed again"
    enter(cache, (second, TEXT[4:]))
    assert stored_tokens(cache, second) == TEXT


def test_heirs_with_beginnings_of_different_lengths_share_the_work() -> None:
    cache = make_paged()
    other = [*TEXT[:8], *range(50, 60)]
    owner, short, long, full = (
        open_seat(cache, TEXT),
        open_seat(cache, other),
        open_seat(cache, TEXT[:13]),
        open_seat(cache, TEXT),
    )
    assert [seat.length for seat in (short, long, full)] == [8, 12, 12]
    enter(cache, (owner, TEXT[:5]))
    cache.close(owner)
    assert [seat.length for seat in (short, long, full)] == [4, 8, 12]
    assert [cache.ready(seat) for seat in (short, long, full)] == [True, False, False]
    enter(cache, (short, other[4:9]))
    assert [cache.ready(seat) for seat in (short, long, full)] == [True, True, False]
    cache.close(long)
    assert full.length == 8
    enter(cache, (full, TEXT[8:]), (short, other[9:]))
    assert stored_tokens(cache, full) == TEXT
    assert stored_tokens(cache, short) == other
    for seat in (short, full):
        cache.close(seat)
    assert_nothing_leaked(cache)


def test_one_that_waits_may_leave() -> None:
    cache = make_paged()
    first, second, third = (open_seat(cache, TEXT) for _ in range(3))
    cache.close(second)
    enter(cache, (first, TEXT))
    assert cache.ready(third)
    cache.check_integrity()


def test_a_prompt_nobody_finishes_is_forgotten() -> None:
    cache = make_paged()
    first, second = open_seat(cache, TEXT), open_seat(cache, TEXT)
    enter(cache, (first, TEXT[:6]))
    cache.close(second)
    cache.close(first)
    assert find_cached(cache, TEXT) == 4
    assert cache.usage().idle == 4 * get_token_bytes(cache)
    assert_nothing_leaked(cache)


def test_what_waits_is_not_evicted() -> None:
    cache = make_paged(blocks=5)
    first, second = open_seat(cache, TEXT), open_seat(cache, TEXT)
    assert count_free_blocks(cache) == 0
    assert evict(cache, 5) == 0
    assert cache.open([1]) is None
    enter(cache, (first, TEXT))
    enter(cache, (second, TEXT[12:]))
    assert stored_tokens(cache, second) == TEXT


# ---------------------------------------------------------------- a prompt that is changed half-way
def test_tokens_that_replace_a_prompts_rest_do_not_go_by_its_name() -> None:
    cache = make_paged()
    seat = open_seat(cache, TEXT)
    enter(cache, (seat, TEXT[:7]))
    cache.crop(seat, 6)
    cut = seat.length
    assert cut <= 6
    enter(cache, (seat, [*TEXT[cut:6], 90, 91, 92]))
    assert stored_tokens(cache, seat) == [*TEXT[:6], 90, 91, 92]
    assert find_cached(cache, TEXT) == 4
    assert find_cached(cache, [*TEXT[:6], 90, 91, 92]) == 8
    cache.check_integrity()


def test_who_waited_for_the_rest_of_a_prompt_computes_it_when_it_is_cropped() -> None:
    cache = make_paged()
    first, second = open_seat(cache, TEXT), open_seat(cache, TEXT)
    enter(cache, (first, TEXT[:7]))
    cache.crop(first, 6)
    assert second.length == 4
    cut = first.length
    enter(cache, (first, [*TEXT[cut:6], 90, 91, 92]), (second, TEXT[4:]))
    assert stored_tokens(cache, first) == [*TEXT[:6], 90, 91, 92]
    assert stored_tokens(cache, second) == TEXT
    for seat in (first, second):
        cache.close(seat)
    assert_nothing_leaked(cache)


def test_one_that_waits_can_be_cropped() -> None:
    cache = make_paged()
    first, second = open_seat(cache, TEXT), open_seat(cache, TEXT)
    cache.crop(second, 6)
    cut = second.length
    assert cut <= 6
    enter(cache, (first, TEXT))
    assert cache.ready(second)
    enter(cache, (second, [*TEXT[cut:6], 90, 91, 92]))
    assert stored_tokens(cache, first) == TEXT
    assert stored_tokens(cache, second) == [*TEXT[:6], 90, 91, 92]
    assert find_cached(cache, TEXT) == 12
    cache.check_integrity()


def test_one_that_waits_and_is_cropped_writes_nothing_that_another_computes() -> None:
    cache = make_paged()
    first, second = open_seat(cache, TEXT), open_seat(cache, TEXT)
    enter(cache, (first, TEXT[:5]))
    cache.crop(second, 6)
    cut = second.length
    if cache.ready(second):
        enter(cache, (second, [*TEXT[cut:6], 90, 91, 92]))
    enter(cache, (first, TEXT[5:]))
    assert stored_tokens(cache, first) == TEXT
    assert find_cached(cache, TEXT) == 12
    cache.check_integrity()


def test_one_that_waits_and_was_cropped_inherits_nothing_but_its_own() -> None:
    cache = make_paged()
    first, second = open_seat(cache, TEXT), open_seat(cache, TEXT)
    cache.crop(second, 6)
    cache.close(first)
    cut = second.length
    assert cache.ready(second)
    enter(cache, (second, [*TEXT[cut:6], 90, 91, 92]))
    assert stored_tokens(cache, second) == [*TEXT[:6], 90, 91, 92]
    assert find_cached(cache, TEXT) == 4
    cache.close(second)
    assert_nothing_leaked(cache)


def test_an_heir_writes_through_no_block_that_another_holds() -> None:
    """The start of the prefix was evicted and its end was not: the new owner must copy the shared end."""
    cache = make_paged()
    ids = list(range(2, 30))
    first, other = (
        open_seat(cache, ids[:2]),
        open_seat(cache, ids[:2]),
    )  # both fill the same block, the first one's is named
    enter(cache, (first, ids[:2]), (other, ids[:2]))
    enter(cache, (first, ids[2:4]), (other, ids[2:4]))
    cache.close(first)
    enter(cache, (other, ids[4:8]))
    assert evict(cache, 1) == 1
    owner = open_seat(cache, ids[:12])
    heir = open_seat(cache, ids[:12])
    assert heir.blocks[1] == other.blocks[1]
    cache.close(owner)
    assert heir.length == 0
    enter(cache, (heir, ids[:12]))
    assert not {*heir.blocks} & {*other.blocks}
    assert stored_tokens(cache, heir) == ids[:12]
    assert stored_tokens(cache, other) == ids[:8]
    cache.check_integrity()
