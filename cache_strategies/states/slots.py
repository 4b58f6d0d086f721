"""The slots of an instance's states: references to them, and checkpoints, which are kept for later texts.

A checkpoint is the states after a prefix of a text, named by the hash of the prefix. Knows neither sequences nor what
is in a slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import Tensor

from cache_strategies.block_hashes import BlockHash
from cache_strategies.memory import Region
from cache_strategies.types import BlockInfo, BlockState, SaltScope


class StateSlots:
    """The slots of a region. A slot is in use while it has references; one that is a checkpoint is kept without any."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self._references: dict[int, int] = {}  # by slot
        self._checkpoints: dict[BlockHash, int] = {}  # slots by name
        self._names: dict[int, BlockHash] = {}  # and names by slot
        self._idle: dict[int, None] = {}  # slots of checkpoints without references, that of the longest time first

    # ---------------------------------------------------------------- references
    def allocate(self) -> int | None:
        """Return a slot with one reference; None if there is not enough memory."""
        found = self.region.allocate()
        if found is None:
            return None
        self._references[found[0]] = 1
        return found[0]

    def share(self, slot: int) -> None:
        """Add a reference to a slot."""
        self._references[slot] += 1
        self._idle.pop(slot, None)

    def release(self, slot: int) -> None:
        """Drop a reference to a slot; with the last it is freed, unless it is a checkpoint."""
        assert self._references[slot] > 0
        self._references[slot] -= 1
        if not self._references[slot]:
            if slot in self._names:
                self._idle[slot] = None
            else:
                self._free(slot)

    def is_private(self, slot: int) -> bool:
        """Return whether a slot has one reference and is no checkpoint, so that its owner may overwrite it."""
        return self._references[slot] == 1 and slot not in self._names

    def _free(self, slot: int) -> None:
        del self._references[slot]
        self.region.release([slot])

    # ---------------------------------------------------------------- checkpoints
    def find(self, name: BlockHash) -> int | None:
        """Return the slot of a checkpoint."""
        return self._checkpoints.get(name)

    def list_checkpoints(self) -> Sequence[BlockHash]:
        """Return the names of all checkpoints."""
        return list(self._checkpoints)

    def publish(self, name: BlockHash, slot: int) -> None:
        """Make a slot that is in use the checkpoint of a prefix, unless the prefix or the slot has one already."""
        assert self._references[slot] > 0
        if name not in self._checkpoints and slot not in self._names:
            self._checkpoints[name], self._names[slot] = slot, name

    def unpublish(self, name: BlockHash) -> None:
        """Remove a checkpoint, if there is one of this name; its slot is freed once it has no reference."""
        slot = self._checkpoints.pop(name, None)
        if slot is None:
            return
        del self._names[slot]
        if slot in self._idle:
            del self._idle[slot]
            self._free(slot)

    def clear(self, scope: SaltScope) -> None:
        """Remove the checkpoints of the salts in a scope."""
        for name in [name for name in self._checkpoints if scope.includes(name.salt)]:
            self.unpublish(name)

    # ---------------------------------------------------------------- eviction
    @property
    def idle_bytes(self) -> int:
        """The bytes of checkpoints without references."""
        return len(self._idle) * self.region.size

    def touch(self, name: BlockHash) -> None:
        """Let all other idle checkpoints be evicted before this one, if it is idle."""
        if (slot := self._checkpoints.get(name)) in self._idle:
            del self._idle[slot]
            self._idle[slot] = None

    def evict_one(self) -> int:
        """Remove the checkpoint that has been idle for the longest time; return its bytes, 0 if none is idle."""
        slot = next(iter(self._idle), None)
        if slot is None:
            return 0
        self.unpublish(self._names[slot])
        return self.region.size

    # ---------------------------------------------------------------- reports
    def mark_blocks(self, region: Region, states: Tensor) -> None:
        """Write the `BlockState` of each slot into `states`, as features.BlockMarking says."""
        by_count = (BlockState.IDLE, BlockState.IN_USE, BlockState.SHARED)
        for slot, references in self._references.items():
            states[slot] = int(by_count[min(references, 2)])

    def describe_block(self, region: Region, block: int) -> BlockInfo | None:
        """Return what is known of a slot, as features.BlockDescribing says."""
        if block not in self._references:
            return None
        name = self._names.get(block)
        return BlockInfo(None, None, self._references[block], 0, prefix=None if name is None else name.prefix_id)

    def check_integrity(self, references: Iterable[int]) -> None:
        """Assert that the bookkeeping is consistent; `references` has the slots that sequences refer to."""
        in_use = {slot: count for slot, count in self._references.items() if count}
        assert in_use == Counter(references)
        assert {name: slot for slot, name in self._names.items()} == self._checkpoints
        assert set(self._idle) == set(self._names) - set(in_use)
        assert {*self._names, *in_use} == set(self._references) == set(self.region.placement.list_used())
