"""The books of the KV memory: floors, limits, shares that move, eviction, draining, pins, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cache_strategies.address_ranges import AddressRange, AddressRanges, can_reserve_addresses
from cache_strategies.memory import Bounds, Memory, Region
from cache_strategies.one_tensor import OneTensor
from cache_strategies.spaces import find_space
from cache_strategies.types import Sizes

BLOCK = 4096  # bytes of a block, which it takes in both spaces
SPACES = [AddressRanges, OneTensor] if can_reserve_addresses() else [OneTensor]
Space = type[AddressRanges] | type[OneTensor]
spaces = pytest.mark.parametrize("space", SPACES)


class Owner:
    """An instance with regions of blocks of several sizes; some of its blocks may be idle, oldest first, or pinned."""

    def __init__(self, memory: Memory, name: str, *, sizes: Collection[int] = (1,), **share: int) -> None:
        self.memory, self.name = memory, name
        bounds = {key: blocks * BLOCK for key, blocks in share.items()}
        self.own = memory.add_instance(name, **bounds)
        self.regions = [self.own.region(size * BLOCK, f"blocks of {size}") for size in sizes]
        self.busy: list[tuple[Region, int]] = []
        self.idle: list[tuple[Region, int]] = []
        self.pinned: list[tuple[Region, int]] = []
        self.asked: list[int] = []  # bytes that evict() was called for
        memory.set_owner(name, self)

    def allocate(self, count: int = 1, region: int = 0) -> list[int] | None:
        found = self.regions[region].allocate(count)
        self.busy += [(self.regions[region], block) for block in found or ()]
        return found

    def rest(self, index: int = 0) -> None:
        """Make one of its busy blocks idle."""
        self.idle.append(self.busy.pop(index))

    def give(self, index: int = 0) -> None:
        region, block = self.busy.pop(index)
        region.release([block])

    @property
    def idle_bytes(self) -> int:
        return sum(region.size for region, _ in self.idle)

    def evict(self, num_bytes: int) -> int:
        self.asked.append(num_bytes)
        freed = 0
        while freed < num_bytes and self.idle:
            region, block = self.idle.pop(0)
            region.release([block])
            freed += region.size
        return freed

    def pinned_blocks(self) -> Mapping[Region, Collection[int]]:
        found: dict[Region, list[int]] = {}
        for region, block in self.pinned:
            found.setdefault(region, []).append(block)
        return found

    @property
    def held(self) -> int:
        """The bytes of all its blocks."""
        return sum(region.size for region, _ in (*self.busy, *self.idle))


def memory_of(blocks: int, space: Space = SPACES[0]) -> Memory:
    return Memory(blocks * BLOCK, space(blocks * BLOCK, "cpu", lambda: 1 << 62))


def owners_of(blocks: int, space: Space = SPACES[0], **owners: dict[str, int]) -> tuple[Memory, dict[str, Owner]]:
    memory = memory_of(blocks, space)
    return memory, {name: Owner(memory, name, **share) for name, share in owners.items()}


# ---------------------------------------------------------------- floors and limits
@spaces
def test_nobody_holds_more_than_its_limit(space: Space) -> None:
    memory, owners = owners_of(10, space, a={"limit": 4})
    assert owners["a"].allocate(3) is not None
    assert owners["a"].allocate(2) is None, "all of them or none"
    assert owners["a"].held == owners["a"].own.held_bytes == 3 * BLOCK
    assert owners["a"].allocate() is not None
    assert owners["a"].allocate() is None
    memory.check_integrity()


@spaces
def test_nobody_takes_what_another_was_promised(space: Space) -> None:
    memory, owners = owners_of(10, space, a={"floor": 4}, b={})
    while owners["b"].allocate() is not None:
        pass
    assert owners["b"].held == 6 * BLOCK
    assert [owners["a"].allocate() is not None for _ in range(5)] == [True] * 4 + [False]
    assert memory.free_bytes == 0


def test_a_promise_that_is_kept_holds_nobody_up() -> None:
    _, owners = owners_of(10, a={"floor": 2}, b={})
    owners["a"].allocate(3)
    while owners["b"].allocate() is not None:
        pass
    assert owners["b"].held == 7 * BLOCK


def test_capacity_is_what_is_left_when_others_go_down_to_their_floors() -> None:
    memory, owners = owners_of(10, a={"floor": 3}, b={"limit": 5}, c={"floor": 1})
    assert [memory.get_capacity(name) // BLOCK for name in owners] == [9, 5, 7]
    assert owners["b"].own.limit_bytes == 5 * BLOCK


def test_shares_move_while_blocks_are_held() -> None:
    memory, owners = owners_of(10, a={}, b={})
    owners["a"].allocate(8)
    memory.set_share("a", floor=0, limit=5 * BLOCK)
    assert owners["a"].held == 8 * BLOCK, "what is in use stays"
    assert owners["a"].allocate() is None
    memory.set_share("b", floor=2 * BLOCK, limit=10 * BLOCK)
    memory.set_share("a", floor=0, limit=10 * BLOCK)
    assert owners["a"].allocate() is None, "the last two are b's by now"
    assert owners["b"].allocate(2) is not None
    assert [memory.get_share(name) for name in "ab"] == [(0, 10 * BLOCK), (2 * BLOCK, 10 * BLOCK)]


def test_a_lower_limit_frees_idle_blocks_at_once() -> None:
    memory, owners = owners_of(10, a={})
    owners["a"].allocate(8)
    for _ in range(5):
        owners["a"].rest()
    memory.set_share("a", floor=0, limit=6 * BLOCK)
    assert owners["a"].held == 6 * BLOCK
    assert memory.free_bytes == 4 * BLOCK
    assert memory.get_evicted_bytes("a") == 2 * BLOCK


# ---------------------------------------------------------------- eviction
@spaces
def test_idle_blocks_of_others_make_room(space: Space) -> None:
    memory, owners = owners_of(4, space, a={}, b={})
    owners["a"].allocate(4)
    assert owners["b"].allocate() is None
    owners["a"].rest(2)
    assert owners["b"].allocate() is not None
    assert owners["b"].allocate() is None
    assert (memory.get_evicted_bytes("a"), memory.get_evicted_bytes("b")) == (BLOCK, 0)
    memory.check_integrity()


def test_idle_blocks_within_a_floor_stay() -> None:
    _, owners = owners_of(4, a={"floor": 3}, b={})
    owners["a"].allocate(4)
    for _ in range(4):
        owners["a"].rest()
    assert owners["b"].allocate() is not None
    assert owners["b"].allocate() is None
    assert owners["a"].held == 3 * BLOCK


def test_at_its_limit_an_owner_evicts_its_own_idle_blocks_only() -> None:
    _, owners = owners_of(8, a={"limit": 3}, b={})
    for owner in owners.values():
        owner.allocate(3)
        owner.rest()
    assert owners["a"].allocate() is not None
    assert (len(owners["a"].idle), len(owners["b"].idle)) == (0, 1)
    assert owners["a"].allocate() is None


@spaces
def test_nothing_is_evicted_for_a_part_of_what_is_asked(space: Space) -> None:
    memory, owners = owners_of(6, space, a={}, b={})
    owners["a"].allocate(5)
    owners["a"].rest()
    owners["b"].allocate()
    owners["b"].rest()
    assert owners["b"].allocate(3) is None
    assert memory.held_bytes == 6 * BLOCK
    assert owners["b"].allocate(2) is not None
    assert memory.held_bytes == 6 * BLOCK


def test_what_can_be_allocated_counts_idle_blocks_but_not_those_within_floors() -> None:
    memory, owners = owners_of(8, a={"limit": 3}, b={"floor": 2})
    for owner in owners.values():
        owner.allocate(3)
    assert not owners["a"].own.can_allocate(BLOCK)
    owners["a"].rest()
    owners["a"].rest()
    assert [owners["a"].own.can_allocate(n * BLOCK) for n in (2, 3)] == [True, False]
    for _ in range(3):
        owners["b"].rest()
    memory.set_share("a", floor=0, limit=8 * BLOCK)
    assert [owners["a"].own.can_allocate(n * BLOCK) for n in (5, 6)] == [True, False]
    assert owners["b"].held == 3 * BLOCK, "asking evicts nothing"


@spaces
def test_the_bytes_of_small_idle_blocks_make_a_large_one(space: Space) -> None:
    memory, owners = owners_of(6, space, a={}, b={"sizes": (2,)})  # type: ignore[dict-item]
    owners["a"].allocate(6)
    for index in (0, 1, 2, 2):  # blocks 0, 2, 4 and 5 are idle, in this order
        owners["a"].rest(index)
    assert owners["b"].allocate() is not None
    assert owners["a"].held == (4 if space is AddressRanges else 2) * BLOCK, "in one tensor two must lie side by side"
    memory.check_integrity()


def test_idle_blocks_within_a_floor_make_room_if_free_memory_is_only_scattered() -> None:
    memory, owners = owners_of(8, OneTensor, small={"floor": 4}, large={"sizes": (2,)})  # type: ignore[dict-item]
    owners["small"].allocate(8)
    for index in (0, 1, 2, 3):
        owners["small"].give(index)
    for _ in range(4):
        owners["small"].rest()
    assert memory.free_bytes == 4 * BLOCK
    assert owners["large"].allocate() is not None
    assert owners["small"].held < 4 * BLOCK, "a floor promises bytes, not their contents"


def test_has_room_evicts_nothing_and_counts_what_it_refuses() -> None:
    memory, owners = owners_of(4, a={}, b={})
    owners["a"].allocate(3)
    owners["a"].rest()
    (region,) = owners["b"].regions
    assert [region.has_room(count) for count in (1, 2)] == [True, False]
    assert memory.num_refusals == 1
    assert owners["a"].asked == []


def test_refusals_are_counted() -> None:
    memory, owners = owners_of(4, a={})
    owners["a"].allocate(4)
    assert memory.num_refusals == 0
    assert owners["a"].allocate() is None
    assert not owners["a"].own.can_allocate(BLOCK)
    assert memory.num_refusals == 2


class Boaster(Owner):
    """Says that all its blocks are idle, and frees none."""

    @property
    def idle_bytes(self) -> int:
        return self.held

    def evict(self, num_bytes: int) -> int:
        self.asked.append(num_bytes)
        return 0


def test_an_owner_that_evicts_less_than_it_says_is_asked_once() -> None:
    memory = memory_of(4)
    boaster, other = Boaster(memory, "boaster"), Owner(memory, "other")
    boaster.allocate(4)
    assert other.allocate() is None
    assert len(boaster.asked) == 1


# ---------------------------------------------------------------- draining
def test_an_instance_over_its_lowered_limit_goes_on_until_its_sequences_end() -> None:
    memory, owners = owners_of(10, a={})
    owners["a"].allocate(6)
    memory.set_share("a", floor=0, limit=4 * BLOCK)
    memory.drain("a", 8 * BLOCK)
    assert memory.is_draining("a")
    assert owners["a"].allocate(2) is not None
    assert owners["a"].allocate() is None
    for _ in range(5):
        owners["a"].give()
    memory.drain("a", 3 * BLOCK)
    assert not memory.is_draining("a")
    assert owners["a"].allocate(2) is None
    assert owners["a"].allocate() is not None


def test_draining_evicts_idle_blocks_beyond_the_limit() -> None:
    memory, owners = owners_of(10, a={})
    owners["a"].allocate(6)
    memory.set_share("a", floor=0, limit=4 * BLOCK)
    for _ in range(4):
        owners["a"].rest()
    memory.drain("a", 5 * BLOCK)
    assert owners["a"].held == 4 * BLOCK


def test_at_its_limit_an_instance_is_full_until_its_own_sequences_free_memory() -> None:
    memory, owners = owners_of(10, a={"limit": 4})
    memory.set_sizes("a", Sizes([BLOCK], lambda num_tokens: [2]), 1)
    owners["a"].allocate(3)
    assert not memory.is_at_limit("a")
    owners["a"].allocate()
    assert memory.is_at_limit("a")
    owners["a"].rest()
    assert not memory.is_at_limit("a"), "idle blocks are free for its own"


# ---------------------------------------------------------------- shares and pins that are refused
def test_a_share_that_leaves_no_room_for_a_longest_sequence_is_refused() -> None:
    memory, _ = owners_of(10, a={}, b={})
    for name, blocks in (("a", 4), ("b", 6)):
        memory.set_sizes(name, Sizes([BLOCK], lambda num_tokens, blocks=blocks: [blocks]), 1)  # type: ignore[misc]
    assert memory.explain_refusal("a", bounds=Bounds(4 * BLOCK, 10 * BLOCK)) is None
    refused = memory.explain_refusal("a", bounds=Bounds(5 * BLOCK, 10 * BLOCK))
    assert refused == f"the longest sequence of strategy 'b', {6 * BLOCK} bytes, would not fit"
    refused = memory.explain_refusal("a", bounds=Bounds(0, 3 * BLOCK))
    assert refused == f"the longest sequence of strategy 'a', {4 * BLOCK} bytes, would not fit"


@spaces
def test_pins_leave_room_for_the_longest_sequences_of_all(space: Space) -> None:
    memory, owners = owners_of(10, space, a={}, b={})
    memory.set_sizes("b", Sizes([BLOCK], lambda num_tokens: [6]), 1)
    memory.set_sizes("a", Sizes([BLOCK], lambda num_tokens: [6]), 1)
    blocks, (region,) = owners["a"].allocate(5), owners["a"].regions
    assert blocks is not None
    assert owners["a"].own.explain_refused_pins({region: blocks[:4]}) is None
    refused = owners["a"].own.explain_refused_pins({region: blocks})
    assert refused is not None
    assert "would not fit" in refused
    owners["a"].pinned = [(region, block) for block in blocks[:3]]
    memory.set_share("b", floor=0, limit=10 * BLOCK)
    assert memory.explain_refusal("b", bounds=Bounds(5 * BLOCK, 10 * BLOCK)) is not None, "with a's pins"
    assert memory.explain_refusal("b", bounds=Bounds(BLOCK, 10 * BLOCK)) is None


# ---------------------------------------------------------------- instances
@spaces
def test_all_blocks_of_an_instance_are_released_and_no_others(space: Space) -> None:
    memory, owners = owners_of(8, space, a={"sizes": (1, 2)}, b={})  # type: ignore[dict-item]
    owners["a"].allocate(2)
    owners["a"].allocate(1, region=1)
    owners["b"].allocate(2)
    memory.release_all("a")
    assert (memory.get_held_bytes("a"), memory.get_held_bytes("b")) == (0, 2 * BLOCK)
    memory.check_integrity()


@spaces
def test_an_instance_that_is_built_again_has_the_share_and_none_of_the_blocks(space: Space) -> None:
    memory, owners = owners_of(8, space, a={"floor": 2, "limit": 6}, b={})
    owners["a"].allocate(5)
    old = owners["a"].regions[0].memory
    again = Owner(memory, "a", sizes=(2,))
    assert memory.get_share("a") == (2 * BLOCK, 6 * BLOCK)
    assert (again.own.held_bytes, memory.held_bytes) == (0, 0)
    assert [region.what for region in memory.list_regions("a")] == ["blocks of 2"]
    assert memory.find_owner(old) is None
    assert memory.find_owner(again.regions[0].memory) == "a"
    assert again.allocate(3) is not None
    memory.check_integrity()


@spaces
def test_releasing_twice_or_what_is_not_allocated_is_noticed(space: Space) -> None:
    memory, owners = owners_of(4, space, a={}, b={})
    blocks, (region,) = owners["a"].allocate(2), owners["a"].regions
    assert blocks is not None
    for wrong in ([blocks[0], blocks[0]], [-1], [3], [99]):
        with pytest.raises(ValueError, match="is not allocated: was it released before"):
            region.release(wrong)
        memory.check_integrity()
    assert memory.held_bytes == BLOCK, "what came before the wrong one is free"
    with pytest.raises(ValueError, match="is not allocated"):
        owners["b"].regions[0].release([blocks[1]])


def test_usage_counts_idle_blocks_as_free() -> None:
    memory, owners = owners_of(8, a={})
    owners["a"].allocate(4)
    owners["a"].rest()
    assert memory.usage == 3 / 8


def test_no_space_but_that_of_a_cpu_takes_memory_as_it_is_used() -> None:
    assert find_space("cuda") is OneTensor
    assert find_space("cpu") is (AddressRanges if can_reserve_addresses() else OneTensor)


# ---------------------------------------------------------------- a system without memory
KEPT_FREE = 10 * BLOCK // 16  # bytes that are left to other programs, for a memory of ten blocks


@pytest.mark.skipif(AddressRanges not in SPACES, reason="all memory is allocated at once")
def test_where_the_system_lacks_memory_floors_and_limits_are_lowered_until_it_has_some() -> None:
    left, now = [KEPT_FREE + 5 * BLOCK], [0.0]
    memory = Memory(10 * BLOCK, AddressRanges(10 * BLOCK, "cpu", lambda: left[0]), clock=lambda: now[0])
    a, b = Owner(memory, "a", floor=4), Owner(memory, "b", limit=8)
    assert b.allocate(5) is not None
    left[0] = 0
    assert b.allocate() is None
    assert (memory.total_bytes, memory.planned_bytes, memory.free_bytes) == (5 * BLOCK, 10 * BLOCK, 0)
    assert [memory.get_share(each.name) for each in (a, b)] == [(2 * BLOCK, 5 * BLOCK), (0, 4 * BLOCK)]
    b.give()
    b.give()
    assert a.allocate(2) is not None, "the floor, in proportion"
    assert a.allocate() is None
    memory.recover()
    assert memory.total_bytes == 5 * BLOCK, "too early"
    now[0] = 11
    memory.recover()
    assert memory.total_bytes == 5 * BLOCK, "there is none yet"
    now[0], left[0] = 22, 1 << 40
    memory.recover()
    assert memory.total_bytes == 10 * BLOCK
    assert [memory.get_share(each.name) for each in (a, b)] == [(4 * BLOCK, 10 * BLOCK), (0, 8 * BLOCK)]
    assert a.allocate(2) is not None
    memory.check_integrity()


@pytest.mark.skipif(AddressRanges not in SPACES, reason="all memory is allocated at once")
def test_where_the_system_lacks_memory_the_longest_sequences_keep_their_room() -> None:
    left = [KEPT_FREE + 5 * BLOCK]
    memory = Memory(10 * BLOCK, AddressRanges(10 * BLOCK, "cpu", lambda: left[0]))
    a, b = Owner(memory, "a", floor=6), Owner(memory, "b", floor=1, limit=4)
    for name in "ab":
        memory.set_sizes(name, Sizes([BLOCK], lambda num_tokens: [4]), 1)
    a.allocate(5)
    left[0] = 0
    assert a.allocate() is None
    assert [memory.get_share(each.name) for each in (a, b)] == [(0, 5 * BLOCK), (0, 4 * BLOCK)]
    assert [memory.get_capacity(each.name) for each in (a, b)] == [5 * BLOCK, 4 * BLOCK]


@pytest.mark.skipif(AddressRanges not in SPACES, reason="all memory is allocated at once")
def test_where_the_system_lacks_memory_that_lies_free_between_small_blocks_a_large_one_is_refused_at_once() -> None:
    """Not after the total was lowered byte by byte."""
    left, num_looks = 1 << 40, 0

    def look() -> int:
        nonlocal num_looks
        num_looks += 1
        assert num_looks < 20, "it looks again and again"
        return left

    memory = Memory(128 << 20, AddressRanges(128 << 20, "cpu", look))
    region, other = memory.add_instance("a").region(64), memory.add_instance("b").region(128 << 10)
    small = region.allocate(64 * 64)
    assert small is not None
    region.release([block for block in small if block % 64])  # one stays in each page of the system
    filling = other.allocate(510)  # up to the next look
    assert filling is not None
    left = 0
    assert other.allocate() is None
    assert memory.num_refusals == 1
    assert memory.total_bytes - memory.held_bytes == 64 * (4096 - 64)
    memory.check_integrity()


@pytest.mark.skipif(AddressRanges not in SPACES, reason="all memory is allocated at once")
def test_where_the_system_refuses_memory_that_seemed_free_what_is_unused_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = memory_of(8)
    a, b = (Owner(memory, name) for name in "ab")
    a.allocate(2)
    a.give()
    touch, num_refused = AddressRange.touch, 0

    def refuse_beyond(placed: AddressRange, chunk: int) -> None:
        nonlocal num_refused
        if memory.space.warm_bytes >= 2 * BLOCK:
            num_refused += 1
            assert num_refused < 20, "it asks again and again"
            raise MemoryError("planted")
        touch(placed, chunk)

    monkeypatch.setattr(AddressRange, "touch", refuse_beyond)
    assert b.allocate() is not None
    assert memory.total_bytes == 8 * BLOCK
    assert b.allocate() is None
    assert memory.total_bytes == 2 * BLOCK
    memory.check_integrity()


# ---------------------------------------------------------------- any history
BLOCKS = 24
SIZES: Mapping[str, tuple[int, ...]] = {"a": (1, 3), "b": (2,), "c": (1, 1, 5)}  # of the blocks of each region


class MemoryHistory(RuleBasedStateMachine):
    """Random allocations, releases and changes of shares of three instances, compared with lists of their blocks."""

    space: Space = SPACES[0]

    def __init__(self) -> None:
        super().__init__()
        self.memory = memory_of(BLOCKS, self.space)
        self.shares = {"a": (6, BLOCKS), "b": (0, 14), "c": (0, BLOCKS)}
        self.owners = {
            name: Owner(self.memory, name, sizes=SIZES[name], floor=floor, limit=limit)
            for name, (floor, limit) in self.shares.items()
        }

    @rule(name=st.sampled_from("abc"), region=st.integers(0, 2), count=st.sampled_from([1, 1, 1, 2, 3]))
    def allocate(self, name: str, region: int, count: int) -> None:
        owner = self.owners[name]
        region %= len(owner.regions)
        size = count * owner.regions[region].size
        available, before = self.memory.count_available_bytes(name), self.memory.held_bytes
        refusals = self.memory.num_refusals
        blocks = owner.allocate(count, region)
        assert self.memory.num_refusals == refusals + (blocks is None)
        if blocks is not None:
            assert len(set(blocks)) == count
            assert owner.held <= self.shares[name][1] * BLOCK
            assert self.memory.free_bytes >= self.promised(name)
        elif self.space is AddressRanges:
            assert size > available
            assert self.memory.held_bytes == before, "something was evicted for nothing"
        elif size <= available:
            assert not any(owner.idle for owner in self.owners.values()), "others could have been evicted"
            assert self.count_runs(owner.regions[region].size // BLOCK) < count

    def count_runs(self, run: int) -> int:
        """Return how many blocks of `run` pages fit between those in use."""
        held = [(*owner.busy, *owner.idle) for owner in self.owners.values()]
        used = sorted((block, block + region.size // BLOCK) for each in held for region, block in each)
        return sum((after - end) // run for (_, end), (after, _) in pairwise([(0, 0), *used, (BLOCKS, BLOCKS)]))

    @rule(name=st.sampled_from("abc"), blocks=st.integers(1, 8))
    def ask(self, name: str, blocks: int) -> None:
        """What can_allocate() says can be allocated is, in blocks of one page, and what it says cannot is not."""
        owner, before = self.owners[name], self.memory.held_bytes
        could = owner.own.can_allocate(blocks * owner.regions[0].size)
        assert self.memory.held_bytes == before, "asking changed something"
        if owner.regions[0].size == BLOCK:
            assert (owner.allocate(blocks) is not None) == could

    @rule(name=st.sampled_from("abc"), index=st.integers(0, 99), idle=st.booleans())
    def let_go(self, name: str, index: int, idle: bool) -> None:
        owner = self.owners[name]
        if owner.busy:
            (owner.rest if idle else owner.give)(index % len(owner.busy))

    @rule(name=st.sampled_from("abc"), floor=st.integers(0, 10), limit=st.integers(10, BLOCKS))
    def set_share(self, name: str, floor: int, limit: int) -> None:
        others = sum(share[0] for other, share in self.shares.items() if other != name)
        self.shares[name] = (min(floor, BLOCKS - others), limit)
        self.memory.set_share(name, floor=self.shares[name][0] * BLOCK, limit=limit * BLOCK)
        assert self.owners[name].held <= limit * BLOCK or not self.owners[name].idle

    @rule(name=st.sampled_from("abc"))
    def rebuild(self, name: str) -> None:
        self.owners[name] = Owner(self.memory, name, sizes=SIZES[name])
        assert self.memory.get_share(name) == tuple(each * BLOCK for each in self.shares[name])

    @invariant()
    def books_add_up(self) -> None:
        self.memory.check_integrity()
        spans: list[tuple[int, int]] = []
        for owner in self.owners.values():
            assert self.memory.get_held_bytes(owner.name) == owner.own.held_bytes == owner.held
            for region, block in (*owner.busy, *owner.idle):
                begin = region.memory.data_ptr() + block * region.page_bytes
                assert begin + region.size <= region.memory.data_ptr() + region.memory.nbytes
                spans.append((begin, begin + region.size))
        spans.sort()
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans)), "blocks overlap"
        assert self.memory.held_bytes == sum(owner.held for owner in self.owners.values()) <= BLOCKS * BLOCK
        assert self.memory.space.warm_bytes <= BLOCKS * BLOCK

    def promised(self, name: str) -> int:
        """Return the free bytes that other instances may still claim by their floors."""
        others = (owner for other, owner in self.owners.items() if other != name)
        return sum(max(0, self.shares[owner.name][0] * BLOCK - owner.held) for owner in others)


class OneTensorHistory(MemoryHistory):
    """The same where all regions share a tensor."""

    space = OneTensor


TestMemoryHistory: Callable[[], None] = MemoryHistory.TestCase
TestMemoryHistory.settings = settings(max_examples=60, stateful_step_count=40)
TestOneTensorHistory: Callable[[], None] = OneTensorHistory.TestCase
TestOneTensorHistory.settings = settings(max_examples=60, stateful_step_count=40)


@spaces
def test_a_negative_number_of_blocks_is_refused_and_changes_no_books(space: Space) -> None:
    memory = memory_of(8, space)
    owner = Owner(memory, "a")
    owner.allocate(2)
    with pytest.raises(ValueError, match="-3 blocks cannot be allocated"):
        owner.allocate(-3)
    memory.check_integrity()
    assert memory.free_bytes == 6 * BLOCK


@spaces
def test_books_stay_plain_ints_when_sizes_and_numbers_are_those_of_numpy(space: Space) -> None:
    """Reports in JSON could not hold others, and the engine would end."""
    memory = memory_of(8, space)
    own = memory.add_instance("a")
    region = own.region(np.int64(BLOCK))  # type: ignore[arg-type]
    region.allocate(np.int64(2))  # type: ignore[arg-type]
    assert [type(each) for each in (memory.held_bytes, own.held_bytes, region.size)] == [int] * 3
