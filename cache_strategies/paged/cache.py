"""paged: a KV cache of small blocks, allocated as a sequence grows and shared by sequences with a common prefix.

After vLLM's PagedAttention (Kwon et al., 2023). This file opens sequences (`PagedSequence`) over the blocks of
`PagedBase`, and locates their rows. If some layers of the model have a window, these have blocks of their own, which
leave a sequence when the window has passed them (`WindowedBlocks`). Only full blocks can be found by hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import ClassVar

from cache_strategies.base import Locations, Rows
from cache_strategies.block_hashes import BlockHash
from cache_strategies.paged.base import PagedBase, longest_row_of
from cache_strategies.paged.state import PagedState
from cache_strategies.types import Miss, Salt, Text, count_reusable_tokens


class PagedSequence(PagedState):
    """A sequence of a paged cache.

    A block with several references is never written: the writer gets a copy first (copy-on-write), and the reference to
    the original is kept until the copy has run. A computed block loses its hash before it is written again. The blocks
    of layers with a window are those of `WindowedBlocks`; all else here is about the others.
    """

    def __init__(self, cache: PagedCache, blocks: list[int], length: int, tokens: list[int], salt: Salt | None) -> None:
        windows = len(cache.layout.groups) - 1
        super().__init__(cache.table.allocate_row(), blocks, length, tokens, salt, windows)
        self.cache = cache
        self.ttl = cache.ttl
        cache.sequences.add(self)

    # ---------------------------------------------------------------- memory for a row
    def ready(self) -> bool:
        pending = self.cache.pending
        return not pending or all(
            block not in pending or pending.owner(block) is self or block in self.cache.promised
            for block in self.blocks[: self.length // self.cache.block_size]
        )

    def reserve(self, num_tokens: int) -> bool:
        cache, end = self.cache, self.length + num_tokens
        assert end <= cache.setup.geometry.max_seq_len
        first = self.length // cache.block_size
        # Make all blocks of the row writable, not just the first: if the sequence took over a pending block (from a
        # closed one that was to compute it), later blocks may be shared, too.
        for i in range(first, cache.count_blocks(end)):
            if not self._make_writable(i):
                return False
        if cache.has_windows:
            if not self._reserve_windowed(end):
                return False
        elif not self.allocate_blocks(end):
            return False
        if cache.pending:
            cache.promised.update(
                block for block in self.blocks[first : end // cache.block_size] if cache.pending.owner(block) is self
            )
        else:
            self.room = cache.count_blocks(end) * cache.block_size
        return True

    def _reserve_windowed(self, end: int) -> bool:
        """Make room for the tokens up to position `end` in all layers; return False if memory is missing."""
        windowed = self.cache.windowed
        if self.cache.pending:
            windowed.take_from_owners(self)
        if not windowed.make_writable(self, end):
            return False
        missing = windowed.count_missing_bytes(self, end)
        return self.allocate_blocks(end, missing) and windowed.allocate(self, end)

    def allocate_blocks(self, num_tokens: int, windowed: int = 0) -> bool:
        """Allocate the missing blocks for `num_tokens` tokens, in the table too; return False if they do not all fit.

        Nothing is evicted for a part of them. There must be room for `windowed` bytes of windowed layers besides.
        """
        cache = self.cache
        missing = max(0, cache.count_blocks(num_tokens) - len(self.blocks))
        if not missing and not windowed:
            return True
        if not cache.setup.memory.can_allocate(missing * cache.block_bytes[0] + windowed):
            return False
        first, length = len(self.blocks), len(self.blocks) + missing
        while len(self.blocks) < length and (block := cache.pool.allocate()) is not None:
            self.blocks.append(block)
        self.write_table(first)
        return len(self.blocks) == length

    def _make_writable(self, i: int) -> bool:
        """Make the i-th block unshared and without a hash, so that it can be written.

        Return False if a copy is needed and there is not enough memory.
        """
        if i >= len(self.blocks) or self.blocks[i] in self.cache.pending:
            return True
        block = self.cache.copies.make_writable(self.blocks[i])
        if block is None:
            return False
        if block != self.blocks[i]:
            self.blocks[i] = block
            self.write_table(i)
        return True

    def write_table(self, first: int = 0) -> None:
        """Write the blocks of layers without a window to the block table, from the `first` on."""
        table, columns = self.cache.table, self.cache.columns
        if columns == [1]:  # then a block has the number of its allocation
            table.write(self, first)
            return
        numbers = [self.cache.pool.columns(block) for block in self.blocks[first:]]
        for column in range(columns[0]):
            table.write_blocks(self.index, first, [each[column] for each in numbers], column)

    # ---------------------------------------------------------------- commit
    def commit(self, ids: Sequence[int]) -> None:
        """Append computed tokens, and give hashes to the blocks that they filled, for prefix caching."""
        cache, before = self.cache, self.length
        self.length = before + len(ids)
        self.tokens[before : self.length] = ids  # they replace prompt tokens at the same positions
        for i in range(before // cache.block_size, self.length // cache.block_size):
            block = self.blocks[i]
            waiting: Sequence[PagedState] = ()
            if block in cache.pending:
                waiting = cache.pending.mark_computed(block)
            elif cache.prefix_cache and not cache.pool.has_hash(block):
                block_hash = self.get_block_hash(i, cache.hasher)
                if block_hash is not None and cache.pool.find(block_hash) is None:
                    cache.pool.publish(block_hash, block)
            if cache.has_windows:
                block_hash = self.get_block_hash(i, cache.hasher) if cache.prefix_cache else None
                cache.windowed.commit_block(self, i, block_hash, waiting)
        if cache.has_windows and before // cache.block_size < self.length // cache.block_size:
            cache.windowed.drop_passed(self)
        if len(self.blocks) > (needed := cache.count_blocks(len(self.tokens))):  # slots of rejected drafts
            self._release_blocks(needed)
            cache.windowed.release(self, needed)
            self.room = 0

    # ---------------------------------------------------------------- truncate, fork
    def truncate(self, length: int) -> None:
        assert length <= self.length
        cache, size = self.cache, self.cache.block_size
        self.room = 0  # the block at the new end may be shared
        partial = length % size
        if partial and self.blocks[length // size] in cache.pending:
            length -= partial  # drop the whole pending block: its hash covers tokens that are dropped
        self._release_blocks(cache.count_blocks(length))
        if cache.has_windows:
            cache.windowed.release(self, cache.count_blocks(length))
            if length < self.length:
                length = self._restore_windows(length)
        del self.tokens[length:], self.block_hashes[length // size :]
        self.length, self.found = length, min(self.found, length)

    def fork(self) -> PagedSequence | None:
        cache = self.cache
        blocks = self.blocks[: cache.count_blocks(self.length)]
        every = chain(blocks, *(held.values() for held in self.windowed))
        if cache.table.is_full or any(block in cache.pending or block in cache.copies for block in every):
            return None  # blocks are still being computed or copied: open() with the same tokens shares more
        for block in blocks:
            cache.pool.incref(block)
        self.room = 0  # the last block is shared now
        child = type(self)(cache, blocks, self.length, self.tokens[: self.length], self.salt)
        child.branch = self.branch
        child.block_hashes = self.block_hashes[: self.length // cache.block_size]
        child.found, child.miss, child.priority, child.ttl = self.found, self.miss, self.priority, self.ttl
        child.write_table()
        cache.windowed.fork(self, child)
        return child

    # ---------------------------------------------------------------- close
    def close(self) -> None:
        if self.spoiled:
            self.cache.unpublish_spoiled(self)
        self._release_blocks()
        self.cache.windowed.release(self)
        self.cache.sequences.remove(self)
        self.cache.table.release_row(self.index)

    def _release_blocks(self, first: int = 0) -> None:
        """Drop the references to the blocks of layers without a window, from the `first` on.

        The last block is released first, so that a sequence's end is evicted before its prefix.
        """
        heirs: dict[PagedSequence, None] = {}
        while len(self.blocks) > first:
            heir = self._release_block(self.blocks.pop())
            if heir is not None:
                heirs[heir] = None
        if self.cache.has_windows:
            for heir in heirs:
                self.cache.windowed.release(heir, heir.length // self.cache.block_size)
                heir.length = heir.found = heir._restore_windows(heir.length)

    def _release_block(self, block: int) -> PagedSequence | None:
        """Drop the reference to a block; return the waiting sequence that computes it instead, if there is one."""
        cache = self.cache
        owned = cache.pending.owner(block) is self
        new_owner = cache.pending.remove_sequence(block, self)
        assert new_owner is None or isinstance(new_owner, PagedSequence)
        if owned:
            cache.promised.discard(block)
        if new_owner is not None:
            start = new_owner.blocks.index(block) * cache.block_size
            new_owner.length = new_owner.found = min(new_owner.length, start)
            new_owner.miss = "cold"
        elif owned:
            cache.pool.unpublish(block)  # no sequence will compute the block, so it must not be found by its hash
        cache.copies.cancel(block)
        cache.pool.decref(block, priority=self.priority, ttl=self.ttl)
        return new_owner

    def _restore_windows(self, length: int) -> int:
        """Take the windowed blocks that the token at position `length` needs, and return `length`.

        If some are missing, the sequence goes back to the longest prefix from which it can go on, whose length is
        returned.
        """
        windowed, size = self.cache.windowed, self.cache.block_size
        if windowed.take(self, length):
            return length
        num_blocks = windowed.limit_length(self, length // size)
        self._release_blocks(num_blocks)
        windowed.release(self, num_blocks)
        is_complete = windowed.take(self, num_blocks * size)
        assert is_complete
        return num_blocks * size


class PagedCache(PagedBase):
    """A cache of small blocks, which grows with its sequences and shares the blocks of common prefixes."""

    sequence_type: ClassVar[type[PagedSequence]] = PagedSequence

    def open(self, text: Text) -> PagedSequence | None:
        if self.table.is_full:
            return None
        hashes = self._hash_blocks(text.ids, text.salt)
        num_blocks, found = self._find_prefix(hashes, text.num_reusable)
        blocks = self._reference_prefix(hashes[:num_blocks], found)
        opened = self.sequence_type(self, blocks, num_blocks * self.block_size, list(text.ids), text.salt)
        opened.block_hashes, opened.branch, opened.priority = list(hashes), max(num_blocks, len(found)), text.priority
        opened.ttl = self.ttl if text.ttl is None else text.ttl
        opened.miss = self._find_miss_reason(opened, text)
        for block in blocks:
            self.pending.add_waiter(block, opened)
        opened.write_table()
        if not opened.allocate_blocks(len(text.ids), self._open_windowed(opened) if self.has_windows else 0):
            opened.priority, opened.ttl = 0, 0.0  # close() must not prolong the time for which found blocks are kept
            opened.close()
            return None
        for block_hash in reversed(hashes[num_blocks : len(found)]):  # each one's hits go to the block before it
            self._free_unusable(block_hash)
        for i in range(num_blocks, len(hashes)):
            if not self._is_cached(hashes[i]):
                self.pool.publish(hashes[i], blocks[i])
                self.pending.add(blocks[i], opened)
        if num_blocks:
            self.pool.record_hit(hashes[num_blocks - 1])
        return opened

    def locate(self, rows: Rows[PagedState]) -> Locations:
        self.copies.run(self.setup.ops)
        return super().locate(rows)

    def poll(self) -> None:
        self.promised.clear()
        for pin_id in self.pinned.find_expired():
            self.unpin(pin_id)

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

    def _open_windowed(self, sequence: PagedSequence) -> int:
        """Add references to the windowed blocks of a new sequence's prefix; return the bytes of those to come."""
        is_complete = self.windowed.take(sequence, sequence.length)
        assert is_complete, "a prefix is found only with the windowed blocks before its end"
        return self.windowed.count_peak_bytes(sequence, len(sequence.tokens), longest_row_of(self.setup.geometry))

    def _is_cached(self, block_hash: BlockHash) -> bool:
        """Return whether blocks with this hash are cached in all layers without a window, or in all if each has one."""
        if self.pool.find(block_hash) is not None:
            return True
        return not self.columns[0] and self.windowed.find_missing_hash(block_hash) is None

    def _free_unusable(self, block_hash: BlockHash) -> None:
        """Free the block with this hash if it is idle: a new sequence is about to compute all layers of its tokens.

        Other sequences can then wait for the new block, and there are no two blocks with the same contents.
        """
        block = self.pool.find(block_hash)
        if block is not None and block not in self.pending and not (self.pool.is_used(block) and block >= 0):
            self.pool.unpublish(block)

    def _find_miss_reason(self, sequence: PagedSequence, text: Text) -> Miss | None:
        """Return why no more blocks of the prompt were found in the cache; None if all reusable ones were found."""
        found, findable = sequence.length // self.block_size, count_reusable_tokens(text.ids) // self.block_size
        if not self.prefix_cache:
            return "bypass"
        if found >= findable:
            return None if found else "short"
        if found == text.num_reusable // self.block_size:
            return "bypass"
        block_hash = sequence.get_block_hash(found, self.hasher)
        if block_hash is None:
            return "short"
        is_missing = self.columns[0] and self.pool.find(block_hash) is None
        missing = None if is_missing else self.windowed.find_missing_hash(block_hash)
        return self.pool.find_miss_reason(missing or block_hash)
