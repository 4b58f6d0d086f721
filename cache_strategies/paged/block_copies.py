"""Copies shared blocks before they are written (copy-on-write). Knows blocks; neither sequences nor tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cache_strategies.eviction.block_metrics import BlockMetrics
from cache_strategies.paged.block_pool import BlockPool
from kernels.ops import Ops
from kernels.store import KVStore


class BlockCopies:
    """The copies to run before the next step writes. Each holds a reference to its source until it has run."""

    def __init__(self, pool: BlockPool, block_metrics: BlockMetrics, stores: Sequence[KVStore | None]) -> None:
        """Make an empty set of copies; `stores` has the store of each group, if it has one."""
        self._pool = pool
        self._block_metrics = block_metrics
        self._stores = stores
        self._sources: dict[int, int] = {}  # source block by destination block

    def make_writable(self, block: int) -> int | None:
        """Return the block to be written in place of a block: itself without its hash, or a copy if it is shared.

        The reference to a copied block passes to the copy. None if there is not enough memory for one.
        """
        if not self._pool.is_shared(block):
            self._pool.unpublish(block)
            return block
        copy = self._pool.allocate(self._pool.group(block))
        if copy is not None:
            self._block_metrics.on_block_copied()
            self._sources[copy] = block
        return copy

    def cancel(self, block: int) -> None:
        """Cancel the copy to a block, if there is one and the caller is about to drop the block's last reference."""
        if block in self._sources and not self._pool.is_shared(block):
            self._pool.decref(self._sources.pop(block))

    def run(self, ops: Ops) -> None:
        """Copy the keys and values, and drop the references to the sources."""
        if not self._sources:
            return
        for group, store in enumerate(self._stores):
            pairs = [(a, b) for b, a in self._sources.items() if self._pool.group(b) == group]
            if pairs and store is not None:
                sources, copies = zip(*pairs, strict=True)
                ops.copy_blocks(store, self._list_columns(sources), self._list_columns(copies))
        for source in self._sources.values():
            self._pool.decref(source)
        self._sources.clear()

    def _list_columns(self, blocks: Sequence[int]) -> list[int]:
        return [number for block in blocks for number in self._pool.columns(block)]

    @property
    def sources(self) -> Collection[int]:
        return self._sources.values()

    def __contains__(self, block: int) -> bool:
        return block in self._sources
