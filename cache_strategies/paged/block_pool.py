"""The pool of an instance's blocks. A block is in use, or idle; an idle one can be found by its hash until eviction.

Combines `RefCounts` (references to a block), `PrefixIndex` (its hash) and `EvictionQueue` (the order of eviction), and
reports to `BlockMetrics`. A block that loses its last reference is freed at once if it has no hash, else it becomes
idle. Knows neither sequences nor tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from operator import mul

import numpy as np
from numpy.typing import NDArray

from cache_strategies.block_hashes import BlockHash
from cache_strategies.eviction.block_metrics import BlockMetrics
from cache_strategies.eviction.queue import EvictionQueue
from cache_strategies.memory import Region
from cache_strategies.paged.prefix_index import PrefixIndex
from cache_strategies.paged.ref_counts import GroupMemory, RefCounts
from cache_strategies.types import Miss, SaltScope


class BlockPool:
    """Allocates, shares and evicts blocks. For each reference that a caller adds it must call decref() once."""

    def __init__(
        self,
        groups: Sequence[GroupMemory],
        eviction_queue: EvictionQueue,
        block_metrics: BlockMetrics,
        tree_group: int = 0,
    ) -> None:
        """Make a pool of the blocks of some groups; those of `tree_group` form the prefix tree."""
        self._ref_counts = RefCounts(groups)
        self._eviction_queue = eviction_queue
        self._block_metrics = block_metrics
        self._index = PrefixIndex(tree_group)
        self._block_bytes = [group.block_bytes for group in groups]
        self._num_idle = [0] * len(groups)  # by group

    # ---------------------------------------------------------------- references
    def allocate(self, group: int = 0) -> int | None:
        """Allocate a block of a group with one reference and no hash; None if there is not enough memory."""
        return self._ref_counts.allocate(group)

    def incref(self, block: int) -> None:
        """Add a reference to a block, in use or idle."""
        if self._ref_counts.incref(block):
            block_hash = self._index.find_hash(block)
            assert block_hash is not None, "an idle block must have a hash"
            self._num_idle[block_hash.group] -= 1
            self._eviction_queue.touch(block_hash)
            self._block_metrics.on_block_reused(block_hash)

    def decref(self, block: int, *, priority: int = 0, ttl: float = 0.0) -> None:
        """Drop a reference to a block; when the last is dropped, the block is idle, or freed if it has no hash.

        An idle block is kept with the highest `priority` and the latest expiry (`ttl` seconds from now) of these calls.
        """
        block_hash = self._index.find_hash(block)
        if block_hash is not None:
            self._eviction_queue.update_retention(block_hash, priority, ttl)
        if not self._ref_counts.decref(block):
            return
        if block_hash is not None and not self._block_bytes[block_hash.group]:
            self.unpublish(block)  # eviction of a block without memory would free nothing
            block_hash = None
        if block_hash is None:
            self._ref_counts.release(block)
        else:
            self._num_idle[block_hash.group] += 1
            self._eviction_queue.insert(block_hash, self._block_bytes[block_hash.group])
            self._block_metrics.on_block_idle(block_hash)

    def is_used(self, block: int) -> bool:
        """Return whether a block has a reference: it is not idle."""
        return self._ref_counts.is_used(block)

    def count_references(self, block: int, pins: Mapping[int, int]) -> int:
        """Return the number of references to a block, without those of pins, whose numbers are in `pins`."""
        return self._ref_counts.count(block) - pins.get(block, 0)

    def is_shared(self, block: int) -> bool:
        """Return whether a block has more than one reference."""
        return self._ref_counts.is_shared(block)

    def group(self, block: int) -> int:
        """Return the number of the group that a block belongs to."""
        return self._ref_counts.group(block)

    def columns(self, block: int) -> Sequence[int]:
        """Return the numbers of a block's allocations in the region of its group: none if it takes no memory."""
        return self._ref_counts.columns(block)

    # ---------------------------------------------------------------- hashes
    def find(self, block_hash: BlockHash) -> int | None:
        return self._index.find(block_hash)

    def find_hash(self, block: int) -> BlockHash | None:
        return self._index.find_hash(block)

    def has_hash(self, block: int) -> bool:
        return block in self._index

    def publish(self, block_hash: BlockHash, block: int) -> None:
        """Give a block a hash, which no other block has, so that it can be found by it."""
        self._index.publish(block_hash, block)
        self._block_metrics.on_block_allocated(block_hash)

    def unpublish(self, block: int) -> None:
        """Remove a block's hash, and free the block if it is idle; do nothing if it has no hash."""
        block_hash = self._index.unpublish(block)
        if block_hash is None:
            return
        idle = block_hash in self._eviction_queue
        self._num_idle[block_hash.group] -= idle
        self._eviction_queue.discard(block_hash)
        self._block_metrics.on_block_removed(block_hash)
        if idle:
            self._ref_counts.release(block)

    def clear(self, scope: SaltScope) -> None:
        """Remove the hashes of all blocks whose salts are in a scope, and free those of them that are idle."""
        for block_hash in self._index.list_hashes():
            if scope.includes(block_hash.salt):
                block = self._index.find(block_hash)
                assert block is not None
                self.unpublish(block)

    def record_hit(self, block_hash: BlockHash) -> None:
        """Count a sequence that found all blocks of a prefix, the last of them with this hash."""
        self._index.record_hit(block_hash.prefix)

    def count_hits(self, block_hash: BlockHash) -> int:
        """Return the number of hits that ended with a prefix, and are not counted with a longer one."""
        return self._index.count_hits(block_hash.prefix)

    def list_hashes(self) -> Sequence[BlockHash]:
        """Return the hashes of the blocks of all groups."""
        return self._index.list_hashes()

    def list_tree(self) -> Mapping[BlockHash, int]:
        """Return the blocks of the group that forms the tree, by their hashes."""
        return self._index.list_tree()

    def list_names(self) -> Collection[int]:
        """Return the names of the blocks of the group that forms the tree."""
        return self._index.list_names()

    def count_bytes(self, hashes: Sequence[BlockHash]) -> int:
        """Return the bytes of blocks in the tree, and of those of other groups at the same positions."""
        num_bytes = len(hashes) * self._block_bytes[self._index.tree_group]
        for group, size in enumerate(self._block_bytes):
            if size and group != self._index.tree_group:
                num_bytes += size * sum(self.find(each._replace(group=group)) is not None for each in hashes)
        return num_bytes

    def measure(self, block_hash: BlockHash) -> tuple[float, float | None]:
        """Return the seconds since a block got its hash, and since it became idle (None: it is in use)."""
        return self._block_metrics.measure(block_hash)

    def find_miss_reason(self, block_hash: BlockHash) -> Miss:
        return self._index.find_miss_reason(block_hash)

    # ---------------------------------------------------------------- eviction
    @property
    def num_idle(self) -> int:
        return len(self._eviction_queue)

    @property
    def idle_bytes(self) -> int:
        """The bytes of all idle blocks."""
        return sum(map(mul, self._num_idle, self._block_bytes))

    @property
    def evicted_used_at(self) -> float | None:
        """When the block that was evicted last had been used last; None: none was evicted yet."""
        return self._block_metrics.evicted_used_at

    def evict(self) -> int:
        """Evict and free the idle block that is next in the order of eviction; return its bytes."""
        block_hash = self._eviction_queue.evict()
        assert isinstance(block_hash, BlockHash)
        self._num_idle[block_hash.group] -= 1
        self._block_metrics.on_block_evicted(block_hash)
        self._ref_counts.release(self._index.evict(block_hash))
        return self._block_bytes[block_hash.group]

    def __len__(self) -> int:
        return len(self._ref_counts)

    def find_block(self, region: Region, number: int) -> int | None:
        """Return the block that an allocation belongs to; None if there is none. May look at all blocks."""
        return self._ref_counts.find_block(region, number)

    def list_by_region(self, blocks: Collection[int]) -> dict[Region, list[int]]:
        """Return the allocations of blocks by region."""
        return self._ref_counts.list_by_region(blocks)

    def mark_blocks(self, region: Region, states: NDArray[np.uint8]) -> None:
        """Write the state of all blocks in a region into `states`: idle, in use, or shared by several references."""
        self._ref_counts.mark_blocks(region, states)

    def check_integrity(self, references: Mapping[int, int]) -> None:
        """Assert that the bookkeeping is consistent; `references` has the callers' number of references by block."""
        self._ref_counts.check_integrity(references, self.num_idle)
        self._index.check_integrity()
        self._eviction_queue.check_integrity()
        hashes = set(self._index.list_hashes())
        self._block_metrics.check_integrity(
            hashes, {block_hash for block_hash in hashes if block_hash in self._eviction_queue}
        )
        for block_hash in hashes:
            block = self._index.find(block_hash)
            assert (block_hash in self._eviction_queue) == (not references.get(block, 0))  # type: ignore[arg-type]
        idle = Counter(block_hash.group for block_hash in hashes if block_hash in self._eviction_queue)
        assert self._num_idle == [idle[group] for group in range(len(self._num_idle))]
