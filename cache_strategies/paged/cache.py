"""paged: a KV cache of small blocks, allocated as a sequence grows and shared by sequences with a common prefix.

After vLLM's PagedAttention (Kwon et al., 2023). This file combines `PagedSeat` (a sequence's tokens and block hashes),
`BlockPool` (reference counts, prefix index and eviction), `BlockHasher`, `PendingBlocks` (blocks that one seat computes
and others wait for) and `Pins`.

Only full blocks can be found by hash. A block with several references is never written: the writer gets a copy first
(copy-on-write), and the seat's reference to the original is kept until the copy has run. A computed block loses its
hash before it is written again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import Field, field_validator

from cache_strategies.base import CacheSetup, Plan, Row
from cache_strategies.block_table import BlockTableCache, TableOptions
from cache_strategies.eviction import load_policy
from cache_strategies.eviction.queue import EvictionQueue
from cache_strategies.paged.block_metrics import BlockMetrics
from cache_strategies.paged.block_pool import BlockPool
from cache_strategies.paged.pins import Pins
from cache_strategies.paged.prefix_index import BlockHash, BlockHasher, PendingBlocks
from cache_strategies.paged.ref_counts import RefCounts
from cache_strategies.paged.seat import PagedSeat
from cache_strategies.types import (
    EVERYTHING,
    KEEPS_EVERYTHING,
    NO_SALT,
    BlockEvents,
    Blocks,
    CacheUsage,
    Geometry,
    Miss,
    Pin,
    PinError,
    Salt,
    SaltScope,
    count_reusable_tokens,
)
from config.errors import SettingsError


class PagedOptions(TableOptions):
    """Options of a paged cache, as given in the settings: the size of its blocks, their sharing and their eviction."""

    block_size: int = Field(32, ge=1, le=1024, description="number of tokens per block")
    prefix_cache: bool = Field(True, description="share blocks between sequences with a common prefix")
    eviction: str = Field("lru", description="eviction policy of idle blocks: lru, s3fifo, or one from a plug-in")
    ttl: float | None = Field(None, gt=0, description="seconds after which an idle block is evicted before all others")

    @field_validator("eviction")
    @classmethod
    def _check_eviction(cls, value: str) -> str:
        try:
            load_policy(value)
        except SettingsError as error:
            raise ValueError(str(error)) from None
        return value


class PagedCache(BlockTableCache[PagedSeat]):
    """A cache of small blocks, which grows with its sequences and shares the blocks of common prefixes."""

    options_type = PagedOptions

    def __init__(self, setup: CacheSetup, options: PagedOptions) -> None:
        super().__init__(setup, options)
        self.block_size = self.store.block_size
        self.prefix_cache = options.prefix_cache
        ref_counts = RefCounts(setup.arena, setup.name, self.store.pages_per_block)
        self._block_metrics = BlockMetrics(setup.clock)
        eviction_queue = EvictionQueue(load_policy(options.eviction), setup.clock)
        self.pool = BlockPool(ref_counts, eviction_queue, self._block_metrics, self.bytes_per_block)
        self.pending = PendingBlocks[PagedSeat]()
        self.pinned = Pins(setup.clock)
        self._ttl = math.inf if options.ttl is None else options.ttl
        self._hasher = BlockHasher(self.block_size, f"{setup.name}\0{self.store.dtype}\0{setup.model}")
        self._blocks_to_complete: set[int] = set()  # pending blocks that are fully computed after this step
        # copies of blocks to run before the next step writes: source block by destination block
        self._copies: dict[int, int] = {}
        shared = self.prefix_cache
        self.contract = KEEPS_EVERYTHING._replace(exact=not self.is_quantized, shareable=shared, reusable=shared)

    @classmethod
    def block_layout(cls, options: Any, geometry: Geometry) -> tuple[int, int]:
        block_size = min(options.block_size, geometry.max_seq_len)
        return block_size, -(-geometry.max_seq_len // block_size)

    def bytes_for(self, num_tokens: int) -> int:
        return self._blocks_for(num_tokens) * self.bytes_per_block

    # ---------------------------------------------------------------- open, close
    def match(self, tokens: Sequence[int], *, salt: Salt = NO_SALT, max_cached: int | None = None) -> int:
        limit = count_reusable_tokens(tokens, max_cached)
        return len(self._find_cached_blocks(self._hash_blocks(tokens, salt), limit)) * self.block_size

    def open(self, tokens: Sequence[int], *, salt: Salt = NO_SALT, max_cached: int | None = None) -> PagedSeat | None:
        if self.table.is_full:
            return None
        hashes = self._hash_blocks(tokens, salt)
        blocks = self._find_cached_blocks(hashes, count_reusable_tokens(tokens, max_cached))
        for block in blocks:  # found blocks are referenced before any allocation, which could evict them
            self.pool.incref(block)
        seat = PagedSeat(self.table.allocate_row(), blocks, len(blocks) * self.block_size, list(tokens), salt)
        seat.block_hashes, seat.ttl = list(hashes), self._ttl
        seat.miss = self._find_miss_reason(seat, tokens, max_cached)
        self.seats.add(seat)
        for block in blocks:
            self.pending.add_waiter(block, seat)
        if not self._allocate_blocks(seat, len(tokens)):
            seat.ttl = 0.0  # close() must not prolong the time for which the found blocks are kept
            self.close(seat)
            return None
        for i in range(seat.length // self.block_size, len(hashes)):
            if self.pool.find(hashes[i]) is None:
                self.pool.publish(hashes[i], blocks[i])
                self.pending.add(blocks[i], seat)
        self.table.write(seat)
        return seat

    def close(self, seat: PagedSeat) -> None:
        while seat.blocks:  # the last block is released first, so that a sequence's end is evicted before its prefix
            self._release_block(seat.blocks.pop(), seat)
        self.seats.remove(seat)
        self.table.release_row(seat.index)

    def discard(self, seat: PagedSeat) -> None:
        full = [block for block in seat.blocks[: seat.length // self.block_size] if block not in self.pending]
        bad = {block for block, finite in zip(full, self.store.find_finite_blocks(full), strict=True) if not finite}
        for other in self.seats:
            first = next((i for i, block in enumerate(other.blocks) if block in bad), None)
            if first is not None:  # the blocks after one with NaN or infinite values depend on it
                other.salt = None
                for block in other.blocks[first:]:
                    self.pool.unpublish(block)

    def _hash_blocks(self, tokens: Sequence[int], salt: Salt) -> list[BlockHash]:
        return list(self._hasher.hash_blocks(tokens, salt)) if self.prefix_cache else []

    def _find_cached_blocks(self, hashes: Sequence[BlockHash], limit: int) -> list[int]:
        """Return the blocks of the longest cached prefix, at most `limit` tokens, of a sequence with these hashes."""
        blocks: list[int] = []
        for block_hash in hashes[: limit // self.block_size]:
            block = self.pool.find(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _release_block(self, block: int, seat: PagedSeat) -> None:
        """Drop the seat's reference to a block. If the seat had to compute it, the next waiting seat takes over."""
        owned = self.pending.owner(block) is seat
        new_owner = self.pending.remove_seat(block, seat)
        if owned:
            self._blocks_to_complete.discard(block)
        if new_owner is not None:
            new_owner.length = new_owner.cached = min(new_owner.length, new_owner.blocks.index(block) * self.block_size)
            new_owner.miss = "cold"
        elif owned:
            self.pool.unpublish(block)  # no seat will compute the block, so it must not be found by its hash
        if not self.pool.is_shared(block) and block in self._copies:
            self.pool.decref(self._copies.pop(block))
        self.pool.decref(block, priority=seat.priority, ttl=seat.ttl)

    def _find_miss_reason(self, seat: PagedSeat, tokens: Sequence[int], max_cached: int | None) -> Miss | None:
        """Return why no more blocks of the prompt were found in the cache; None if all reusable ones were found."""
        found, findable = seat.length // self.block_size, count_reusable_tokens(tokens) // self.block_size
        if not self.prefix_cache:
            return "bypass"
        if found >= findable:
            return None if found else "short"
        if found == count_reusable_tokens(tokens, max_cached) // self.block_size:
            return "bypass"
        block_hash = seat.get_block_hash(found, self._hasher)
        return "short" if block_hash is None else self.pool.find_miss_reason(block_hash)

    # ---------------------------------------------------------------- grow, crop, fork
    def ready(self, seat: PagedSeat) -> bool:
        return not self.pending or all(
            block not in self.pending or self.pending.owner(block) is seat or block in self._blocks_to_complete
            for block in seat.blocks[: seat.length // self.block_size]
        )

    def grow(self, seat: PagedSeat, num_tokens: int) -> bool:
        end = seat.length + num_tokens
        assert end <= self.setup.geometry.max_seq_len
        first = seat.length // self.block_size
        # Make all blocks of the row writable, not just the first: if the seat took over a pending block (from a closed
        # seat that was to compute it), later blocks may be shared, too.
        for i in range(first, self._blocks_for(end)):
            if not self._make_writable(seat, i):
                return False
        if not self._allocate_blocks(seat, end):
            return False
        self.table.write(seat, first)
        if self.pending:
            self._blocks_to_complete.update(
                b for b in seat.blocks[first : end // self.block_size] if self.pending.owner(b) is seat
            )
        return True

    def _allocate_blocks(self, seat: PagedSeat, length: int) -> bool:
        """Allocate the missing blocks for `length` tokens; return False, evicting nothing, if they do not all fit."""
        missing = self._blocks_for(length) - len(seat.blocks)
        if missing <= 0:
            return True
        if not self.setup.arena.can_allocate(self.name, missing * self.store.pages_per_block):
            return False
        for _ in range(missing):
            block = self.pool.allocate()
            if block is None:
                return False
            seat.blocks.append(block)
        return True

    def _make_writable(self, seat: PagedSeat, i: int) -> bool:
        """Make the seat's i-th block unshared and without a hash, so that it can be written.

        Return False if a copy is needed and there is not enough memory.
        """
        if i >= len(seat.blocks) or seat.blocks[i] in self.pending:
            return True
        block = seat.blocks[i]
        if not self.pool.is_shared(block):
            self.pool.unpublish(block)
            return True
        copy = self.pool.allocate()
        if copy is None:
            return False
        self._block_metrics.on_block_copied()
        self._copies[copy] = block  # the seat's reference to the original is dropped after the copy has run
        seat.blocks[i] = copy
        return True

    def crop(self, seat: PagedSeat, length: int) -> None:
        assert length <= seat.length
        partial = length % self.block_size
        if partial and seat.blocks[length // self.block_size] in self.pending:
            length -= partial  # drop the whole pending block: its hash covers tokens that are dropped
        while len(seat.blocks) > self._blocks_for(length):
            self._release_block(seat.blocks.pop(), seat)
        seat.truncate(length, length // self.block_size)

    def fork(self, seat: PagedSeat) -> PagedSeat | None:
        blocks = seat.blocks[: self._blocks_for(seat.length)]
        if self.table.is_full or any(block in self.pending or block in self._copies for block in blocks):
            return None  # blocks are still being computed or copied: open() with the same tokens shares more
        for block in blocks:
            self.pool.incref(block)
        child = seat.fork(self.table.allocate_row(), blocks, seat.length // self.block_size)
        self.seats.add(child)
        self.table.write(child)
        return child

    def idle_pages(self) -> int:
        return self.pool.num_idle * self.store.pages_per_block

    def reclaim(self, pages: int) -> int:
        num_freed = 0
        while num_freed < pages and self.pool.num_idle:
            self.pool.evict()
            num_freed += self.store.pages_per_block
        return num_freed

    # ---------------------------------------------------------------- retention and pins
    def retain(self, seat: PagedSeat, *, priority: int, ttl: float | None) -> None:
        seat.priority, seat.ttl = priority, self._ttl if ttl is None else ttl

    def clear(self, scope: SaltScope = EVERYTHING) -> int:
        before = self.setup.arena.num_held_pages(self.name)
        for pin_id in self.pinned.find_in_scope(scope):
            self.unpin(pin_id)
        self.pool.clear(scope)
        for seat in self.seats:
            if seat.salt is not None and scope.includes(seat.salt):
                seat.salt = None
        return (before - self.setup.arena.num_held_pages(self.name)) * self.setup.arena.page_bytes

    def pin(self, tokens: Sequence[int], *, salt: Salt, ttl: float) -> Pin:
        blocks = self._find_cached_blocks(self._hash_blocks(tokens, salt), len(tokens))
        blocks = blocks[: next((i for i, block in enumerate(blocks) if block in self.pending), len(blocks))]
        if not blocks:
            raise PinError(
                "no block of this prefix is cached: send it as a prompt first; it needs at least "
                f"{self.block_size} tokens"
            )
        pages = self.pinned_pages() | self._pages(blocks)
        if (why_not := self.setup.arena.explain_refusal(self.name, pinned=pages)) is not None:
            raise PinError(f"with this pin, {why_not}: pin a shorter prefix, or remove other pins")
        for block in blocks:
            self.pool.incref(block)
        return self.pinned.add(blocks, len(blocks) * self.block_size, len(blocks) * self.bytes_per_block, salt, ttl)

    def unpin(self, pin_id: str) -> bool:
        blocks = self.pinned.remove(pin_id)
        for block in reversed(blocks):
            self.pool.decref(block)
        return bool(blocks)

    def pins(self) -> Sequence[Pin]:
        return self.pinned.list_pins()

    def pinned_pages(self) -> set[int]:
        return self._pages(self.pinned.blocks)

    def _pages(self, blocks: Iterable[int]) -> set[int]:
        return {page for block in blocks for page in range(block, block + self.store.pages_per_block)}

    def inspect(self) -> dict[str, Any]:
        seats = [
            {"tokens": seat.length, "cached_tokens": seat.cached, "blocks": len(seat.blocks)} for seat in self.seats
        ]
        return {"block_size": self.block_size, "blocks": self.blocks()._asdict(), "seats": seats}

    # ---------------------------------------------------------------- engine
    def poll(self) -> None:
        self._blocks_to_complete.clear()
        for pin_id in self.pinned.find_expired():
            self.unpin(pin_id)

    def plan(self, rows: Sequence[Row[PagedSeat]]) -> Plan[PagedSeat]:
        if self._copies:
            self.setup.ops.copy_blocks(self.store, list(self._copies.values()), list(self._copies))
        return super().plan(rows)

    def commit(self, plan: Plan[PagedSeat], tokens: Sequence[Sequence[int]]) -> None:
        for source in self._copies.values():
            self.pool.decref(source)
        self._copies.clear()
        self._blocks_to_complete.clear()
        for row, ids in zip(plan.rows, tokens, strict=True):
            assert len(ids) <= row.num_tokens
            self._commit_tokens(row.seat, ids)

    def _commit_tokens(self, seat: PagedSeat, ids: Sequence[int]) -> None:
        """Append computed tokens to the seat, and give hashes to the blocks that they filled, for prefix caching."""
        before = seat.length
        seat.commit_tokens(ids)
        for i in range(before // self.block_size, seat.length // self.block_size):
            block = seat.blocks[i]
            if block in self.pending:
                self.pending.mark_computed(block)
            elif self.prefix_cache and not self.pool.has_hash(block):
                block_hash = seat.get_block_hash(i, self._hasher)
                if block_hash is not None and self.pool.find(block_hash) is None:
                    self.pool.publish(block_hash, block)

    # ---------------------------------------------------------------- usage
    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def usage(self) -> CacheUsage:
        filled: dict[int, int] = {}
        for seat in self.seats:
            for i, block in enumerate(seat.blocks):
                tokens = min(max(seat.length - i * self.block_size, 0), self.block_size)
                filled[block] = max(filled.get(block, 0), tokens)
        tokens = sum(filled.values())
        filled |= dict.fromkeys(self.pinned.blocks, self.block_size)
        reserved, used = len(self.pool) * self.bytes_per_block, int(sum(filled.values()) * self.bytes_per_token)
        idle = int(self.pool.num_idle * self.block_size * self.bytes_per_token)
        return CacheUsage(len(self.seats), tokens, reserved, used, idle, reserved - used - idle, self.limit_bytes)

    def blocks(self) -> Blocks:
        references = Counter(block for seat in self.seats for block in seat.blocks)
        return Blocks(
            in_use=len(references),
            shared=sum(1 for n in references.values() if n > 1),
            pending=sum(1 for _ in self.pending.items()),
            pinned=len(self.pinned.blocks),
            idle=self.pool.num_idle,
        )

    def collect_block_events(self) -> BlockEvents | None:
        return self._block_metrics.collect()

    def check_integrity(self) -> None:
        references = Counter(block for seat in self.seats for block in seat.blocks)
        references.update(self._copies.values())
        references.update(self.pinned.blocks)
        self.pool.check_integrity(references)
        for seat in self.seats:
            assert len(seat.blocks) >= self._blocks_for(seat.length)
            assert len(seat.tokens) >= seat.length
        for block, queue in self.pending.items():
            owner = queue[0]
            assert owner.length < (owner.blocks.index(block) + 1) * self.block_size <= len(owner.tokens)
            assert all(block in seat.blocks for seat in queue)
