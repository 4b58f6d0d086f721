"""Allocates an instance's blocks from its regions and counts the references to each. Knows no tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cache_strategies.memory import Region
from cache_strategies.types import BlockState

STATE_BY_COUNT = np.array([BlockState.IDLE, BlockState.IN_USE, BlockState.SHARED], np.uint8)  # the last: 2 and more


class GroupMemory(NamedTuple):
    """The memory of the blocks of a group of layers."""

    region: Region | None  # None: the blocks take no memory
    num_columns: int  # allocations of a block in the region

    @property
    def block_bytes(self) -> int:
        return 0 if self.region is None else self.region.size * self.num_columns


class RefCounts:
    """The reference count of each allocated block: references of sequences, pins and unfinished copies.

    A block of a group of layers has one allocation in the group's region, or one for each column. It is identified by
    the number of the first and of its group: number * groups + group. A block without memory has a negative number.
    """

    def __init__(self, groups: Sequence[GroupMemory]) -> None:
        self._groups = groups
        self._counts: dict[int, int] = {}
        self._columns: dict[int, Sequence[int]] = {}  # allocations of blocks that have several
        self._num_without_memory = 0  # number of blocks without memory that have been allocated so far

    def allocate(self, group: int = 0) -> int | None:
        """Allocate a block of a group with one reference; None if there is not enough memory."""
        region, columns = self._groups[group]
        if region is None:
            self._num_without_memory += 1
            block = -self._num_without_memory
        else:
            found = region.allocate(columns)
            if found is None:
                return None
            block = found[0] * len(self._groups) + group
            if columns > 1:
                self._columns[block] = found
        self._counts[block] = 1
        return block

    def group(self, block: int) -> int:
        """Return the number of the group that a block belongs to."""
        return block % len(self._groups) if block >= 0 else 0

    def columns(self, block: int) -> Sequence[int]:
        """Return the numbers of a block's allocations in the region of its group."""
        return () if block < 0 else self._columns.get(block) or (block // len(self._groups),)

    def incref(self, block: int) -> bool:
        """Add a reference to a block; return whether the block had none before."""
        self._counts[block] += 1
        return self._counts[block] == 1

    def decref(self, block: int) -> bool:
        """Drop a reference to a block; return whether that was its last. The block stays allocated until release()."""
        assert self._counts[block] > 0
        self._counts[block] -= 1
        return not self._counts[block]

    def count(self, block: int) -> int:
        """Return the number of references to a block."""
        return self._counts[block]

    def is_used(self, block: int) -> bool:
        """Return whether a block has a reference."""
        return self._counts[block] > 0

    def is_shared(self, block: int) -> bool:
        return self._counts[block] > 1

    def release(self, block: int) -> None:
        """Free a block without references."""
        assert not self._counts[block]
        del self._counts[block]
        if (region := self._groups[self.group(block)].region) is not None:
            region.release(self.columns(block))
        self._columns.pop(block, None)

    def __len__(self) -> int:
        return len(self._counts)

    # ---------------------------------------------------------------- reports
    def find_block(self, region: Region, number: int) -> int | None:
        """Return the block that an allocation belongs to; None if there is none. May look at all blocks."""
        group = next(i for i, each in enumerate(self._groups) if each.region is region)
        block = number * len(self._groups) + group
        if block in self._counts:
            return block
        return next((block for block, columns in self._columns.items() if number in columns), None)

    def list_by_region(self, blocks: Collection[int]) -> dict[Region, list[int]]:
        """Return the allocations of blocks by region."""
        found: dict[Region, list[int]] = {}
        for block in blocks:
            if (region := self._groups[self.group(block)].region) is not None:
                found.setdefault(region, []).extend(self.columns(block))
        return found

    def mark_blocks(self, region: Region, states: NDArray[np.uint8]) -> None:
        """Write the state of all blocks in a region into `states`: idle, in use, or shared by several references."""
        own = [block for block in self._counts if block >= 0 and self._groups[self.group(block)].region is region]
        found = STATE_BY_COUNT[np.minimum(np.fromiter((self._counts[block] for block in own), np.int64, len(own)), 2)]
        for column in range(len(self.columns(own[0])) if own else 0):
            states[[self.columns(block)[column] for block in own]] = found

    def check_integrity(self, references: Mapping[int, int], idle: int) -> None:
        """Assert that the counts equal `references` (by block), and that exactly `idle` blocks have no reference."""
        counted = {block: n for block, n in self._counts.items() if n}
        assert counted == {block: n for block, n in references.items() if n}
        assert len(self._counts) == len(counted) + idle
        by_region = self.list_by_region(self._counts)
        for region, _ in self._groups:
            assert region is None or region.num_held == len(by_region.get(region, ()))
        assert self._columns.keys() <= self._counts.keys()
