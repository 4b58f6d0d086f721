"""The KV memory of an engine: a number of bytes that its instances share, and the regions in which they keep blocks.

`Memory` keeps the books. An instance has a floor (bytes that are reserved for it) and a limit (the most that it may
hold); both can change while the server runs, without copying anything. What is idle in one instance is evicted for
another. An instance takes regions: blocks of one size each, as many as it needs. Where blocks lie is not known here:
spaces.py places them. Knows neither layers nor tokens.
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from cache_strategies.address_ranges import read_available_memory
from cache_strategies.spaces import PinnedBlocks, Space, find_space
from cache_strategies.types import Sizes

log = logging.getLogger(__name__)

RECOVERY_SECONDS = 10.0  # seconds after the system lacked memory until it is asked again


def make_memory(
    total_bytes: int, device: torch.device | str = "cpu", get_free_memory: Callable[[], int] = read_available_memory
) -> Memory:
    """Return a memory of `total_bytes` bytes on a device. Raises OSError or RuntimeError if there is not enough.

    `get_free_memory` returns the bytes that the device's system can still provide.
    """
    return Memory(total_bytes, find_space(device)(total_bytes, device, get_free_memory))


# -------------------------------------------------------------------- what instances see
class Region:
    """Blocks of one size, in which an instance keeps what it likes. A block is addressed by its number."""

    def __init__(self, memory: Memory, owner: str, block_bytes: int, what: str) -> None:
        self.owner = owner  # name of the instance
        self.block_bytes = operator.index(block_bytes)  # that were asked for, maybe as an integer of numpy
        self.what = what  # is kept in it, in words
        self.placement = memory.space.place(self.block_bytes)
        self.size = memory.space.round_block(self.block_bytes)  # bytes that a block takes
        self.num_held = 0  # blocks that are allocated
        self._memory = memory

    @property
    def memory(self) -> Tensor:
        """The memory of all its pages, [pages * page_bytes] uint8; the number of a block is that of its first page."""
        return self.placement.memory

    @property
    def pages(self) -> int:
        return self.placement.pages

    @property
    def page_bytes(self) -> int:
        return self.placement.page_bytes

    def allocate(self, count: int = 1) -> list[int] | None:
        """Allocate blocks, evicting idle ones of any instance if needed; None if there is not enough memory for all.

        What was in a block before may still be there. Raises ValueError for a negative number of blocks.
        """
        count = operator.index(count)
        if count < 0:
            raise ValueError(f"{count} blocks cannot be allocated")
        return self._memory.allocate(self, count)

    def release(self, blocks: Collection[int]) -> None:
        """Free blocks. Raises ValueError for one that is not allocated."""
        self._memory.release(self, blocks)

    def has_room(self, count: int = 1) -> bool:
        """Return whether as many blocks could be allocated without evicting any."""
        return self._memory.has_room(self, count)


class InstanceMemory:
    """The memory of an engine as one instance sees it."""

    def __init__(self, shared: Memory, name: str, parent: InstanceMemory | None = None) -> None:
        """See the memory of the instance `name`; `parent` is the memory that this is a part of, if it is."""
        self.shared = shared
        self._name = name
        self._parent = parent
        self.regions: list[Region] = []

    def make_part(self) -> InstanceMemory:
        """Return the memory as one of several users sees it, each of which knows its own regions only."""
        return InstanceMemory(self.shared, self._name, self)

    @property
    def device(self) -> torch.device:
        return self.shared.space.device

    @property
    def held_bytes(self) -> int:
        """The bytes of all blocks that are held in these regions."""
        return sum(region.num_held * region.size for region in self.regions)

    @property
    def limit_bytes(self) -> int:
        """The most bytes that the instance could hold if all others shrank to their floors."""
        return self.shared.get_capacity(self._name)

    def region(self, block_bytes: int, what: str = "keys and values") -> Region:
        """Make a region of blocks of `block_bytes` bytes; `what` says what they hold. Called in __init__ only."""
        if self._parent is None:
            region = Region(self.shared, self._name, block_bytes, what)
        else:
            region = self._parent.region(block_bytes, what)
        self.regions.append(region)
        return region

    def can_allocate(self, num_bytes: int) -> bool:
        """Return whether blocks of as many bytes could be allocated if idle ones were evicted. Evicts none."""
        return self.shared.can_allocate(self._name, num_bytes)

    def explain_refused_pins(self, pinned: Mapping[Region, Collection[int]]) -> str | None:
        """Return why these blocks cannot be pinned; None if they can."""
        return self.shared.explain_refusal(self._name, pinned=pinned)


# -------------------------------------------------------------------- the books
class Owner(Protocol):
    """What holds blocks, some of which may be idle: unused, but kept for reuse."""

    @property
    def idle_bytes(self) -> int:
        """Return the bytes that evict() could free."""
        ...

    def evict(self, num_bytes: int) -> int:
        """Free idle blocks until at least `num_bytes` bytes are freed, or none is left; return the bytes freed."""
        ...


@runtime_checkable
class PinningOwner(Protocol):
    """An owner of which blocks may be pinned."""

    def pinned_blocks(self) -> Mapping[Region, Collection[int]]:
        """Return the blocks that cannot be evicted because they are pinned."""
        ...


class NoOwner:
    """Owns nothing: an instance that is not built yet, or that is suspended."""

    idle_bytes = 0

    def evict(self, num_bytes: int) -> int:
        """Free nothing."""
        return 0


class Bounds(NamedTuple):
    """The floor and the limit of an instance, in bytes."""

    floor: int
    limit: int


@dataclass
class _Share:
    """One instance's share of the memory, in bytes."""

    memory: InstanceMemory
    wanted: Bounds  # as they were set
    bounds: Bounds  # in force: lower than wanted while the system lacks memory
    owner: Owner = field(default_factory=NoOwner)
    held: int = 0
    sizes: Sizes = field(default_factory=Sizes)
    longest: int = 0  # of the longest sequence, which must always fit
    largest_block: int = 0
    drain_limit: int = 0  # temporary limit while running sequences hold more than a lowered limit; 0: none
    evicted: int = 0  # idle bytes that have been evicted so far

    @property
    def max_bytes(self) -> int:
        """The most bytes that the instance may hold now."""
        return self.drain_limit or self.bounds.limit

    @property
    def evictable(self) -> int:
        """The idle bytes beyond the floor, which may be evicted for other instances."""
        return min(self.owner.idle_bytes, max(0, self.held - self.bounds.floor))


class Memory:
    """The bytes that instances share."""

    def __init__(self, total_bytes: int, space: Space, clock: Callable[[], float] = time.monotonic) -> None:
        assert total_bytes > 0
        self.space = space
        self.planned_bytes = total_bytes
        self.total_bytes = total_bytes  # less than planned while the operating system lacks memory
        self.held_bytes = 0
        self.num_refusals = 0  # how often an instance could not get what it asked for
        self._shares: dict[str, _Share] = {}
        self._clock = clock
        self._lacked_at = -RECOVERY_SECONDS  # when the system lacked memory

    # ---------------------------------------------------------------- instances
    def add_instance(self, name: str, *, floor: int = 0, limit: int | None = None) -> InstanceMemory:
        """Return the memory of an instance with a floor and a limit in bytes; a limit of None is all memory.

        If there is an instance of this name, it loses all its regions, and the new one takes over its share.
        """
        memory = InstanceMemory(self, name)
        if (share := self._shares.get(name)) is not None:
            self.release_all(name)
            for region in share.memory.regions:
                region.placement.close()
            share.memory, share.owner = memory, NoOwner()
        else:
            bounds = Bounds(floor, self.planned_bytes if limit is None else limit)
            self._shares[name] = _Share(memory, bounds, bounds)
            self._apply_bounds()
        return memory

    @property
    def instances(self) -> Sequence[str]:
        return list(self._shares)

    def set_owner(self, name: str, owner: Owner) -> None:
        """Let `owner` be asked for idle and pinned blocks of an instance from now on."""
        self._shares[name].owner = owner

    def get_owner(self, name: str) -> Owner:
        return self._shares[name].owner

    def set_sizes(self, name: str, sizes: Sizes, longest: int) -> None:
        """Set what sequences of an instance take; one of `longest` tokens must always fit."""
        share = self._shares[name]
        share.sizes, share.longest = sizes, sizes.count_bytes(longest, self.space.round_block)
        share.largest_block = max((region.size for region in share.memory.regions), default=0)

    def get_longest_sequence(self, name: str) -> int:
        """Return the bytes of an instance's longest sequence."""
        return self._shares[name].longest

    def count_sequence_bytes(self, name: str, num_tokens: int) -> int:
        """Return the most bytes that a sequence of an instance holds at one time."""
        return self._shares[name].sizes.count_bytes(num_tokens, self.space.round_block)

    def list_regions(self, name: str) -> Sequence[Region]:
        """Return the regions of an instance, in the order in which it made them."""
        return self._shares[name].memory.regions

    def find_owner(self, memory: Tensor) -> str | None:
        """Return the instance of whose regions this is the memory; None if it is of none."""
        for name, share in self._shares.items():
            if any(region.memory is memory for region in share.memory.regions):
                return name
        return None

    # ---------------------------------------------------------------- blocks
    def allocate(self, region: Region, count: int) -> list[int] | None:
        """Allocate blocks of a region, as `Region.allocate` says."""
        share, size = self._shares[region.owner], count * region.size
        # Nothing is evicted for a part of them
        has_room = self._count_lacking(share, size) <= 0 or size <= self.count_available_bytes(region.owner)
        while has_room:
            if self._count_lacking(share, size) <= 0:
                blocks = None
                try:
                    blocks = region.placement.take(count)
                except MemoryError:  # what is free, if anything, is scattered among blocks in use
                    self._lower_total()
                if blocks is not None:
                    share.held, self.held_bytes = share.held + size, self.held_bytes + size
                    region.num_held += count
                    return blocks
            has_room = self._make_room(share, size)
        self.num_refusals += 1
        return None

    def release(self, region: Region, blocks: Collection[int]) -> None:
        """Free blocks of a region. Raises ValueError for one that is not allocated."""
        share, held = self._shares[region.owner], region.num_held
        try:
            region.placement.give(blocks)
        finally:  # those before a wrong one are free
            region.num_held = region.placement.num_used
            freed = (held - region.num_held) * region.size
            share.held, self.held_bytes = share.held - freed, self.held_bytes - freed

    def release_all(self, name: str) -> None:
        """Free all blocks of an instance, whatever it uses them for."""
        for region in self._shares[name].memory.regions:
            region.release(region.placement.list_used())

    def has_room(self, region: Region, count: int) -> bool:
        """Return whether blocks could be allocated without evicting any."""
        has_room = self._count_lacking(self._shares[region.owner], count * region.size) <= 0
        if has_room and region.size > region.page_bytes:
            blocks = region.placement.take(count)
            region.placement.give(blocks or ())
            has_room = blocks is not None
        self.num_refusals += not has_room
        return has_room

    def can_allocate(self, name: str, num_bytes: int) -> bool:
        """Return whether an instance could allocate blocks of `num_bytes` bytes if idle ones were evicted."""
        can = num_bytes <= self.count_available_bytes(name)
        self.num_refusals += not can
        return can

    def count_available_bytes(self, name: str) -> int:
        """Return how many bytes an instance could allocate if idle ones were evicted; negative beyond its limit."""
        share = self._shares[name]
        others = [each for each in self._shares.values() if each is not share]
        own_idle = share.owner.idle_bytes
        free = self.free_bytes + own_idle + sum(each.evictable for each in others)
        promised = sum(max(0, each.bounds.floor - each.held) for each in others)
        return min(free - promised, share.max_bytes - share.held + own_idle)

    def _count_lacking(self, share: _Share, size: int) -> int:
        """Return how many bytes must be freed first if an instance is to hold `size` more; 0 or less: none."""
        others = (each for each in self._shares.values() if each is not share)
        promised = sum(max(0, each.bounds.floor - each.held) for each in others)
        return max(share.held + size - share.max_bytes, size + promised - self.free_bytes)

    def _make_room(self, share: _Share, size: int) -> bool:
        """Evict idle blocks of one owner, so that an instance can hold `size` more bytes; return whether any was idle.

        If the instance is at its limit, only its own are evicted; else also those that others hold beyond their floors.
        If enough bytes are free, but scattered, those within floors are evicted as well: a floor guarantees a number of
        bytes, not their contents.
        """
        if (beyond := share.held + size - share.max_bytes) > 0:
            return self._evict_from(share, beyond) > 0
        lacking = self._count_lacking(share, size)
        is_scattered = lacking <= 0
        for other in self._shares.values():
            most = size if is_scattered else lacking if other is share else min(lacking, other.evictable)
            if most > 0 and self._evict_from(other, most):
                return True
        return False

    @staticmethod
    def _evict_from(share: _Share, num_bytes: int) -> int:
        freed = share.owner.evict(num_bytes)
        share.evicted += freed
        return freed

    # ---------------------------------------------------------------- shares
    def set_share(self, name: str, *, floor: int, limit: int) -> None:
        """Set an instance's floor and limit in bytes; idle blocks beyond a lower limit are freed at once."""
        self._shares[name].wanted = Bounds(floor, limit)
        self._apply_bounds()
        self.drain(name, 0)

    def get_share(self, name: str) -> Bounds:
        """Return the floor and the limit of an instance that are in force."""
        return self._shares[name].bounds

    def drain(self, name: str, needed: int) -> None:
        """Let an instance hold up to `needed` bytes, even beyond its limit, until this is called again.

        Its idle blocks beyond the limit are evicted.
        """
        share = self._shares[name]
        limit = share.bounds.limit
        share.drain_limit = needed if needed > limit else 0
        if share.held > limit:
            self._evict_from(share, share.held - limit)

    def is_draining(self, name: str) -> bool:
        """Return whether an instance may hold more than its (lowered) limit until its running sequences end."""
        return self._shares[name].drain_limit > 0

    def is_at_limit(self, name: str) -> bool:
        """Return whether an instance's limit allows no further block until its own sequences free memory."""
        share = self._shares[name]
        return share.held - share.owner.idle_bytes + share.largest_block > share.max_bytes

    def get_capacity(self, name: str) -> int:
        """Return the bytes that an instance could hold if all others shrank to their floors."""
        others = sum(each.bounds.floor for other, each in self._shares.items() if other != name)
        return max(0, min(self._shares[name].bounds.limit, self.total_bytes - others))

    def get_held_bytes(self, name: str) -> int:
        return self._shares[name].held

    def get_evicted_bytes(self, name: str) -> int:
        """Return the idle bytes that have been evicted from an instance so far."""
        return self._shares[name].evicted

    def explain_refusal(
        self, name: str, *, bounds: Bounds | None = None, pinned: Mapping[Region, Collection[int]] | None = None
    ) -> str | None:
        """Return why an instance cannot get this floor and limit, or pin these blocks; None if it can.

        The reason is that the longest sequence of some instance would not fit. For None the present value is kept.
        """
        shares, pins = dict(self._shares), {each: _list_pinned(share.owner) for each, share in self._shares.items()}
        shares[name] = replace(shares[name], bounds=bounds or shares[name].bounds)
        pins[name] = pins[name] if pinned is None else pinned
        placed = [
            PinnedBlocks(blocks, region.size // region.page_bytes)
            for each in pins.values()
            for region, blocks in each.items()
        ]
        sizes = {each: sum(len(blocks) * region.size for region, blocks in pins[each].items()) for each in pins}
        for each, share in shares.items():
            others = sum(max(s.bounds.floor, sizes[other]) for other, s in shares.items() if other != each)
            left = min(share.bounds.limit, self.total_bytes - others) - sizes[each]
            if share.longest > min(left, self.space.count_usable_bytes(share.largest_block, placed)):
                return f"the longest sequence of strategy {each!r}, {share.longest} bytes, would not fit"
        return None

    # ---------------------------------------------------------------- the system's memory
    @property
    def free_bytes(self) -> int:
        """The bytes that no instance holds."""
        return self.total_bytes - self.held_bytes

    @property
    def usage(self) -> float:
        """The share of the bytes that are in use, 0 to 1; idle ones count as free."""
        idle = sum(share.owner.idle_bytes for share in self._shares.values())
        return (self.held_bytes - idle) / self.total_bytes

    def warm_up(self, num_bytes: int) -> None:
        """Take memory from the operating system now, until there are so many bytes. Raises MemoryError if it has less.

        It stays, and moves to the region that needs it.
        """
        self.space.warm_up(num_bytes)

    def recover(self) -> None:
        """Count all memory again some time after the system lacked it, if it seems to have some."""
        if self.total_bytes == self.planned_bytes or self._clock() < self._lacked_at + RECOVERY_SECONDS:
            return
        self._lacked_at = self._clock()
        if self.space.can_grow():
            self.total_bytes = self.planned_bytes
            self._apply_bounds()
            log.warning("the system has memory again: all of %d bytes of KV memory count", self.total_bytes)

    def _lower_total(self) -> None:
        """Count only the memory that the system has provided, as it has no more; lower floors and limits with it."""
        self._lacked_at = self._clock()
        self.total_bytes = max(self.held_bytes, min(self.space.warm_bytes, self.total_bytes - 1), 1)
        self._apply_bounds()
        log.warning(
            "memory has run out: of %d bytes of KV memory planned, %d are available; floors and limits are lowered in "
            "proportion until there is more",
            self.planned_bytes,
            self.total_bytes,
        )

    def _apply_bounds(self) -> None:
        """Put floors and limits in force: as wanted, or lowered with the total, so that longest sequences still fit."""
        total, planned = self.total_bytes, self.planned_bytes
        for share in self._shares.values():
            share.bounds = share.wanted
            if total < planned:
                floor, limit = (each * total // planned for each in share.wanted)
                share.bounds = Bounds(floor, min(total, max(limit, share.longest)))
        if total < planned and any(self.explain_refusal(name) for name in self._shares):
            for share in self._shares.values():
                share.bounds = share.bounds._replace(floor=0)

    def check_integrity(self) -> None:
        """Assert that the books agree with the blocks that are in use."""
        for share in self._shares.values():
            for region in share.memory.regions:
                assert len(region.placement.list_used()) == region.placement.num_used == region.num_held, region.what
            assert share.held == sum(region.num_held * region.size for region in share.memory.regions)
        assert self.held_bytes == sum(share.held for share in self._shares.values())


def _list_pinned(owner: Owner) -> Mapping[Region, Collection[int]]:
    return owner.pinned_blocks() if isinstance(owner, PinningOwner) else {}
