"""What a paged cache holds: its blocks in all layers, the prefixes among them, pins, and the memory by use.

The base class of `PagedCache`, which opens and advances the sequences. Combines `BlockPool` (reference counts, prefix
index and eviction), `BlockHasher`, `PendingBlocks` (blocks that one sequence computes and others wait for),
`BlockCopies` (copies before a write), `WindowedBlocks` (those of layers with a window), `Pins` and `PrefixTree`.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from pydantic import Field, field_validator
from torch import Tensor

from cache_strategies.base import CacheSetup
from cache_strategies.block_hashes import BlockHash, BlockHasher
from cache_strategies.block_table import BlockTableCache, TableOptions, resolve_kv_formats
from cache_strategies.eviction import load_policy
from cache_strategies.eviction.block_metrics import BlockMetrics
from cache_strategies.eviction.queue import EvictionQueue
from cache_strategies.features import check_data
from cache_strategies.memory import Region
from cache_strategies.paged.accounting import Accounting, iter_blocks
from cache_strategies.paged.block_copies import BlockCopies
from cache_strategies.paged.block_pool import BlockPool
from cache_strategies.paged.layer_groups import LayerGroup, LayerLayout, group_by_window
from cache_strategies.paged.pins import Pins
from cache_strategies.paged.prefix_index import PendingBlocks
from cache_strategies.paged.prefix_tree import PrefixTree, find_prefix, list_path, list_subtree
from cache_strategies.paged.ref_counts import GroupMemory
from cache_strategies.paged.state import PagedState
from cache_strategies.paged.windowed_blocks import WindowedBlocks
from cache_strategies.types import (
    EVERYTHING,
    KEEPS_EVERYTHING,
    BlockEvents,
    BlockInfo,
    BlockNaming,
    Blocks,
    BlockState,
    CachedPrefix,
    CacheUsage,
    Geometry,
    Pin,
    PinError,
    Salt,
    SaltScope,
    Sizes,
)
from config.errors import SettingsError
from config.units import Duration
from kernels.kv_formats import KVFormats
from kernels.store import KVStore, compute_block_bytes

log = logging.getLogger(__name__)


class PagedOptions(TableOptions):
    """Options of a paged cache, as given in the settings: the size of its blocks, their sharing and their eviction."""

    block_size: int = Field(32, ge=1, le=1024, description="number of tokens per block")
    prefix_cache: bool = Field(True, description="share blocks between sequences with a common prefix")
    eviction: str = Field("lru", description="eviction policy of idle blocks: lru, s3fifo, or one from a plug-in")
    ttl: Duration | None = Field(None, gt=0, description="time after which an idle block is evicted before all others")

    @field_validator("eviction")
    @classmethod
    def _check_eviction(cls, value: str) -> str:
        try:
            load_policy(value)
        except SettingsError as error:
            raise ValueError(str(error)) from None
        return value


class PagedBase(BlockTableCache[PagedState]):
    """The blocks of a paged cache, and what can be done with them without opening a sequence."""

    options_type = PagedOptions

    def __init__(self, setup: CacheSetup, options: PagedOptions) -> None:
        super().__init__(setup, options)
        self.block_size = self.store.block_size
        self.prefix_cache = options.prefix_cache
        self.layout = self._divide(options, setup.geometry)
        self._block_metrics = BlockMetrics(setup.clock)
        eviction_queue = EvictionQueue(load_policy(options.eviction), setup.clock)
        groups = [GroupMemory(*each) for each in zip(self._regions, self.columns, strict=True)]
        self.block_bytes = [group.block_bytes for group in groups]
        self.pool = BlockPool(groups, eviction_queue, self._block_metrics, self.layout.widest_group)
        self.pending = PendingBlocks[PagedState]()
        self.pinned = Pins(setup.clock)
        self.ttl = math.inf if options.ttl is None else options.ttl
        formats = "; ".join(store.describe_formats() for store in dict.fromkeys(self.stores))
        self.hasher = BlockHasher(self.block_size, f"{setup.name}\0{formats}\0{setup.model}")
        self.promised: set[int] = set()  # pending blocks that are fully computed after this step, until the next poll()
        self.copies = BlockCopies(self.pool, self._block_metrics, self._stores_by_group)
        self.windowed = WindowedBlocks(self.layout, self.pool, self.pending, self.copies, self.table, self.block_bytes)
        self.has_windows = self.layout.has_windows
        token_bytes = [
            0.0 if store is None else columns * store.block_bytes / self.block_size
            for store, columns in zip(self._stores_by_group, self.columns, strict=True)
        ]
        self._accounting = Accounting(self.pool, self.block_size, token_bytes)
        self.contract = KEEPS_EVERYTHING._replace(
            exact=not self.is_quantized,
            rewind=self.windowed.rewind,
            granularity=self.block_size if self.prefix_cache else None,
        )
        if self.has_windows:
            log.info("strategy %r: %s", setup.name, self.layout.describe())

    # ---------------------------------------------------------------- layout
    @classmethod
    def block_layout(cls, options: Any, geometry: Geometry) -> tuple[int, int]:
        block_size = min(options.block_size, geometry.max_seq_len)
        return block_size, -(-geometry.max_seq_len // block_size)

    @classmethod
    def _divide(cls, options: Any, geometry: Geometry) -> LayerLayout:
        block_size, _ = cls.block_layout(options, geometry)
        return group_by_window(geometry.layers, block_size, geometry.max_seq_len)

    @classmethod
    def divide_layers(cls, options: Any, geometry: Geometry) -> Sequence[Sequence[int]]:
        return [each.layers for each in cls._divide(options, geometry).groups for _ in range(each.num_columns)]

    def make_stores(self, parts: Sequence[Sequence[int]], block_size: int, formats: KVFormats) -> list[KVStore]:
        groups = self._divide(self.options, self.setup.geometry).groups
        self.columns = [group.num_columns for group in groups]
        self._regions: list[Region | None] = []
        self._stores_by_group: list[KVStore | None] = []
        for group in groups:
            region, store = self.make_group_store(group, block_size, formats) if group.layers else (None, None)
            self._regions.append(region)
            self._stores_by_group.append(store)
        stores = zip(self._stores_by_group, self.columns, strict=True)
        return [store for store, columns in stores if store is not None for _ in range(columns)]

    def make_group_store(self, group: LayerGroup, block_size: int, formats: KVFormats) -> tuple[Region, KVStore]:
        """Return a new region for a group of layers, and the store in it."""
        return self.make_store(group.layers, block_size, formats)

    @classmethod
    def sizes(cls, options: Any, geometry: Geometry) -> Sizes:
        layout, longest_row = cls._divide(options, geometry), longest_row_of(geometry)
        sizes = [cls.count_group_bytes(group, options, geometry) for group in layout.stored]
        return Sizes(
            sizes,
            lambda num_tokens: [
                group.num_columns * layout.count_blocks(group, num_tokens, longest_row) for group in layout.stored
            ],
        )

    @classmethod
    def count_group_bytes(cls, group: LayerGroup, options: Any, geometry: Geometry) -> int:
        """Return the bytes of an allocation in the region of a group."""
        layers, formats = [geometry.layers[i] for i in group.layers], resolve_kv_formats(options, geometry)
        return compute_block_bytes(layers, cls.block_layout(options, geometry)[0], formats)

    # ---------------------------------------------------------------- prefixes
    def _hash_blocks(self, tokens: Sequence[int], salt: Salt) -> list[BlockHash]:
        return list(self.hasher.hash_blocks(tokens, salt)) if self.prefix_cache else []

    def _find_prefix(self, hashes: Sequence[BlockHash], limit: int, *, computed: bool = False) -> tuple[int, list[int]]:
        """Find the longest prefix, at most `limit` tokens, from which a sequence with these hashes can go on.

        Return its number of blocks, and the cached blocks of layers without a window, which may be more: if blocks of
        windowed layers are missing, not all of them can be used. With `computed`, pending blocks are not found.
        """
        blocks: list[int] = []
        for block_hash in hashes[: limit // self.block_size]:
            block = self.pool.find(block_hash)
            if block is None or (computed and block in self.pending):
                break
            blocks.append(block)
        if not self.has_windows:
            return len(blocks), blocks
        if self.columns[0]:
            return self.windowed.limit_prefix(hashes, () if computed else blocks, len(blocks)), blocks
        pending = [] if computed else [self.pool.find(block_hash) for block_hash in hashes]
        return self.windowed.limit_prefix(hashes, pending, min(len(hashes), limit // self.block_size)), blocks

    # ---------------------------------------------------------------- memory
    def count_blocks(self, num_tokens: int) -> int:
        """Return how many blocks hold a number of tokens."""
        return -(-num_tokens // self.block_size)

    def _find_bad_blocks(self, blocks: Sequence[int]) -> set[int]:
        """Return those of these full blocks that have NaN or infinite values."""
        bad: set[int] = set()
        for group, store in enumerate(self._stores_by_group):
            members = [block for block in blocks if self.pool.group(block) == group]
            for column in range(self.columns[group]):
                assert store is not None
                finite = store.find_finite_blocks([self.pool.columns(block)[column] for block in members])
                bad.update(block for block, good in zip(members, finite, strict=True) if not good)
        return bad

    def unpublish_spoiled(self, sequence: PagedState) -> None:
        """Keep others from finding the blocks of a sequence that have NaN or infinite values, and all after them."""
        full = sequence.length // self.block_size
        known = [(i, block) for i, block in enumerate(sequence.blocks[:full]) if block not in self.pending]
        known += self.windowed.iter_known(sequence, full)
        bad = self._find_bad_blocks([block for _, block in known])
        first_bad = min((i for i, block in known if block in bad), default=None)
        dependent = [] if first_bad is None else [block for i, block in known if i >= first_bad]
        for other in self.sequences:
            first = min((i for i, block in iter_blocks(other) if block in bad), default=None)
            if first is not None:  # the blocks after one with NaN or infinite values depend on it
                other.salt = None
                dependent += [block for i, block in iter_blocks(other) if i >= first]
        for block in dict.fromkeys(dependent):
            self.pool.unpublish(block)

    @property
    def idle_bytes(self) -> int:
        return self.pool.idle_bytes

    @property
    def evicted_used_at(self) -> float | None:
        """When the block that was evicted last had been used last, as features.Aging says."""
        return self.pool.evicted_used_at

    def evict(self, num_bytes: int) -> int:
        freed = 0
        while freed < num_bytes and self.pool.num_idle:
            freed += self.pool.evict()
        return freed

    # ---------------------------------------------------------------- data of blocks
    def list_data(self) -> Sequence[BlockHash]:
        return [each for each in self.pool.list_hashes() if self._find_data(each) is not None]

    def read_data(self, block_hash: BlockHash) -> Tensor | None:
        block = self._find_data(block_hash)
        return None if block is None else torch.cat(self._view_data(block))

    def write_data(self, block_hash: BlockHash, data: Tensor) -> bool:
        group, depth = block_hash.group, block_hash.depth
        store = self._stores_by_group[group] if 0 <= group < len(self.columns) else None
        if store is None or not 0 <= depth < self.count_blocks(self.setup.geometry.max_seq_len):
            raise ValueError(f"there are no blocks of group {group} after {depth} others")
        check_data(data, store.block_bytes * self.columns[group])
        if not self.prefix_cache or self.pool.find(block_hash) is not None:
            return False
        if (block := self.pool.allocate(group)) is None:
            return False
        for view, part in zip(self._view_data(block), data.split(store.block_bytes), strict=True):
            view.copy_(part)
        self.pool.publish(block_hash, block)
        self.pool.decref(block, ttl=self.ttl)
        return True

    def _find_data(self, block_hash: BlockHash) -> int | None:
        """Return the block with this hash; None if there is none, or it is not computed yet or takes no memory."""
        block = self.pool.find(block_hash)
        return None if block is None or block < 0 or block in self.pending else block

    def _view_data(self, block: int) -> list[Tensor]:
        """Return the bytes of a block in each of its allocations, [bytes]."""
        store = self._stores_by_group[self.pool.group(block)]
        assert store is not None
        return [store.blocks[each, : store.block_bytes] for each in self.pool.columns(block)]

    # ---------------------------------------------------------------- pins and dropped prefixes
    def clear(self, scope: SaltScope = EVERYTHING) -> int:
        before = self.setup.memory.held_bytes
        for pin_id in self.pinned.find_in_scope(scope):
            self.unpin(pin_id)
        self.pool.clear(scope)
        for sequence in self.sequences:
            if sequence.salt is not None and scope.includes(sequence.salt):
                sequence.salt = None
        return before - self.setup.memory.held_bytes

    def pin(self, tokens: Sequence[int], *, salt: Salt, ttl: float) -> Pin:
        return self._pin(self._hash_blocks(tokens, salt), ttl)

    def pin_prefix(self, prefix_id: str, *, ttl: float) -> Pin:
        hashes = self.pool.list_hashes()
        last = find_prefix(hashes, prefix_id)
        if last is None:
            raise PinError(f"there is no cached prefix {prefix_id!r}: it may have been evicted")
        return self._pin(list_path(hashes, last), ttl)

    def _pin(self, hashes: Sequence[BlockHash], ttl: float) -> Pin:
        """Pin the longest cached prefix of a sequence with these hashes."""
        num_blocks, found = self._find_prefix(hashes, len(hashes) * self.block_size, computed=True)
        blocks = found[:num_blocks] if self.columns[0] else []
        blocks += self.windowed.list_before(hashes, num_blocks)
        if not blocks:
            raise PinError(
                "no block of this prefix is cached: send it as a prompt first; it needs at least "
                f"{self.block_size} tokens"
            )
        pinned = self.pool.list_by_region({*self.pinned.blocks, *blocks})
        if (why_not := self.setup.memory.explain_refused_pins(pinned)) is not None:
            raise PinError(f"with this pin, {why_not}: pin a shorter prefix, or remove other pins")
        for block in blocks:
            self.pool.incref(block)
        num_bytes = sum(self.block_bytes[self.pool.group(block)] for block in blocks)
        return self.pinned.add(blocks, hashes[num_blocks - 1], num_blocks * self.block_size, num_bytes, ttl)

    def unpin(self, pin_id: str) -> bool:
        blocks = self.pinned.remove(pin_id)
        for block in reversed(blocks):
            self.pool.decref(block)
        return bool(blocks)

    def pins(self) -> Sequence[Pin]:
        return self.pinned.list_pins()

    def pinned_blocks(self) -> Mapping[Region, Collection[int]]:
        return self.pool.list_by_region(self.pinned.blocks)

    def drop_prefix(self, prefix_id: str) -> int | None:
        hashes = self.pool.list_hashes()
        last = find_prefix(hashes, prefix_id)
        if last is None:
            return None
        before = self.setup.memory.held_bytes
        dropped = list_subtree(hashes, self.pool.list_tree(), self._make_tree().find_first(last))
        blocks = dict.fromkeys(block for each in dropped if (block := self.pool.find(each)) is not None)
        for pin_id in self.pinned.find_by_prefix({each.prefix for each in dropped}):
            self.unpin(pin_id)
        for sequence in self.sequences:
            if any(block in blocks for _, block in iter_blocks(sequence)):
                sequence.salt = None  # what it computes from now on is not put into the prefix cache
        for block in blocks:
            self.pool.unpublish(block)
        return before - self.setup.memory.held_bytes

    # ---------------------------------------------------------------- reports
    def list_prefixes(self, limit: int) -> tuple[Sequence[CachedPrefix], int]:
        return self._make_tree().list_nodes(limit)

    def block_naming(self) -> BlockNaming | None:
        return BlockNaming(self.block_size, self.hasher.root) if self.prefix_cache else None

    def list_block_names(self) -> Collection[int]:
        return self.pool.list_names()

    def _make_tree(self) -> PrefixTree:
        return PrefixTree(self.pool, self.pinned, self.block_size)

    def inspect(self) -> dict[str, Any]:
        sequences = [
            {
                "tokens": sequence.length,
                "cached_tokens": sequence.found,
                "blocks": sum(1 for _, block in iter_blocks(sequence) if block >= 0),
            }
            for sequence in self.sequences
        ]
        groups = [{"window": each.window, "layers": len(each.layers)} for each in self.layout.stored]
        return {
            "block_size": self.block_size,
            "layer_groups": groups,
            "blocks": self.blocks()._asdict(),
            "sequences": sequences,
        }

    def usage(self) -> CacheUsage:
        memory = self.setup.memory
        return self._accounting.count_usage(self.sequences, self.pinned.blocks, memory.held_bytes, memory.limit_bytes)

    def blocks(self) -> Blocks:
        return self._accounting.count_blocks(self.sequences, self.pinned.blocks, len(self.pending))

    def mark_blocks(self, region: Region, states: Tensor) -> None:
        self.pool.mark_blocks(region, states.numpy())
        pending = self.pool.list_by_region([block for block, _ in self.pending.items()])
        states[pending.get(region, [])] = BlockState.PENDING
        states[list(self.pinned_blocks().get(region, ()))] = BlockState.PINNED

    def describe_block(self, region: Region, block: int) -> BlockInfo | None:
        found = self.pool.find_block(region, block)
        return None if found is None else self._describe(found)

    def _describe(self, block: int) -> BlockInfo:
        block_hash, num_pins = self.pool.find_hash(block), self.pinned.blocks.get(block, 0)
        first_token, num_tokens = self._locate(block, block_hash)
        references = self.pool.count_references(block, self.pinned.blocks)
        info = BlockInfo(first_token, num_tokens, references, num_pins)
        if block_hash is None:
            return info
        age, idle = self.pool.measure(block_hash)
        return info._replace(age=age, idle=idle, prefix=block_hash.prefix_id)

    def _locate(self, block: int, block_hash: BlockHash | None) -> tuple[int | None, int | None]:
        """Return the number of tokens before a block in its sequences, and of those in it; None if none has it."""
        size, owner = self.block_size, self.pending.owner(block)
        if block_hash is not None and owner is None:
            return block_hash.depth * size, size
        sequences = self.sequences if owner is None else [owner]  # those that wait count the tokens as theirs already
        found = [
            (i, sequence.length - i * size)
            for sequence in sequences
            for i, each in iter_blocks(sequence)
            if each == block
        ]
        if not found:
            return None, None
        i, num_tokens = max(found)
        return i * size, min(max(num_tokens, 0), size)

    def collect_block_events(self) -> BlockEvents | None:
        return self._block_metrics.collect()

    def check_integrity(self) -> None:
        references = Counter(block for sequence in self.sequences for _, block in iter_blocks(sequence))
        references.update(self.copies.sources)
        references.update(self.pinned.blocks)
        self.pool.check_integrity(references)
        for sequence in self.sequences:
            assert len(sequence.blocks) >= self.count_blocks(sequence.length)
            assert len(sequence.tokens) >= sequence.length
            self.windowed.check_integrity(sequence)
        for block, queue in self.pending.items():
            owner = queue[0]
            assert owner.length < (owner.blocks.index(block) + 1) * self.block_size <= len(owner.tokens)
            assert all(block in sequence.blocks for sequence in queue)


def longest_row_of(geometry: Geometry) -> int:
    """Return the most tokens of a sequence in a step: the scheduler adds draft tokens to the budget to one token."""
    return min(geometry.max_num_batched_tokens + 1, geometry.max_seq_len)
