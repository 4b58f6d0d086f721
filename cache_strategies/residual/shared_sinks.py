"""The first tokens of cached prefixes as they were computed, so that sequences that find them have sinks in full.

Each entry is a small block with a prefix's sinks, under the hash of the block of `paged` that has the last of them. It
is copied from the sequence that has computed them, and to the sequences that find them; so all of them are idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from cache_strategies.base import CacheSetup
from cache_strategies.block_hashes import BlockHash
from cache_strategies.residual.options import ResidualOptions
from cache_strategies.types import Geometry
from kernels.store import KVStore, compute_block_bytes


class SharedSinks:
    """The blocks with sinks by the hash of their prefix, those that were used last at the end."""

    def __init__(self, setup: CacheSetup, options: ResidualOptions, is_cached: Callable[[BlockHash], bool]) -> None:
        """Make the region; `is_cached` says whether a prefix can be found."""
        geometry = setup.geometry
        self.region = setup.memory.region(compute_sinks_bytes(options, geometry), "first keys and values as computed")
        self.store = KVStore(self.region, geometry.layers, options.sinks, geometry.kv_dtype)
        self._is_cached = is_cached
        self._blocks: dict[BlockHash, int] = {}

    def publish(self, prefix: BlockHash, recent: KVStore, ring: int) -> None:
        """Copy the sinks in a block of `recent`, if they are not there already and there is memory."""
        if prefix in self._blocks:
            return
        self.drop_unused()
        found = self.region.allocate()
        if found is not None:
            (self._blocks[prefix],) = found
            for ours, theirs in self._iter_planes(recent, found[0], ring):
                ours.copy_(theirs)

    def restore(self, prefix: BlockHash, recent: KVStore, ring: int) -> bool:
        """Copy the sinks of a prefix into a block of `recent`; return False if they are not there."""
        block = self._blocks.pop(prefix, None)
        if block is None:
            return False
        self._blocks[prefix] = block
        for ours, theirs in self._iter_planes(recent, block, ring):
            theirs.copy_(ours)
        return True

    def _iter_planes(self, recent: KVStore, block: int, ring: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the keys, and the values, of each layer in a block of ours and in one of `recent`, [H, sinks, D]."""
        for layer in self.store.layers:
            for ours, theirs in ((self.store.k, recent.k), (self.store.v, recent.v)):
                yield ours(layer)[block], theirs(layer)[ring][:, : self.store.block_size]

    @property
    def idle_bytes(self) -> int:
        return len(self._blocks) * self.region.size

    def evict(self, num_bytes: int) -> int:
        """Free blocks, those that were used longest ago first, until `num_bytes` are freed; return the bytes freed."""
        count = min(len(self._blocks), max(0, -(-num_bytes // self.region.size)))
        return self._drop(list(self._blocks)[:count])

    def drop_unused(self) -> int:
        """Free the blocks of prefixes that cannot be found any more; return the bytes freed."""
        return self._drop([prefix for prefix in self._blocks if not self._is_cached(prefix)])

    def _drop(self, prefixes: list[BlockHash]) -> int:
        self.region.release([self._blocks.pop(prefix) for prefix in prefixes])
        return len(prefixes) * self.region.size

    def list_blocks(self) -> list[int]:
        return list(self._blocks.values())

    def check_integrity(self) -> None:
        """Assert that all blocks of the region are those of prefixes."""
        assert self.region.num_held == len(self._blocks) == len({*self._blocks.values()})


def compute_sinks_bytes(options: ResidualOptions, geometry: Geometry) -> int:
    """Return the bytes of a block."""
    return compute_block_bytes(geometry.layers, options.sinks, geometry.kv_dtype)
