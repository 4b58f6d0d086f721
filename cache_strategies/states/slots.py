"""The slots of an instance's states: references to them, and checkpoints, which are kept for later texts.

A checkpoint is the states after a prefix of a text, named by the hash of the prefix. Knows neither sequences nor what
is in a slot.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from torch import Tensor

from cache_strategies.block_hashes import BlockHash
from cache_strategies.checkpoints.base import CheckpointPolicy, CheckpointUse
from cache_strategies.memory import Region
from cache_strategies.types import BlockInfo, BlockState, SaltScope


class StateSlots:
    """The slots of a region. A slot is in use while it has references; one that is a checkpoint is kept without any."""

    def __init__(self, region: Region, policy: CheckpointPolicy, num_displaced: int = 0) -> None:
        """`num_displaced` is the number of tokens whose keys and values take as much memory as a slot."""
        self.region = region
        self._num_displaced = num_displaced
        self.num_dropped = 0  # checkpoints that were dropped to make room
        self._policy = policy
        self._references: dict[int, int] = {}  # by slot
        self._checkpoints: dict[BlockHash, int] = {}  # slots by name
        self._names: dict[int, BlockHash] = {}  # names by slot
        self._uses: dict[int, CheckpointUse] = {}  # by slot of a checkpoint
        self._idle: dict[int, float] = {}  # ranks of checkpoints without references, by slot
        # (rank, slot), the lowest first; and such that are idle no more, or have another rank by now
        self._queue: list[tuple[float, int]] = []
        self._clock = 0  # counts uses
        self._last_dropped = -math.inf

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
                self._make_idle(slot)
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

    def hit(self, slot: int) -> None:
        """Count that a text goes on from a checkpoint."""
        self._uses[slot] = self._uses[slot]._replace(num_hits=self._uses[slot].num_hits + 1)

    def list_checkpoints(self) -> Sequence[BlockHash]:
        """Return the names of all checkpoints."""
        return list(self._checkpoints)

    @property
    def num_checkpoints(self) -> int:
        return len(self._checkpoints)

    def publish(self, name: BlockHash, slot: int, num_tokens: int, num_saved: int, *, is_branch: bool = False) -> None:
        """Make a slot that is in use the checkpoint of a prefix, unless the prefix or the slot has one already.

        The prefix has `num_tokens` tokens, of which `num_saved` follow the checkpoint before it.
        """
        assert self._references[slot] > 0
        if name not in self._checkpoints and slot not in self._names:
            self._checkpoints[name], self._names[slot] = slot, name
            self._uses[slot] = CheckpointUse(
                num_tokens, num_saved, self._num_displaced, 0, False, is_branch, self._clock
            )

    def mark_inner(self, name: BlockHash) -> None:
        """Note that a text has a later checkpoint than this one, if there is one of this name."""
        if (slot := self._checkpoints.get(name)) is not None:
            self._uses[slot] = self._uses[slot]._replace(is_inner=True)
            if slot in self._idle:
                self._rank(slot)

    def unpublish(self, name: BlockHash) -> None:
        """Remove a checkpoint, if there is one of this name; its slot is freed once it has no reference."""
        slot = self._checkpoints.pop(name, None)
        if slot is None:
            return
        del self._names[slot], self._uses[slot]
        if slot in self._idle:
            del self._idle[slot]
            self._free(slot)

    def unpublish_unused(self, name: BlockHash) -> None:
        """Remove a checkpoint, if there is one of this name, unless a text has gone on from it."""
        slot = self._checkpoints.get(name)
        if slot is not None and not self._uses[slot].num_hits:
            self.unpublish(name)

    def clear(self, scope: SaltScope) -> None:
        """Remove the checkpoints of the salts in a scope."""
        for name in [name for name in self._checkpoints if scope.includes(name.salt)]:
            self.unpublish(name)

    # ---------------------------------------------------------------- eviction
    @property
    def idle_bytes(self) -> int:
        """The bytes of checkpoints without references."""
        return len(self._idle) * self.region.size

    def _make_idle(self, slot: int) -> None:
        self._clock += 1
        self._uses[slot] = self._uses[slot]._replace(used_at=self._clock)
        self._rank(slot)

    def _rank(self, slot: int) -> None:
        """Let the policy rank an idle checkpoint."""
        rank = float(self._policy.rank(self._uses[slot], self._last_dropped))
        self._idle[slot] = rank = -math.inf if math.isnan(rank) else rank
        heapq.heappush(self._queue, (rank, slot))
        if len(self._queue) > 2 * len(self._idle) + 64:
            self._queue = [(rank, slot) for slot, rank in self._idle.items()]
            heapq.heapify(self._queue)

    def touch(self, name: BlockHash) -> None:
        """Count a use of a checkpoint, if it is idle and is not among those that are dropped before all others."""
        slot = self._checkpoints.get(name)
        if slot is not None and self._idle.get(slot, -1.0) >= 0.0:
            self._make_idle(slot)

    def evict_one(self, below: float = math.inf) -> int:
        """Remove the idle checkpoint of the lowest rank; return its bytes. 0 if none is idle, or none ranks `below`."""
        while self._queue and self._queue[0][0] < below:
            rank, slot = heapq.heappop(self._queue)
            if self._idle.get(slot) == rank:
                self._last_dropped = max(self._last_dropped, rank)
                self.num_dropped += 1
                self.unpublish(self._names[slot])
                return self.region.size
        return 0

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
