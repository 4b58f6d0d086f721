"""The blocks of an instance that are in memory: in use, or idle under their names until they have to go.

Wires `RefCounts` (how many refer to a block), `PrefixIndex` (its name) and `EvictionQueue` (which idle one goes
first), and tells `BlockMetrics`. A block without a name and without references goes at once. Knows neither seats nor
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

from cache_strategies.base import Miss, covers
from cache_strategies.eviction.queue import EvictionQueue
from cache_strategies.paged.block_metrics import BlockMetrics
from cache_strategies.paged.prefix_index import BlockHash, PrefixIndex
from cache_strategies.paged.ref_counts import RefCounts


class BlockPool:
    """Every reference that is taken is dropped once."""

    def __init__(
        self, ref_counts: RefCounts, eviction_queue: EvictionQueue, block_metrics: BlockMetrics, block_bytes: int
    ) -> None:
        self._ref_counts = ref_counts
        self._eviction_queue = eviction_queue
        self._block_metrics = block_metrics
        self._index = PrefixIndex()
        self._block_bytes = block_bytes

    # ---------------------------------------------------------------- references
    def take(self) -> int | None:
        """A block without a name, with one reference; None: no room."""
        return self._ref_counts.take()

    def hold(self, block: int) -> None:
        """One more reference."""
        if self._ref_counts.hold(block):
            name = self._index.name(block)
            assert name is not None, "a block without a name does not stay"
            self._eviction_queue.touch(name)
            self._block_metrics.reused(name)

    def drop(self, block: int, *, priority: int = 0, ttl: float = 0.0) -> None:
        """One reference less, of somebody to whom it is worth keeping for `ttl` seconds."""
        name = self._index.name(block)
        if name is not None:
            self._eviction_queue.keep(name, priority, ttl)
        if not self._ref_counts.drop(block):
            return
        if name is None:
            self._ref_counts.give(block)
        else:
            self._eviction_queue.insert(name, self._block_bytes)
            self._block_metrics.idle(name)

    def shared(self, block: int) -> bool:
        """Whether several refer to it."""
        return self._ref_counts.shared(block)

    # ---------------------------------------------------------------- names
    def find(self, name: BlockHash) -> int | None:
        return self._index.find(name)

    def named(self, block: int) -> bool:
        return block in self._index

    def publish(self, name: BlockHash, block: int) -> None:
        """Found under this name from now on. The name must be new."""
        self._index.publish(name, block)
        self._block_metrics.born(name)

    def forget(self, block: int) -> None:
        """Found by nobody any more; an idle one goes. One without a name is no error."""
        name = self._index.forget(block)
        if name is None:
            return
        idle = name in self._eviction_queue
        self._eviction_queue.discard(name)
        self._block_metrics.gone(name)
        if idle:
            self._ref_counts.give(block)

    def clear(self, salt: str | None) -> None:
        """Forgets all blocks, or those under a salt."""
        for name in self._index.names():
            if covers(salt, name.salt):
                block = self._index.find(name)
                assert block is not None
                self.forget(block)

    def why_missing(self, name: BlockHash) -> Miss:
        return self._index.why_missing(name)

    # ---------------------------------------------------------------- idle ones
    @property
    def num_idle(self) -> int:
        return len(self._eviction_queue)

    def evict(self) -> None:
        """The idle block that goes first is gone."""
        name = self._eviction_queue.evict()
        assert isinstance(name, BlockHash)
        self._block_metrics.evicted(name)
        self._ref_counts.give(self._index.evict(name))

    def __len__(self) -> int:
        return len(self._ref_counts)

    def check_integrity(self, references: Mapping[int, int]) -> None:
        """`references`: all that the caller took and did not drop, by block."""
        self._ref_counts.check_integrity(references, self.num_idle)
        self._index.check_integrity()
        self._eviction_queue.check_integrity()
        names = set(self._index.names())
        self._block_metrics.check_integrity(names, {name for name in names if name in self._eviction_queue})
        for name in names:
            block = self._index.find(name)
            assert (name in self._eviction_queue) == (not references.get(block, 0))  # type: ignore[arg-type]
