"""The blocks of layers with a window: which of them each sequence holds, takes over from others, and drops.

A sequence holds only the blocks in the window of its next tokens. What the window has passed leaves the sequence when a
step is committed; such blocks can be found by their hash until they are evicted, which they are before all others. The
blocks of layers without a window, `PagedState.blocks`, say which sequence computes what: a position's windowed
blocks are computed together with them. Does not know layers, but groups of layers (layer_groups.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from cache_strategies.block_hashes import BlockHash
from cache_strategies.block_table import BlockTable
from cache_strategies.paged.block_copies import BlockCopies
from cache_strategies.paged.block_pool import BlockPool
from cache_strategies.paged.layer_groups import LayerLayout, count_blocks_for_hit, count_kept_blocks
from cache_strategies.paged.prefix_index import PendingBlocks
from cache_strategies.paged.state import PagedState

PASSED = -1  # eviction priority of blocks that a window has passed; requests have priorities from 0 on


class _WindowGroup(NamedTuple):
    """A group of layers with a window."""

    number: int
    window: int
    num_for_hit: int  # how many blocks before a position must be there if a sequence is to go on from there
    num_kept: int  # how many full blocks a sequence keeps
    block_bytes: int
    table: int  # number of the group's table in the block table


class WindowedBlocks:
    """The windowed blocks of all sequences of a cache. PagedState.windowed has them by group and position."""

    def __init__(
        self,
        layout: LayerLayout,
        pool: BlockPool,
        pending: PendingBlocks[PagedState],
        copies: BlockCopies,
        table: BlockTable,
        block_bytes: Sequence[int],
    ) -> None:
        """Make an empty set; `block_bytes` are the bytes of a block of each group."""
        self._block_size = layout.block_size
        self._layout = layout
        self._pool = pool
        self._pending = pending
        self._copies = copies
        self._table = table
        self._groups: list[_WindowGroup] = []
        first = layout.groups[0].num_columns  # each column of the group without a window has a table
        for number, (window, _, _) in enumerate(layout.groups):
            if window is not None:
                counts = count_blocks_for_hit(window, self._block_size), count_kept_blocks(window, self._block_size)
                self._groups.append(_WindowGroup(number, window, *counts, block_bytes[number], first + number - 1))

    @property
    def rewind(self) -> int | None:
        """How many of its latest tokens a sequence can drop; None: any number."""
        return min((g.num_kept * self._block_size - g.window + 1 for g in self._groups), default=None)

    # ---------------------------------------------------------------- prefixes
    def limit_prefix(self, hashes: Sequence[BlockHash], blocks: Sequence[int | None], num_blocks: int) -> int:
        """Return the most blocks, up to `num_blocks`, after which a sequence with these hashes can go on.

        The windowed blocks before that position are in the cache, or are computed by another sequence together with the
        sequence's block there, which is in `blocks`.
        """

        def can_be_had(group: _WindowGroup, i: int) -> bool:
            block = blocks[i] if i < len(blocks) else None
            return self._find(group, hashes[i]) is not None or (block is not None and block in self._pending)

        return self._limit(num_blocks, can_be_had)

    def limit_length(self, sequence: PagedState, num_blocks: int) -> int:
        """Return the most blocks, up to `num_blocks`, after which a sequence can go on with blocks that it can take."""

        def can_be_had(group: _WindowGroup, i: int) -> bool:
            return sequence.blocks[i] in self._pending or self._find_own(group, sequence, i) is not None

        return self._limit(num_blocks, can_be_had)

    def _limit(self, num_blocks: int, can_be_had: Callable[[_WindowGroup, int], bool]) -> int:
        while True:
            before = num_blocks
            for group in self._groups:
                i = num_blocks - 1
                while i >= max(0, num_blocks - group.num_for_hit):
                    if not can_be_had(group, i):
                        num_blocks = i
                    i -= 1
            if num_blocks == before:
                return num_blocks

    def _find_own(self, group: _WindowGroup, sequence: PagedState, i: int) -> int | None:
        """Return the sequence's i-th block in a group: one that it holds, or a cached one with the same contents."""
        block = sequence.windowed[group.number - 1].get(i)
        block_hash = sequence.block_hashes[i] if block is None and i < len(sequence.block_hashes) else None
        return block if block_hash is None else self._find(group, block_hash)

    def _find(self, group: _WindowGroup, block_hash: BlockHash) -> int | None:
        return self._pool.find(block_hash._replace(group=group.number))

    def find_missing_hash(self, block_hash: BlockHash) -> BlockHash | None:
        """Return the hash of a windowed block, at the position of a block, that is not cached; None if all are."""
        hashes = (block_hash._replace(group=group.number) for group in self._groups)
        return next((each for each in hashes if self._pool.find(each) is None), None)

    def list_before(self, hashes: Sequence[BlockHash], num_blocks: int) -> list[int]:
        """Return the cached blocks from which a sequence of `num_blocks` blocks can go on."""
        found = (
            self._find(group, each)
            for group in self._groups
            for each in hashes[max(0, num_blocks - group.num_for_hit) : num_blocks]
        )
        return [block for block in found if block is not None]

    def take(self, sequence: PagedState, length: int) -> bool:
        """Add references to the cached blocks that the sequence's token at position `length` needs.

        Return False if one of them is missing that no other sequence computes.
        """
        for group, held in self._iter_held(sequence):
            for i in range(self._first_needed(group, length), -(-length // self._block_size)):
                if i in held or sequence.blocks[i] in self._pending:
                    continue
                block = self._find_own(group, sequence, i)
                if block is None:
                    return False
                self._pool.incref(block)
                self._put(group, sequence, i, block)
        return True

    # ---------------------------------------------------------------- a sequence's blocks
    def _iter_held(self, sequence: PagedState) -> Iterator[tuple[_WindowGroup, dict[int, int]]]:
        return zip(self._groups, sequence.windowed, strict=True)

    def _first_needed(self, group: _WindowGroup, length: int) -> int:
        """Return the index of the first block that the token at position `length` sees."""
        return max(0, length - group.window + 1) // self._block_size

    def _put(self, group: _WindowGroup, sequence: PagedState, i: int, block: int) -> None:
        """Make a block the sequence's i-th one in a group."""
        sequence.windowed[group.number - 1][i] = block
        self._table.write_blocks(sequence.index, i, self._pool.columns(block), group.table)

    def count_peak_bytes(self, sequence: PagedState, num_tokens: int, longest_row: int) -> int:
        """Return an upper bound of the bytes for the rest of a new sequence's `num_tokens` tokens."""
        rest = -(-num_tokens // self._block_size) - sequence.length // self._block_size
        return sum(
            group.block_bytes
            * min(rest, self._layout.count_blocks(self._layout.groups[group.number], num_tokens, longest_row))
            for group in self._groups
        )

    def count_missing_bytes(self, sequence: PagedState, end: int) -> int:
        """Return the bytes of the blocks that are missing for the sequence's tokens up to position `end`."""
        return sum(group.block_bytes for group, _ in self._iter_missing(sequence, end))

    def allocate(self, sequence: PagedState, end: int) -> bool:
        """Allocate the missing blocks for a sequence's tokens up to position `end`; return False if they do not fit."""
        for group, i in list(self._iter_missing(sequence, end)):
            block = self._pool.allocate(group.number)
            if block is None:
                return False
            self._put(group, sequence, i, block)
        return True

    def _iter_missing(self, sequence: PagedState, end: int) -> Iterator[tuple[_WindowGroup, int]]:
        for group, held in self._iter_held(sequence):
            for i in range(sequence.length // self._block_size, -(-end // self._block_size)):
                if i not in held:
                    yield group, i

    def make_writable(self, sequence: PagedState, end: int) -> bool:
        """Make the sequence's blocks up to position `end` unshared and without a hash; False if memory is missing.

        Blocks that others wait for are shared with them already while they are written.
        """
        for i in range(sequence.length // self._block_size, -(-end // self._block_size)):
            if i < len(sequence.blocks) and sequence.blocks[i] in self._pending:
                continue
            for group, held in self._iter_held(sequence):
                if i not in held:
                    continue
                block = self._copies.make_writable(held[i])
                if block is None:
                    return False
                if block != held[i]:
                    self._put(group, sequence, i, block)
        return True

    # ---------------------------------------------------------------- other sequences
    def take_from_owners(self, sequence: PagedState) -> None:
        """Share the blocks before the sequence's next token that other sequences compute in the same step."""
        for i in range(
            min(self._first_needed(group, sequence.length) for group in self._groups),
            sequence.length // self._block_size,
        ):
            owner = self._pending.owner(sequence.blocks[i])
            if owner is not None and owner is not sequence:
                self._share(owner, sequence, i)

    def _share(self, owner: PagedState, sequence: PagedState, i: int) -> None:
        """Make the sequence use its owner's blocks at a position, if the sequence's next token needs them."""
        for group, held in self._iter_held(sequence):
            block, before = owner.windowed[group.number - 1].get(i), held.get(i)
            if block is None or block == before or i < self._first_needed(group, sequence.length):
                continue
            self._pool.incref(block)
            self._put(group, sequence, i, block)
            if before is not None:
                self._pool.decref(before)

    def fork(self, sequence: PagedState, child: PagedState) -> None:
        """Share the blocks of a sequence's committed tokens with its fork."""
        for group, held in self._iter_held(sequence):
            for i, block in held.items():
                if i * self._block_size < sequence.length:
                    self._pool.incref(block)
                    self._put(group, child, i, block)

    # ---------------------------------------------------------------- steps
    def commit_block(
        self, sequence: PagedState, i: int, block_hash: BlockHash | None, waiting: Sequence[PagedState]
    ) -> None:
        """Give hashes to a sequence's i-th blocks, which are computed now, and share them with those that wait."""
        for group, held in self._iter_held(sequence):
            if block_hash is not None and not self._pool.has_hash(held[i]) and self._find(group, block_hash) is None:
                self._pool.publish(block_hash._replace(group=group.number), held[i])
        for other in waiting:
            self._share(sequence, other, i)

    def drop_passed(self, sequence: PagedState) -> None:
        """Drop the blocks that the windows have passed.

        They are evicted before all others, but for those before the position where other texts branch off, which are
        kept as long as the sequence's other blocks.
        """
        for group, held in self._iter_held(sequence):
            first = sequence.length // self._block_size - group.num_kept
            for i in [i for i in held if i < first]:
                at_branch = sequence.branch - group.num_for_hit <= i < sequence.branch
                self._pool.decref(held.pop(i), priority=sequence.priority if at_branch else PASSED, ttl=sequence.ttl)

    def release(self, sequence: PagedState, first: int = 0) -> None:
        """Drop the sequence's references to its blocks from a position on."""
        for held in sequence.windowed:
            for i in sorted((i for i in held if i >= first), reverse=True):
                block = held.pop(i)
                self._copies.cancel(block)
                self._pool.decref(block, priority=sequence.priority, ttl=sequence.ttl)

    def iter_known(self, sequence: PagedState, end: int) -> Iterator[tuple[int, int]]:
        """Yield (position, block) of a sequence's computed blocks before position `end`, and of those it dropped."""
        for group in self._groups:
            for i in (i for i in range(end) if sequence.blocks[i] not in self._pending):
                if (block := self._find_own(group, sequence, i)) is not None:
                    yield i, block

    def check_integrity(self, sequence: PagedState) -> None:
        for group, held in self._iter_held(sequence):
            assert all(self._pool.group(block) == group.number for block in held.values())
            for i in range(self._first_needed(group, sequence.length), -(-sequence.length // self._block_size)):
                assert i in held or sequence.blocks[i] in self._pending, "a block that the next token needs is missing"
