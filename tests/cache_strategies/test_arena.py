"""Tests of the arena: floors, limits, changes of shares, runs and single pages, reclaimed pages, page counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cache_strategies import reserved_memory
from cache_strategies.arena import Arena

PAGE = 64


class Owner:
    """An owner of pages; some may be idle, oldest first."""

    def __init__(self, arena: Arena, name: str, *, floor: int = 0, limit: int | None = None) -> None:
        self.arena, self.name = arena, name
        self.busy: list[tuple[int, int]] = []  # (page, run)
        self.idle: list[tuple[int, int]] = []
        arena.register_owner(name, self, floor=floor, limit=limit)

    def allocate(self, run: int = 1) -> int | None:
        page = self.arena.allocate(self.name, run)
        if page is not None:
            self.busy.append((page, run))
        return page

    def rest(self, index: int = 0) -> None:
        """Make one of its busy runs of pages idle."""
        self.idle.append(self.busy.pop(index))

    def give(self, index: int = 0) -> None:
        self.arena.release(self.name, *self.busy.pop(index))

    def idle_pages(self) -> int:
        return sum(run for _, run in self.idle)

    def reclaim(self, pages: int) -> int:
        given = 0
        while given < pages and self.idle:
            page, run = self.idle.pop(0)
            self.arena.release(self.name, page, run)
            given += run
        return given

    def pinned_pages(self) -> tuple[int, ...]:
        return ()

    @property
    def held(self) -> int:
        return sum(run for _, run in (*self.busy, *self.idle))


def arena_of(pages: int, **owners: dict[str, int]) -> tuple[Arena, dict[str, Owner]]:
    arena = Arena(pages, PAGE)
    return arena, {name: Owner(arena, name, **share) for name, share in owners.items()}


# ---------------------------------------------------------------- memory
def test_memory_is_one_piece_and_starts_as_zeros() -> None:
    arena = Arena(5, PAGE)
    assert arena.memory.shape == (5 * PAGE,)
    assert arena.memory.dtype is torch.uint8
    assert not arena.memory.any()


def test_nothing_that_is_taken_or_given_moves_the_memory() -> None:
    arena, owners = arena_of(8, a={})
    address = arena.memory.data_ptr()
    while owners["a"].allocate() is not None:
        pass
    owners["a"].give()
    assert arena.memory.data_ptr() == address


# ---------------------------------------------------------------- where pages come from
def test_single_pages_come_from_below_and_runs_from_above() -> None:
    _, owners = arena_of(10, a={})
    assert [owners["a"].allocate() for _ in range(2)] == [0, 1]
    assert [owners["a"].allocate(3) for _ in range(2)] == [7, 4]
    assert owners["a"].allocate() == 2


def test_a_page_that_was_given_back_is_the_next_to_be_taken() -> None:
    _, owners = arena_of(10, a={})
    for _ in range(4):
        owners["a"].allocate()
    owners["a"].give(1)
    assert owners["a"].allocate() == 1


def test_a_run_needs_pages_side_by_side() -> None:
    _, owners = arena_of(5, a={}, b={})
    for _ in range(5):
        owners["a"].allocate()
    for index in (4, 2, 0):  # pages 0, 2 and 4 are free
        owners["a"].give(index)
    assert owners["b"].allocate(2) is None
    owners["a"].give(0)
    assert owners["b"].allocate(2) == 1


# ---------------------------------------------------------------- floors and limits
def test_nobody_holds_more_than_its_limit() -> None:
    _, owners = arena_of(10, a={"limit": 4})
    assert owners["a"].allocate(3) is not None
    assert owners["a"].allocate(2) is None
    assert owners["a"].allocate() is not None
    assert owners["a"].allocate() is None


def test_nobody_takes_what_another_was_promised() -> None:
    arena, owners = arena_of(10, a={"floor": 4}, b={})
    while owners["b"].allocate() is not None:
        pass
    assert owners["b"].held == 6
    assert [owners["a"].allocate() is not None for _ in range(5)] == [True] * 4 + [False]
    assert arena.num_free_pages == 0


def test_a_promise_that_is_kept_holds_nobody_up() -> None:
    _, owners = arena_of(10, a={"floor": 2}, b={})
    for _ in range(3):
        owners["a"].allocate()
    while owners["b"].allocate() is not None:
        pass
    assert owners["b"].held == 7


def test_capacity_is_what_is_left_when_others_go_down_to_their_floors() -> None:
    arena, _ = arena_of(10, a={"floor": 3}, b={"limit": 5}, c={"floor": 1})
    assert [arena.capacity(name) for name in "abc"] == [9, 5, 7]


def test_shares_move_while_pages_are_held() -> None:
    arena, owners = arena_of(10, a={}, b={})
    for _ in range(8):
        owners["a"].allocate()
    arena.set_share("a", floor=0, limit=5)
    assert owners["a"].held == 8, "what is in use stays"
    assert owners["a"].allocate() is None
    arena.set_share("b", floor=2, limit=10)
    arena.set_share("a", floor=0, limit=10)
    assert owners["a"].allocate() is None, "the last two are b's by now"
    assert owners["b"].allocate(2) is not None


def test_a_lower_limit_gives_idle_pages_back_at_once() -> None:
    arena, owners = arena_of(10, a={})
    for _ in range(8):
        owners["a"].allocate()
    for _ in range(5):
        owners["a"].rest()
    arena.set_share("a", floor=0, limit=6)
    assert owners["a"].held == 6
    assert arena.num_free_pages == 4


# ---------------------------------------------------------------- idle pages
def test_idle_pages_of_others_make_room() -> None:
    _, owners = arena_of(4, a={}, b={})
    for _ in range(4):
        owners["a"].allocate()
    assert owners["b"].allocate() is None
    owners["a"].rest(2)
    assert owners["b"].allocate() == 2
    assert owners["b"].allocate() is None


def test_idle_pages_within_a_floor_stay() -> None:
    _, owners = arena_of(4, a={"floor": 3}, b={})
    for _ in range(4):
        owners["a"].allocate()
    for _ in range(4):
        owners["a"].rest()
    assert owners["b"].allocate() == 0
    assert owners["b"].allocate() is None
    assert owners["a"].held == 3


def test_at_its_limit_an_owner_gives_up_its_own_idle_pages_only() -> None:
    _, owners = arena_of(8, a={"limit": 3}, b={})
    for name in "ab":
        for _ in range(3):
            owners[name].allocate()
        owners[name].rest()
    assert owners["a"].allocate() is not None
    assert len(owners["a"].idle) == 0
    assert len(owners["b"].idle) == 1
    assert owners["a"].allocate() is None


def test_what_could_be_taken_counts_idle_pages_but_not_those_within_floors() -> None:
    arena, owners = arena_of(8, a={"limit": 3}, b={"floor": 2})
    for name in "ab":
        for _ in range(3):
            owners[name].allocate()
    assert not arena.can_allocate("a", 1)
    owners["a"].rest()
    owners["a"].rest()
    assert [arena.can_allocate("a", n) for n in (2, 3)] == [True, False]
    for _ in range(3):
        owners["b"].rest()
    arena.set_share("a", floor=0, limit=8)
    assert [arena.can_allocate("a", n) for n in (5, 6)] == [True, False]
    assert owners["b"].held == 3


def test_idle_pages_are_given_back_until_a_run_is_free() -> None:
    _, owners = arena_of(6, a={}, b={})
    for _ in range(6):
        owners["a"].allocate()
    for index in (0, 1, 2, 2):  # pages 0, 2, 4, 5 are idle, in this order
        owners["a"].rest(index)
    assert owners["b"].allocate(2) == 4
    assert owners["a"].held == 2


# ---------------------------------------------------------------- own bugs
def test_giving_a_page_back_twice_is_caught() -> None:
    arena, owners = arena_of(4, a={})
    page = owners["a"].allocate(2)
    assert page is not None
    owners["a"].give()
    with pytest.raises(ValueError, match="pages 2 to 3 do not belong to 'a'"):
        arena.release("a", page, 2)


def test_giving_back_more_than_was_taken_is_caught() -> None:
    arena, owners = arena_of(4, a={})
    assert owners["a"].allocate() == 0
    with pytest.raises(ValueError, match="pages 0 to 1 do not belong to 'a'"):
        arena.release("a", 0, 2)


def test_pages_of_others_and_beyond_the_end_are_not_released() -> None:
    arena, owners = arena_of(4, a={}, b={})
    assert owners["a"].allocate() == 0
    for page, run in ((0, 1), (-1, 1), (4, 1), (3, 2)):
        with pytest.raises(ValueError, match="do not belong to 'b'"):
            arena.release("b", page, run)
    arena.check_integrity()


def test_all_pages_of_an_owner_are_released_and_no_others() -> None:
    arena, owners = arena_of(8, a={}, b={})
    for name in "aabab":
        owners[name].allocate()
    assert arena.release_all("a") == 3
    assert (arena.num_held_pages("a"), arena.num_held_pages("b")) == (0, 2)
    assert arena.release_all("a") == 0
    arena.check_integrity()


def test_idle_pages_within_a_floor_make_room_for_a_run_when_free_ones_are_only_scattered() -> None:
    arena, owners = arena_of(8, paged={"floor": 4}, slab={})
    for _ in range(8):
        owners["paged"].allocate()
    for i in range(4):
        owners["paged"].give(i)  # every other page is free, and the rest is held
    assert owners["slab"].allocate(4) is None
    for _ in range(4):
        owners["paged"].rest()
    assert owners["slab"].allocate(4) is not None
    arena.check_integrity()


def test_an_owner_of_the_same_name_takes_over_share_and_pages() -> None:
    arena, owners = arena_of(4, a={"floor": 1, "limit": 3}, b={})
    owners["a"].allocate()
    heir = owners["b"]
    arena.register_owner("a", heir, floor=0, limit=4)
    assert arena.get_share("a") == (1, 3)
    assert arena.num_held_pages("a") == 1


# ---------------------------------------------------------------- memory that comes
def gradual_arena_of(pages: int, **owners: dict[str, int]) -> tuple[Arena, dict[str, Owner]]:
    """Return a gradual arena of untouched pages of the system's page size; each is touched separately."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reserved_memory, "PIECE_BYTES", SYSTEM_PAGE)
        arena = Arena(pages, SYSTEM_PAGE, gradual=True)
    return arena, {name: Owner(arena, name, **share) for name, share in owners.items()}


def reserved_of(arena: Arena) -> reserved_memory.ReservedMemory:
    assert arena._reserved is not None
    return arena._reserved


def run_out(arena: Arena) -> None:
    """Let the system have no more memory for the arena."""
    memory = reserved_of(arena)
    memory.touch_rest(lambda: 0)
    assert memory._thread is not None
    memory._thread.join()
    assert arena.add_touched_pages()


def test_only_pages_that_have_come_are_taken() -> None:
    arena, owners = gradual_arena_of(10, a={}, b={})
    assert owners["a"].allocate() is None
    arena.set_longest_sequence("a", longest=3, run=1)
    arena.set_longest_sequence("b", longest=4, run=2)
    arena.touch(4)
    assert (arena.num_usable_pages, arena.num_untouched_pages) == (8, 2)
    assert [owners["b"].allocate(2) for _ in range(4)] == [8, 6, 2, 0]
    assert owners["a"].allocate() is None
    arena.check_integrity()


def test_memory_comes_only_where_owners_take_from() -> None:
    arena, owners = gradual_arena_of(10, a={}, b={}, nothing={})
    arena.set_longest_sequence("a", longest=3, run=1)
    arena.set_longest_sequence("nothing", longest=0, run=2)
    arena.touch(4)
    assert (arena.num_usable_pages, owners["a"].allocate(4)) == (4, 0)
    arena, owners = gradual_arena_of(10, b={})
    arena.set_longest_sequence("b", longest=4, run=2)
    arena.touch(4)
    assert (arena.num_usable_pages, owners["b"].allocate(2)) == (4, 8)


def test_floors_are_of_the_whole_while_memory_comes() -> None:
    arena, owners = gradual_arena_of(10, a={"floor": 6}, b={})
    reserved_of(arena).touch(below=3 * SYSTEM_PAGE)
    arena.add_touched_pages()
    assert [owners["b"].allocate() for _ in range(4)] == [0, 1, 2, None], "a's six may still come"
    reserved_of(arena).touch(below=10 * SYSTEM_PAGE)
    arena.add_touched_pages()
    assert [owners["b"].allocate() for _ in range(2)] == [3, None]
    assert [arena.capacity(name) for name in "ab"] == [10, 4]


def test_where_memory_runs_out_the_arena_is_what_has_come() -> None:
    arena, owners = gradual_arena_of(10, a={"floor": 4}, b={"limit": 8})
    reserved_of(arena).touch(below=5 * SYSTEM_PAGE)
    arena.add_touched_pages()
    run_out(arena)
    assert (arena.total_pages, arena.num_usable_pages, arena.num_untouched_pages, arena.num_free_pages) == (5, 5, 0, 5)
    assert [arena.get_share(name) for name in "ab"] == [(2, 5), (0, 4)]
    assert [owners["b"].allocate() is not None for _ in range(4)] == [True] * 3 + [False], "two are a's"
    assert not arena.add_touched_pages()
    arena.check_integrity()


def test_where_memory_runs_out_the_longest_sequences_keep_their_room() -> None:
    arena, _ = gradual_arena_of(10, a={"floor": 6}, b={"floor": 1, "limit": 4})
    for name in "ab":
        arena.set_longest_sequence(name, longest=4, run=1)
    reserved_of(arena).touch(below=5 * SYSTEM_PAGE)
    arena.add_touched_pages()
    run_out(arena)
    assert [arena.get_share(name) for name in "ab"] == [(0, 5), (0, 4)]
    assert [arena.capacity(name) for name in "ab"] == [5, 4]


def test_pins_leave_room_among_the_pages_that_have_come() -> None:
    arena, _ = gradual_arena_of(10, a={})
    arena.set_longest_sequence("a", longest=4, run=1)
    arena.touch(4)
    assert arena.explain_refusal("a", pinned={0}) is not None
    reserved_of(arena).touch(below=5 * SYSTEM_PAGE)
    arena.add_touched_pages()
    assert arena.explain_refusal("a", pinned={0}) is None


# ---------------------------------------------------------------- any history
PAGES = 12
NAMES = ("a", "b", "c")
SYSTEM_PAGE = 4096  # of which touched memory is made


class ArenaHistory(RuleBasedStateMachine):
    """Random allocations, releases and changes of shares of three owners, compared with lists of their pages."""

    def __init__(self) -> None:
        super().__init__()
        self.arena, self.owners = self.new()
        self.there = set(range(PAGES))  # pages that have come
        self.shares = {"a": (3, PAGES), "b": (0, 7), "c": (0, PAGES)}

    def new(self) -> tuple[Arena, dict[str, Owner]]:
        return arena_of(PAGES, a={"floor": 3}, b={"limit": 7}, c={})

    @rule(name=st.sampled_from(NAMES), run=st.sampled_from([1, 1, 1, 2, 3]))
    def take(self, name: str, run: int) -> None:
        before = self.occupied()
        page = self.owners[name].allocate(run)
        if page is None:
            assert not self.room(name, run)
            return
        assert not {p for p in range(page, page + run) if before.get(p) == "busy"}, "somebody's page was taken"
        assert self.owners[name].held <= self.shares[name][1]
        assert self.arena.num_free_pages + self.coming >= self.promised(name)
        free = [p for p in self.there if p not in self.occupied() or page <= p < page + run]
        fitting = [p for p in free if all(q in free for q in range(p, p + run))]
        assert page == (min(fitting) if run == 1 else max(fitting))

    @rule(name=st.sampled_from(NAMES), pages=st.integers(1, 5))
    def take_some(self, name: str, pages: int) -> None:
        """What can_allocate() says can be allocated is, and what it says cannot is not."""
        before = self.occupied()
        could = self.arena.can_allocate(name, pages)
        assert self.occupied() == before, "asking changed something"
        taken = [self.owners[name].allocate() for _ in range(pages)]
        assert None not in taken or not could
        assert None in taken or could or self.coming, "idle pages within floors are not counted on while pages come"

    @rule(name=st.sampled_from(NAMES), index=st.integers(0, PAGES), idle=st.booleans())
    def let_go(self, name: str, index: int, idle: bool) -> None:
        owner = self.owners[name]
        if owner.busy:
            (owner.rest if idle else owner.give)(index % len(owner.busy))

    @rule(name=st.sampled_from(NAMES), floor=st.integers(0, 5), limit=st.integers(5, PAGES))
    def set_share(self, name: str, floor: int, limit: int) -> None:
        others = sum(share[0] for other, share in self.shares.items() if other != name)
        self.shares[name] = (min(floor, PAGES - others), limit)
        self.arena.set_share(name, floor=self.shares[name][0], limit=limit)
        assert self.owners[name].held <= limit or not self.owners[name].idle

    @invariant()
    def books_add_up(self) -> None:
        self.arena.check_integrity()
        assert self.occupied().keys() <= self.there, "memory that is not there was taken"
        assert self.arena.num_free_pages == len(self.there) - len(self.occupied())
        busy = list(self.occupied().values()).count("busy")
        assert not self.there or self.arena.usage == pytest.approx(busy / len(self.there))
        for name, owner in self.owners.items():
            assert self.arena.num_held_pages(name) == owner.held

    @property
    def coming(self) -> int:
        return PAGES - len(self.there)

    def occupied(self) -> dict[int, str]:
        """Return the allocated pages as "busy" or "idle"; fail if two owners hold the same page."""
        pages: dict[int, str] = {}
        for owner in self.owners.values():
            for state, pieces in (("busy", owner.busy), ("idle", owner.idle)):
                for page, run in pieces:
                    for each in range(page, page + run):
                        assert each not in pages
                        pages[each] = state
        return pages

    def promised(self, name: str) -> int:
        """Return the number of free pages that other owners may still claim by their floors."""
        return sum(max(0, self.shares[o][0] - owner.held) for o, owner in self.owners.items() if o != name)

    def room(self, name: str, run: int) -> bool:
        """Return whether memory for `run` pages could have been found; checked after allocate() returned None."""
        owner, (_, limit) = self.owners[name], self.shares[name]
        if owner.idle:
            return True
        if owner.held + run > limit:
            return False
        if any(o.idle and o.held > self.shares[other][0] for other, o in self.owners.items()):
            return True
        taken = self.occupied()
        free = self.there - taken.keys()
        side_by_side = any(free >= {*range(q, q + run)} for q in range(PAGES - run + 1))
        return side_by_side and self.arena.num_free_pages + self.coming - run >= self.promised(name)


TestArenaHistory: Callable[[], None] = ArenaHistory.TestCase
TestArenaHistory.settings = settings(max_examples=60, stateful_step_count=40)


class GradualHistory(ArenaHistory):
    """The same while the arena's memory is touched page by page, at both ends."""

    def new(self) -> tuple[Arena, dict[str, Owner]]:
        return gradual_arena_of(PAGES, a={"floor": 3}, b={"limit": 7}, c={})

    def __init__(self) -> None:
        super().__init__()
        self.there = set()
        self.low, self.high = 0, PAGES

    @rule(above=st.booleans())
    def a_page_comes(self, above: bool) -> None:
        if self.low == self.high:
            return
        reserved = reserved_of(self.arena)
        if above:
            self.high -= 1
            reserved.touch(above=(PAGES - self.high) * SYSTEM_PAGE)
            self.there.add(self.high)
        else:
            self.low += 1
            reserved.touch(below=self.low * SYSTEM_PAGE)
            self.there.add(self.low - 1)
        assert self.arena.add_touched_pages()
        assert self.arena.num_usable_pages == len(self.there)
        assert self.arena.num_untouched_pages == self.coming

    @rule()
    def nothing_comes(self) -> None:
        assert not self.arena.add_touched_pages()


TestGradualHistory: Callable[[], None] = GradualHistory.TestCase
TestGradualHistory.settings = settings(max_examples=60, stateful_step_count=60)
