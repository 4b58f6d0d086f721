"""paged: a KV cache of small blocks, allocated as a sequence grows and shared by sequences with a common prefix.

After vLLM's PagedAttention (Kwon et al., 2023). This file opens and advances the seats (`PagedSeat`: a sequence's
tokens and block hashes) over the blocks of `PagedBase`. If some layers of the model have a window, these have blocks of
their own, which leave a sequence when the window has passed them (`WindowedBlocks`); all else here is about the others.

Only full blocks can be found by hash. A block with several references is never written: the writer gets a copy first
(copy-on-write), and the seat's reference to the original is kept until the copy has run. A computed block loses its
hash before it is written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from cache_strategies.base import Plan, Row
from cache_strategies.paged.accounting import iter_blocks
from cache_strategies.paged.base import PagedBase, longest_row_of
from cache_strategies.paged.prefix_index import BlockHash
from cache_strategies.paged.seat import PagedSeat
from cache_strategies.types import (
    NO_SALT,
    Miss,
    Salt,
    count_reusable_tokens,
)


class PagedCache(PagedBase):
    """A cache of small blocks, which grows with its sequences and shares the blocks of common prefixes."""

    # ---------------------------------------------------------------- open, close
    def open(self, tokens: Sequence[int], *, salt: Salt = NO_SALT, max_cached: int | None = None) -> PagedSeat | None:
        if self.table.is_full:
            return None
        hashes = self._hash_blocks(tokens, salt)
        num_blocks, found = self._find_prefix(hashes, count_reusable_tokens(tokens, max_cached))
        blocks = self._reference_prefix(hashes[:num_blocks], found)
        length, num_windows = num_blocks * self.block_size, len(self.layout.groups) - 1
        seat = PagedSeat(self.table.allocate_row(), blocks, length, list(tokens), salt, num_windows)
        seat.block_hashes, seat.ttl, seat.branch = list(hashes), self._ttl, max(num_blocks, len(found))
        seat.miss = self._find_miss_reason(seat, tokens, max_cached)
        self.seats.add(seat)
        for block in blocks:
            self.pending.add_waiter(block, seat)
        self._write_table(seat)
        if not self._allocate_blocks(seat, len(tokens), self._open_windowed(seat) if self.has_windows else 0):
            seat.ttl = 0.0  # close() must not prolong the time for which the found blocks are kept
            self.close(seat)
            return None
        for block_hash in reversed(hashes[num_blocks : len(found)]):  # each one's hits go to the block before it
            self._free_unusable(block_hash)
        for i in range(num_blocks, len(hashes)):
            if not self._is_cached(hashes[i]):
                self.pool.publish(hashes[i], blocks[i])
                self.pending.add(blocks[i], seat)
        if num_blocks:
            self.pool.record_hit(hashes[num_blocks - 1])
        return seat

    def close(self, seat: PagedSeat) -> None:
        self._release_blocks(seat)
        self.windowed.release(seat)
        self.seats.remove(seat)
        self.table.release_row(seat.index)

    def discard(self, seat: PagedSeat) -> None:
        full = seat.length // self.block_size
        known = [(i, block) for i, block in enumerate(seat.blocks[:full]) if block not in self.pending]
        known += self.windowed.iter_known(seat, full)
        bad = self._find_bad_blocks([block for _, block in known])
        first_bad = min((i for i, block in known if block in bad), default=full)
        dependent = [block for i, block in known if i >= first_bad]
        for other in self.seats:
            first = min((i for i, block in iter_blocks(other) if block in bad), default=None)
            if first is not None:  # the blocks after one with NaN or infinite values depend on it
                other.salt = None
                dependent += [block for i, block in iter_blocks(other) if i >= first]
        for block in dict.fromkeys(dependent):
            self.pool.unpublish(block)

    def _reference_prefix(self, hashes: Sequence[BlockHash], found: Sequence[int]) -> list[int]:
        """Add references to the blocks of a prefix that was found, before any allocation, which could evict them.

        If all layers have a window, these blocks take no memory, and missing ones are added.
        """
        blocks = list(found[: len(hashes)])
        for block in blocks:
            self.pool.incref(block)
        for block_hash in hashes[len(blocks) :]:
            if (known := self.pool.find(block_hash)) is not None:
                self.pool.incref(known)
            else:
                known = self.pool.allocate()
                assert known is not None
                self.pool.publish(block_hash, known)
            blocks.append(known)
        return blocks

    def _open_windowed(self, seat: PagedSeat) -> int:
        """Add references to the windowed blocks of a new seat's prefix; return the bytes of those to come."""
        is_complete = self.windowed.take(seat, seat.length)
        assert is_complete, "a prefix is found only with the windowed blocks before its end"
        return self.windowed.count_peak_bytes(seat, len(seat.tokens), longest_row_of(self.setup.geometry))

    def _is_cached(self, block_hash: BlockHash) -> bool:
        """Return whether blocks with this hash are cached in all layers without a window, or in all if each has one."""
        if self.pool.find(block_hash) is not None:
            return True
        return not self._columns[0] and self.windowed.find_missing_hash(block_hash) is None

    def _free_unusable(self, block_hash: BlockHash) -> None:
        """Free the block with this hash if it is idle: a new seat is about to compute all layers of its tokens.

        Other seats can then wait for the new block, and there are no two blocks with the same contents.
        """
        block = self.pool.find(block_hash)
        if block is not None and block not in self.pending and not (self.pool.is_used(block) and block >= 0):
            self.pool.unpublish(block)

    def _release_blocks(self, seat: PagedSeat, first: int = 0) -> None:
        """Drop the seat's references to its blocks of layers without a window, from the `first` on.

        The last block is released first, so that a sequence's end is evicted before its prefix.
        """
        heirs: dict[PagedSeat, None] = {}
        while len(seat.blocks) > first:
            heir = self._release_block(seat.blocks.pop(), seat)
            if heir is not None:
                heirs[heir] = None
        if self.has_windows:
            for heir in heirs:
                self.windowed.release(heir, heir.length // self.block_size)
                heir.length = heir.cached = self._restore_windows(heir, heir.length)

    def _restore_windows(self, seat: PagedSeat, length: int) -> int:
        """Give a seat the windowed blocks that its token at position `length` needs, and return `length`.

        If some are missing, the seat goes back to the longest prefix from which it can go on, whose length is returned.
        """
        if self.windowed.take(seat, length):
            return length
        num_blocks = self.windowed.limit_length(seat, length // self.block_size)
        self._release_blocks(seat, num_blocks)
        self.windowed.release(seat, num_blocks)
        is_complete = self.windowed.take(seat, num_blocks * self.block_size)
        assert is_complete
        return num_blocks * self.block_size

    def _release_block(self, block: int, seat: PagedSeat) -> PagedSeat | None:
        """Drop the seat's reference to a block; return the waiting seat that computes it instead, if there is one."""
        owned = self.pending.owner(block) is seat
        new_owner = self.pending.remove_seat(block, seat)
        if owned:
            self._blocks_to_complete.discard(block)
        if new_owner is not None:
            new_owner.length = new_owner.cached = min(new_owner.length, new_owner.blocks.index(block) * self.block_size)
            new_owner.miss = "cold"
        elif owned:
            self.pool.unpublish(block)  # no seat will compute the block, so it must not be found by its hash
        self._copies.cancel(block)
        self.pool.decref(block, priority=seat.priority, ttl=seat.ttl)
        return new_owner

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
        if block_hash is None:
            return "short"
        is_missing = self._columns[0] and self.pool.find(block_hash) is None
        missing = None if is_missing else self.windowed.find_missing_hash(block_hash)
        return self.pool.find_miss_reason(missing or block_hash)

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
        if self.has_windows:
            if not self._grow_windowed(seat, end):
                return False
        elif not self._allocate_blocks(seat, end):
            return False
        if self.pending:
            self._blocks_to_complete.update(
                b for b in seat.blocks[first : end // self.block_size] if self.pending.owner(b) is seat
            )
        elif type(self).grow is PagedCache.grow:  # else a subclass has something to do for each row
            seat.room = self._blocks_for(end) * self.block_size
        return True

    def _grow_windowed(self, seat: PagedSeat, end: int) -> bool:
        """Make room for the seat's tokens up to position `end` in all layers; return False if memory is missing."""
        if self.pending:
            self.windowed.take_from_owners(seat)
        if not self.windowed.make_writable(seat, end):
            return False
        missing = self.windowed.count_missing_bytes(seat, end)
        return self._allocate_blocks(seat, end, missing) and self.windowed.allocate(seat, end)

    def _allocate_blocks(self, seat: PagedSeat, num_tokens: int, windowed: int = 0) -> bool:
        """Allocate the missing blocks for `num_tokens` tokens, in the table too; return False if they do not all fit.

        Nothing is evicted for a part of them. There must be room for `windowed` bytes of windowed layers besides.
        """
        missing = max(0, self._blocks_for(num_tokens) - len(seat.blocks))
        if not missing and not windowed:
            return True
        if not self.setup.memory.can_allocate(missing * self._block_bytes[0] + windowed):
            return False
        first, length = len(seat.blocks), len(seat.blocks) + missing
        while len(seat.blocks) < length and (block := self.pool.allocate()) is not None:
            seat.blocks.append(block)
        self._write_table(seat, first)
        return len(seat.blocks) == length

    def _make_writable(self, seat: PagedSeat, i: int) -> bool:
        """Make the seat's i-th block unshared and without a hash, so that it can be written.

        Return False if a copy is needed and there is not enough memory.
        """
        if i >= len(seat.blocks) or seat.blocks[i] in self.pending:
            return True
        block = self._copies.make_writable(seat.blocks[i])
        if block is None:
            return False
        if block != seat.blocks[i]:
            seat.blocks[i] = block
            self._write_table(seat, i)
        return True

    def crop(self, seat: PagedSeat, length: int) -> None:
        assert length <= seat.length
        seat.room = 0  # the block at the new end may be shared
        partial = length % self.block_size
        if partial and seat.blocks[length // self.block_size] in self.pending:
            length -= partial  # drop the whole pending block: its hash covers tokens that are dropped
        self._release_blocks(seat, self._blocks_for(length))
        if self.has_windows:
            self.windowed.release(seat, self._blocks_for(length))
            if length < seat.length:
                length = self._restore_windows(seat, length)
        seat.truncate(length, length // self.block_size)

    def fork(self, seat: PagedSeat) -> PagedSeat | None:
        blocks = seat.blocks[: self._blocks_for(seat.length)]
        every = chain(blocks, *(held.values() for held in seat.windowed))
        if self.table.is_full or any(block in self.pending or block in self._copies for block in every):
            return None  # blocks are still being computed or copied: open() with the same tokens shares more
        for block in blocks:
            self.pool.incref(block)
        seat.room = 0  # the last block is shared now
        child = seat.fork(self.table.allocate_row(), blocks, seat.length // self.block_size)
        self.seats.add(child)
        self._write_table(child)
        self.windowed.fork(seat, child)
        return child

    # ---------------------------------------------------------------- engine
    def poll(self) -> None:
        self._blocks_to_complete.clear()
        for pin_id in self.pinned.find_expired():
            self.unpin(pin_id)

    def plan(self, rows: Sequence[Row[PagedSeat]]) -> Plan[PagedSeat]:
        if self._copies:
            self._copies.run(self.setup.ops)
        return super().plan(rows)

    def commit(self, plan: Plan[PagedSeat], tokens: Sequence[Sequence[int]]) -> None:
        self._copies.finish()
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
            waiting: Sequence[PagedSeat] = ()
            if block in self.pending:
                waiting = self.pending.mark_computed(block)
            elif self.prefix_cache and not self.pool.has_hash(block):
                block_hash = seat.get_block_hash(i, self._hasher)
                if block_hash is not None and self.pool.find(block_hash) is None:
                    self.pool.publish(block_hash, block)
            if self.has_windows:
                block_hash = seat.get_block_hash(i, self._hasher) if self.prefix_cache else None
                self.windowed.commit_block(seat, i, block_hash, waiting)
        if self.has_windows and before // self.block_size < seat.length // self.block_size:
            self.windowed.drop_passed(seat)
