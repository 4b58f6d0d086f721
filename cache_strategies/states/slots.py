"""The slots of an instance's states: references to them, and checkpoints, which are kept for later texts.

A checkpoint is the states after a prefix of a text, named by the hash of the prefix. Knows neither sequences nor what
is in a slot.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from cache_strategies.block_hashes import BlockHash
from cache_strategies.checkpoints.base import CheckpointPolicy, CheckpointUse
from cache_strategies.memory import Region
from cache_strategies.types import BlockInfo, BlockState, SaltScope

log = logging.getLogger(__name__)

LEAST_WEIGHT = 2.0**-20  # weights are bounded, so that their products with ages are numbers


class StateSlots:
    """The slots of a region. A slot is in use while it has references; one that is a checkpoint is kept without any."""

    def __init__(
        self,
        region: Region,
        policy: CheckpointPolicy,
        num_displaced: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_displaced` is the number of tokens whose keys and values take as much memory as a slot."""
        self.region = region
        self._policy, self._num_displaced, self.clock = policy, num_displaced, clock
        self._references: dict[int, int] = {}  # by slot
        self._checkpoints: dict[BlockHash, int] = {}  # slots by name
        self._names: dict[int, BlockHash] = {}  # names by slot
        self._uses: dict[int, CheckpointUse] = {}  # by slot of a checkpoint
        self._ends: dict[BlockHash, int] = {}  # checkpoints of the ends of texts that go on: who made them
        self._idle: dict[int, int] = {}  # weights of checkpoints without references, by slot: powers of two
        # By weight: since when slots are idle, the longest first
        self._idle_since: dict[int, dict[int, float]] = {}

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
        if slot in self._idle:
            self._remove_idle(slot)

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
            self._uses[slot] = CheckpointUse(num_tokens, num_saved, self._num_displaced, 0, False, is_branch)

    def mark_inner(self, name: BlockHash) -> None:
        """Note that a text has a later checkpoint than this one, if there is one of this name."""
        if (slot := self._checkpoints.get(name)) is not None:
            self._uses[slot] = self._uses[slot]._replace(is_inner=True)
            if slot in self._idle:
                self._make_idle(slot, self._remove_idle(slot))

    def unpublish(self, name: BlockHash) -> None:
        """Remove a checkpoint, if there is one of this name; its slot is freed once it has no reference."""
        slot = self._checkpoints.pop(name, None)
        if slot is None:
            return
        del self._names[slot], self._uses[slot]
        self._ends.pop(name, None)
        if slot in self._idle:
            self._remove_idle(slot)
            self._free(slot)

    def mark_end(self, name: BlockHash, owner: int) -> None:
        """Note that a checkpoint is the end of a text that goes on, and who made it."""
        self._ends[name] = owner

    def keep(self, name: BlockHash) -> None:
        """Note that a checkpoint, if there is one of this name, is not only the end of a text."""
        self._ends.pop(name, None)

    def unpublish_end(self, name: BlockHash, owner: int) -> bool:
        """Remove the end of an owner's text unless a text has gone on from it; return whether it was removed."""
        is_unused = self._ends.get(name) == owner and not self._uses[self._checkpoints[name]].num_hits
        if is_unused:
            self.unpublish(name)
        return is_unused

    def clear(self, scope: SaltScope) -> None:
        """Remove the checkpoints of the salts in a scope."""
        for name in [name for name in self._checkpoints if scope.includes(name.salt)]:
            self.unpublish(name)

    # ---------------------------------------------------------------- eviction
    @property
    def idle_bytes(self) -> int:
        """The bytes of checkpoints without references."""
        return len(self._idle) * self.region.size

    def _make_idle(self, slot: int, since: float | None = None) -> None:
        self._idle[slot] = exponent = self._weigh(slot)
        by_age = self._idle_since.setdefault(exponent, {})
        since = self.clock() if since is None else since
        is_in_order = not by_age or next(reversed(by_age.values())) <= since
        by_age[slot] = since
        if not is_in_order:
            self._idle_since[exponent] = dict(sorted(by_age.items(), key=lambda item: item[1]))

    def _weigh(self, slot: int) -> int:
        """Return the logarithm of a checkpoint's weight, rounded: few weights make few orders of age."""
        try:
            weight = float(self._policy.weigh(self._uses[slot]))
        except Exception:  # of a policy that is at fault; what is freed here must be freed nevertheless
            log.exception("checkpoint policy %s is at fault", type(self._policy).__name__)
            weight = 1.0
        return 0 if math.isnan(weight) else round(math.log2(min(max(weight, LEAST_WEIGHT), 1 / LEAST_WEIGHT)))

    def _remove_idle(self, slot: int) -> float:
        """Remove a slot from those that are idle; return since when it was."""
        return self._idle_since[self._idle.pop(slot)].pop(slot)

    def touch(self, name: BlockHash, used_at: float) -> None:
        """Count a use of a checkpoint that ages as keys do, if it is idle."""
        slot = self._checkpoints.get(name)
        if slot is not None and self._idle.get(slot, 1) <= 0:
            self._remove_idle(slot)
            self._make_idle(slot, used_at)

    def _find_oldest(self) -> tuple[float, int] | None:
        """Return the age of the idle checkpoint that is to be dropped next, times its weight, and its slot."""
        now = self.clock()
        firsts = ((exponent, next(iter(ages.items()))) for exponent, ages in self._idle_since.items() if ages)
        return max((((now - since) * 2.0**exponent, slot) for exponent, (slot, since) in firsts), default=None)

    def evict_older(self, used_at: float) -> int:
        """Remove the idle checkpoint that is to be dropped next if it is older than what was used at a time.

        Return its bytes, 0 if there is none.
        """
        oldest = self._find_oldest()
        return self._evict(oldest[1]) if oldest is not None and oldest[0] > self.clock() - used_at else 0

    def evict_one(self) -> int:
        """Remove the idle checkpoint that is to be dropped next; return its bytes, 0 if none is idle."""
        oldest = self._find_oldest()
        return 0 if oldest is None else self._evict(oldest[1])

    def _evict(self, slot: int) -> int:
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
