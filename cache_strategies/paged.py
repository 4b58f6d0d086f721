"""paged: blocks of a few tokens, taken as a sequence grows and found again by later sequences with the same beginning.

After vLLM's PagedAttention (Kwon et al., 2023). This file only wires its parts: `BlockPool` counts references,
`PrefixIndex` knows which block holds which tokens, `PendingBlocks` who computes a block that others wait for.

Only full blocks are shared. A block that several seats refer to, or that has a name, is never written: the writer gets
a copy first, and the source stays referenced until the copy has run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from cache_strategies.base import KEEPS_EVERYTHING, CacheSetup, Geometry, Plan, Row, Seat, Usage
from cache_strategies.block_pool import BlockPool
from cache_strategies.prefix_index import Name, PendingBlocks, PrefixIndex, PrefixNames
from cache_strategies.table import TableCache, TableOptions, TableSeat


class PagedOptions(TableOptions):
    """Options of a paged cache."""

    block_size: int = Field(32, ge=1, le=1024, description="tokens of a block")
    prefix_cache: bool = Field(True, description="share blocks between sequences that begin alike")


class PagedSeat(TableSeat):
    """A seat that knows its tokens, to name the blocks they fill."""

    __slots__ = ("names", "salt", "tokens")

    def __init__(self, index: int, blocks: list[int], length: int, tokens: list[int], salt: str) -> None:
        super().__init__(index, blocks, length)
        self.tokens = tokens  # committed, and while the prompt is computed the rest of it too
        self.salt = salt
        self.names: list[Name | None] = []  # of the full blocks of `tokens`; None: not to be shared


class PagedCache(TableCache):
    """Block tables over a pool."""

    options_type = PagedOptions

    def __init__(self, setup: CacheSetup, options: PagedOptions) -> None:
        super().__init__(setup, options)
        self.prefix_cache = options.prefix_cache
        self.index = PrefixIndex()
        self.pending = PendingBlocks()
        self.pool = BlockPool(setup.arena, setup.name, self.store.run, keep=lambda block: block in self.index)
        self._prefix = PrefixNames(self.block_size, f"{setup.name}\0{self.store.dtype}")
        self._granted: set[int] = set()  # pending blocks that rows of this step complete
        self._copies: dict[int, int] = {}  # destination: source, to run before the next step writes
        self.contract = KEEPS_EVERYTHING._replace(exact=not self.rounds, shareable=self.prefix_cache)

    @classmethod
    def block_plan(cls, options: Any, geometry: Geometry) -> tuple[int, int]:
        block_size = min(options.block_size, geometry.max_seq_len)
        return block_size, -(-geometry.max_seq_len // block_size)

    @property
    def block_size(self) -> int:
        return self.store.block_size

    def bytes_for(self, num_tokens: int) -> int:
        return self._blocks_for(num_tokens) * self.bytes_per_block

    # ---------------------------------------------------------------- open, close
    def match(self, tokens: Sequence[int], *, salt: str = "", max_cached: int | None = None) -> int:
        return len(self._found(self._names_of(tokens, salt), _usable(tokens, max_cached))) * self.block_size

    def open(self, tokens: Sequence[int], *, salt: str = "", max_cached: int | None = None) -> Seat | None:
        if self.table.full:
            return None
        names = self._names_of(tokens, salt)
        blocks = self._found(names, _usable(tokens, max_cached))
        for block in blocks:  # hold them before anything is taken: taking may evict
            self.pool.hold(block)
        seat = PagedSeat(self.table.take(), blocks, len(blocks) * self.block_size, list(tokens), salt)
        seat.names = list(names)
        self.seats.add(seat)
        for block in blocks:
            self.pending.wait(block, seat)
        if not self._extend(seat, len(tokens)):
            self.close(seat)
            return None
        for i in range(seat.length // self.block_size, len(names)):
            if self.index.find(names[i]) is None:
                self.index.publish(names[i], blocks[i])
                self.pending.promise(blocks[i], seat)
        self.table.write(seat)
        return seat

    def close(self, seat: Seat) -> None:
        assert isinstance(seat, PagedSeat)
        while seat.blocks:  # the last block first: among idle blocks, ends of texts go before their beginnings
            self._leave(seat.blocks.pop(), seat)
        self.seats.remove(seat)
        self.table.give(seat.index)

    def _names_of(self, tokens: Sequence[int], salt: str) -> list[Name]:
        return list(self._prefix.of(tokens, salt)) if self.prefix_cache else []

    def _found(self, names: Sequence[Name], limit: int) -> list[int]:
        """Blocks of the longest known prefix, of at most `limit` tokens."""
        blocks: list[int] = []
        for name in names[: limit // self.block_size]:
            block = self.index.find(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _leave(self, block: int, seat: PagedSeat) -> None:
        """`seat` lets go of a block; if it had to compute it, the next in line does."""
        mine = self.pending.owner(block) is seat
        heir = self.pending.leave(block, seat)
        if mine:
            self._granted.discard(block)
        if isinstance(heir, PagedSeat):
            heir.length = heir.cached = min(heir.length, heir.blocks.index(block) * self.block_size)
        elif mine:
            self.index.forget(block)  # nobody will compute it
        if not self.pool.shared(block) and block in self._copies:
            self.pool.drop(self._copies.pop(block))
        self.pool.drop(block)

    # ---------------------------------------------------------------- grow, crop, fork
    def ready(self, seat: Seat) -> bool:
        assert isinstance(seat, PagedSeat)
        return all(
            block not in self.pending or self.pending.owner(block) is seat or block in self._granted
            for block in seat.blocks[: seat.length // self.block_size]
        )

    def grow(self, seat: Seat, more: int) -> bool:
        assert isinstance(seat, PagedSeat)
        end = seat.length + more
        assert end <= self.setup.geometry.max_seq_len
        first = seat.length // self.block_size
        # Who inherits work may find a block behind it that others hold already, and write through it.
        owned = all(self._own(seat, i) for i in range(first, self._blocks_for(end)))
        if not owned or not self._extend(seat, end):
            return False
        self.table.write(seat, first)
        for block in seat.blocks[first : end // self.block_size]:
            if self.pending.owner(block) is seat:
                self._granted.add(block)
        return True

    def _extend(self, seat: PagedSeat, length: int) -> bool:
        """Blocks for `length` tokens; without room for all of them, nothing is evicted for some."""
        missing = self._blocks_for(length) - len(seat.blocks)
        if missing > 0 and not self.setup.arena.could_take(self.name, missing * self.store.run):
            return False
        while len(seat.blocks) < self._blocks_for(length):
            block = self.pool.take()
            if block is None:
                return False
            seat.blocks.append(block)
        return True

    def _own(self, seat: PagedSeat, i: int) -> bool:
        """The seat's i-th block, about to be written, is its own and has no name."""
        if i >= len(seat.blocks) or seat.blocks[i] in self.pending:
            return True
        block = seat.blocks[i]
        if not self.pool.shared(block):
            self.index.forget(block)
            return True
        copy = self.pool.take()
        if copy is None:
            return False
        self._copies[copy] = block  # the seat's reference to the source becomes the copy's
        seat.blocks[i] = copy
        return True

    def crop(self, seat: Seat, length: int) -> None:
        assert isinstance(seat, PagedSeat)
        assert length <= seat.length
        partial = length % self.block_size
        if partial and seat.blocks[length // self.block_size] in self.pending:
            length -= partial  # that block was promised under the name of tokens that may not come any more
        while len(seat.blocks) > self._blocks_for(length):
            self._leave(seat.blocks.pop(), seat)
        del seat.tokens[length:], seat.names[length // self.block_size :]
        seat.length = length
        seat.cached = min(seat.cached, length)

    def fork(self, seat: Seat) -> Seat | None:
        assert isinstance(seat, PagedSeat)
        blocks = seat.blocks[: self._blocks_for(seat.length)]
        if self.table.full or any(block in self.pending or block in self._copies for block in blocks):
            return None  # half-way through its prompt or a copy: opening the child with the same tokens shares more
        for block in blocks:
            self.pool.hold(block)
        child = PagedSeat(self.table.take(), blocks, seat.length, seat.tokens[: seat.length], seat.salt)
        child.names = seat.names[: seat.length // self.block_size]
        child.cached = seat.cached
        self.seats.add(child)
        self.table.write(child)
        return child

    def idle_pages(self) -> int:
        return self.pool.num_idle * self.store.run

    def reclaim(self, pages: int) -> int:
        given = 0
        while given < pages and (block := self.pool.oldest_idle()) is not None:
            self.index.forget(block)
            self.pool.evict(block)
            given += self.store.run
        return given

    # ---------------------------------------------------------------- engine
    def poll(self) -> None:
        self._granted.clear()

    def plan(self, rows: Sequence[Row], *, pad_to: int = 0) -> Plan:
        if self._copies:
            self.setup.ops.copy_blocks(self.store, list(self._copies.values()), list(self._copies))
        return super().plan(rows, pad_to=pad_to)

    def commit(self, plan: Plan, tokens: Sequence[Sequence[int]]) -> None:
        for source in self._copies.values():
            self.pool.drop(source)
        self._copies.clear()
        self._granted.clear()
        for row, ids in zip(plan.rows, tokens, strict=True):
            assert isinstance(row.seat, PagedSeat)
            assert len(ids) <= row.num_tokens
            self._enter(row.seat, ids)

    def _enter(self, seat: PagedSeat, ids: Sequence[int]) -> None:
        """Tokens are in: name the blocks they filled."""
        before, seat.length = seat.length, seat.length + len(ids)
        seat.tokens[before : seat.length] = ids
        for i in range(before // self.block_size, seat.length // self.block_size):
            block = seat.blocks[i]
            if block in self.pending:
                self.pending.computed(block)
            elif self.prefix_cache and block not in self.index:
                name = self._name(seat, i)
                if name is not None and self.index.find(name) is None:
                    self.index.publish(name, block)

    def _name(self, seat: PagedSeat, i: int) -> Name | None:
        """Name of the seat's i-th block; computed once, from its parent's."""
        while len(seat.names) <= i:
            n = len(seat.names)
            parent = seat.names[-1] if n else self._prefix.root(seat.salt)
            tokens = seat.tokens[n * self.block_size : (n + 1) * self.block_size]
            seat.names.append(None if parent is None else self._prefix.child(parent, tokens))
        return seat.names[i]

    # ---------------------------------------------------------------- books
    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def usage(self) -> Usage:
        filled: dict[int, int] = {}
        for seat in self.seats:
            for i, block in enumerate(seat.blocks):
                tokens = min(max(seat.length - i * self.block_size, 0), self.block_size)
                filled[block] = max(filled.get(block, 0), tokens)
        tokens = sum(filled.values())
        reserved, used = len(self.pool) * self.bytes_per_block, int(tokens * self.bytes_per_token)
        idle = int(self.pool.num_idle * self.block_size * self.bytes_per_token)
        limit = self.setup.arena.capacity(self.name) * self.setup.arena.page_bytes
        return Usage(len(self.seats), tokens, reserved, used, idle, reserved - used - idle, limit)

    def check_integrity(self) -> None:
        references = Counter(block for seat in self.seats for block in seat.blocks)
        references.update(self._copies.values())
        self.pool.check_integrity(references)
        self.index.check_integrity()
        for seat in self.seats:
            assert isinstance(seat, PagedSeat)
            assert len(seat.blocks) >= self._blocks_for(seat.length)
            assert len(seat.tokens) >= seat.length
        for block, line in self.pending.items():
            assert block in self.index
            assert all(block in seat.blocks for seat in line if isinstance(seat, PagedSeat))


def _usable(tokens: Sequence[int], limit: int | None) -> int:
    """Tokens of a prompt that may be taken from the cache: the last one is always computed."""
    return max(0, len(tokens) - 1 if limit is None else min(len(tokens) - 1, limit))
