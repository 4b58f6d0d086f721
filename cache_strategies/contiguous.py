"""contiguous: a KV cache with one block of max_seq_len tokens per sequence. Simple, but needs the most memory.

The block of a closed sequence stays in memory with its tokens until the memory is needed. A later sequence reuses the
idle block with which it has the longest common prefix, and computes only the tokens after that prefix (as llama.cpp's
slots do). Sequences that run at the same time share no memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from cache_strategies.base import CacheSetup
from cache_strategies.block_table import TableOptions
from cache_strategies.eviction.block_metrics import BlockMetrics
from cache_strategies.eviction.lru import LRU
from cache_strategies.eviction.queue import EvictionQueue
from cache_strategies.memory import Region
from cache_strategies.single_block import SingleBlockCache, SingleBlockSequence
from cache_strategies.types import (
    EVERYTHING,
    KEEPS_EVERYTHING,
    BlockEvents,
    BlockInfo,
    Blocks,
    BlockState,
    CacheUsage,
    Geometry,
    Miss,
    Salt,
    SaltScope,
    Text,
    count_reusable_tokens,
)
from config.units import Duration

Ids = NDArray[np.int64]


class ContiguousOptions(TableOptions):
    """Options of a contiguous cache, as given in the settings: its prefix cache and the time to live of idle blocks."""

    prefix_cache: bool = Field(True, description="reuse the block of a closed sequence with the same prefix")
    ttl: Duration | None = Field(None, gt=0, description="time after which an idle block is evicted before all others")


class ContiguousSequence(SingleBlockSequence):
    """A sequence that keeps its committed token ids, so that a later one can find its block by prefix."""

    cache: ContiguousCache

    def __init__(self, cache: ContiguousCache, block: int, length: int = 0) -> None:
        super().__init__(cache, block, length)
        self.tokens: list[int] = []
        self.salt: Salt | None = None  # None: no later sequence may reuse the block
        self.priority = 0  # eviction priority of the block after close(): blocks of higher priority stay longer
        self.ttl = math.inf  # seconds after close() from which the block is evicted before all others

    def commit(self, ids: Sequence[int]) -> None:
        super().commit(ids)
        self.tokens += ids

    def truncate(self, length: int) -> None:
        super().truncate(length)
        del self.tokens[length:]

    def fork(self) -> ContiguousSequence | None:
        child = super().fork()
        if child is not None:
            child.tokens, child.salt, child.miss = list(self.tokens), self.salt, self.miss
            child.priority, child.ttl = self.priority, self.ttl
        return child

    def close(self) -> None:
        tokens = np.array(self.tokens[: self.length], np.int64)
        # Only tokens before the first embedding (a negative id) can be reused
        num_reusable = _common_prefix_length(tokens >= 0, np.ones(len(tokens), bool))
        block = self.leave()
        if self.salt is None or self.spoiled or not num_reusable:
            self.cache.free(block)
        else:
            self.cache.keep_idle(block, IdleSequence(tokens[:num_reusable], self.salt), self.priority, self.ttl)


@dataclass(frozen=True, eq=False)
class IdleSequence:
    """The tokens and the salt of a closed sequence whose block is idle."""

    tokens: Ids
    salt: Salt


class ContiguousCache(SingleBlockCache[ContiguousSequence]):
    """A cache with one block of max_seq_len tokens per sequence; a token's slot is its position."""

    options_type = ContiguousOptions
    sequence_type = ContiguousSequence

    def __init__(self, setup: CacheSetup, options: ContiguousOptions) -> None:
        super().__init__(setup, options)
        self.prefix_cache = options.prefix_cache
        self._ttl = math.inf if options.ttl is None else options.ttl
        self.contract = KEEPS_EVERYTHING._replace(
            exact=not self.is_quantized, granularity=1 if options.prefix_cache else None
        )
        self._idle: dict[int, IdleSequence] = {}  # idle sequences by block, the least recently used first
        self._eviction_queue = EvictionQueue(LRU, setup.clock)  # the idle blocks in the order of their eviction
        self._block_metrics = BlockMetrics(setup.clock)

    @classmethod
    def block_layout(cls, options: Any, geometry: Geometry) -> tuple[int, int]:
        return geometry.max_seq_len, 1

    # ---------------------------------------------------------------- open, close
    def open(self, text: Text) -> ContiguousSequence | None:
        if self.table.is_full:
            return None
        block, common = self._find_reusable_block(text)
        if block is None:
            opened = self.allocate_sequence(0)
        else:
            self._remove_idle(block)
            self._block_metrics.on_block_reused(block)
            opened = self.make_sequence(block, common)
        if opened is None:
            return None
        opened.priority, opened.ttl = text.priority, self._ttl if text.ttl is None else text.ttl
        opened.tokens, opened.salt = list(text.ids[:common]), text.salt if self.prefix_cache else None
        opened.miss = self._find_miss_reason(text, common)
        return opened

    def allocate_sequence(self, length: int) -> ContiguousSequence | None:
        allocated = super().allocate_sequence(length)
        if allocated is not None:
            self._block_metrics.on_block_allocated(allocated.blocks[0])
        return allocated

    def free(self, block: int) -> None:
        """Free the block of a closed sequence."""
        self._block_metrics.on_block_removed(block)
        self.region.release([block])

    def keep_idle(self, block: int, idle: IdleSequence, priority: int, ttl: float) -> None:
        """Keep the block of a closed sequence for later ones."""
        self._idle[block] = idle
        self._eviction_queue.update_retention(block, priority, ttl)
        self._eviction_queue.insert(block, self.region.size)
        self._block_metrics.on_block_idle(block)

    def _find_reusable_block(self, text: Text) -> tuple[int | None, int]:
        """Return (idle block with the longest common prefix, the prefix's length in tokens), or (None, 0).

        Of several such blocks it is the most recently used one. A block that would lose more than half of its tokens is
        not reused while there is free memory.
        """
        ids, max_common, salt = np.array(text.ids, np.int64), text.num_reusable, text.salt
        best, longest = None, 0
        for block, idle in self._idle.items():
            common = min(max_common, _common_prefix_length(idle.tokens, ids)) if idle.salt == salt else 0
            if common and common >= longest:
                best, longest = block, common
        if best is None:
            return None, 0
        loses_most = 2 * longest < len(self._idle[best].tokens)
        return (None, 0) if loses_most and self.region.has_room() else (best, longest)

    def _remove_idle(self, block: int) -> None:
        """Remove a block from the idle blocks before it is reused or freed."""
        del self._idle[block]
        self._eviction_queue.discard(block)

    def _find_miss_reason(self, text: Text, common: int) -> Miss | None:
        if not self.prefix_cache:
            return "bypass"
        if common == count_reusable_tokens(text.ids):
            return None if common else "short"
        if common == text.max_cached:
            return "bypass"
        longer_prefix, salt = list(text.ids[: common + 1]), text.salt
        sequences = (sequence for sequence in self.sequences if sequence.salt == salt)
        if any(sequence.tokens[: common + 1] == longer_prefix for sequence in sequences):
            return "busy"
        others = (i for i in self._idle.values() if i.salt != salt and salt.differs_only_in_cache_salt(i.salt))
        return "salt" if any(idle.tokens[: common + 1].tolist() == longer_prefix for idle in others) else "cold"

    # ---------------------------------------------------------------- idle memory
    @property
    def idle_bytes(self) -> int:
        return len(self._idle) * self.region.size

    def evict(self, num_bytes: int) -> int:
        freed = 0
        while freed < num_bytes and self._idle:
            block = self._eviction_queue.evict()
            assert isinstance(block, int)
            del self._idle[block]
            self._block_metrics.on_block_evicted(block)
            self.region.release([block])
            freed += self.region.size
        return freed

    def clear(self, scope: SaltScope = EVERYTHING) -> int:
        cleared = [block for block, idle in self._idle.items() if scope.includes(idle.salt)]
        for block in cleared:
            self._remove_idle(block)
            self._block_metrics.on_block_removed(block)
            self.region.release([block])
        for sequence in self.sequences:
            if sequence.salt is not None and scope.includes(sequence.salt):
                sequence.salt = None
        return len(cleared) * self.region.size

    def usage(self) -> CacheUsage:
        """Return the memory by use; an idle block counts as idle in full, however few tokens it holds."""
        usage, idle = super().usage(), self.idle_bytes
        return usage._replace(reserved=usage.reserved + idle, idle=idle)

    def inspect(self) -> dict[str, Any]:
        sequences = [{"tokens": s.length, "cached_tokens": s.found, "blocks": 1} for s in self.sequences]
        return {"block_size": self.store.block_size, "blocks": self.blocks()._asdict(), "sequences": sequences}

    def blocks(self) -> Blocks:
        return super().blocks()._replace(idle=len(self._idle))

    def mark_blocks(self, region: Region, states: Tensor) -> None:
        states[list(self._idle)] = BlockState.IDLE

    def describe_block(self, region: Region, block: int) -> BlockInfo | None:
        lengths = {sequence.blocks[0]: sequence.length for sequence in self.sequences}
        lengths |= {block: len(idle.tokens) for block, idle in self._idle.items()}
        if block not in lengths:
            return None
        age, idle_seconds = self._block_metrics.measure(block)
        return BlockInfo(0, lengths[block], int(block not in self._idle), num_pins=0, age=age, idle=idle_seconds)

    def collect_block_events(self) -> BlockEvents | None:
        return self._block_metrics.collect()

    def check_integrity(self) -> None:
        self._eviction_queue.check_integrity()
        assert len(self._eviction_queue) == len(self._idle)
        blocks = [sequence.blocks[0] for sequence in self.sequences] + list(self._idle)
        assert len(set(blocks)) == len(blocks)
        self._block_metrics.check_integrity(set(blocks), self._idle.keys())
        assert self.region.num_held == len(blocks)
        for sequence in self.sequences:
            assert len(sequence.tokens) == sequence.length <= self.setup.geometry.max_seq_len


def _common_prefix_length(a: NDArray[Any], b: NDArray[Any]) -> int:
    """Return the number of leading elements in which two arrays agree."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n
