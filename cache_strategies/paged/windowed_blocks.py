"""The blocks of layers with a window: which of them each seat holds, takes over from others, and drops.

A seat holds only the blocks in the window of its next tokens. What the window has passed leaves the seat when a step is
committed; such blocks can be found by their hash until they are evicted, which they are before all others. The blocks
of layers without a window, `PagedSeat.blocks`, say which seat computes what: a position's windowed blocks are computed
together with them. Does not know layers, but groups of layers (layer_groups.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from cache_strategies.block_table import BlockTable
from cache_strategies.paged.block_copies import BlockCopies
from cache_strategies.paged.block_pool import BlockPool
from cache_strategies.paged.layer_groups import LayerLayout, count_blocks_for_hit, count_kept_blocks
from cache_strategies.paged.prefix_index import BlockHash, PendingBlocks
from cache_strategies.paged.seat import PagedSeat

PASSED = -1  # eviction priority of blocks that a window has passed; requests have priorities from 0 on


class _WindowGroup(NamedTuple):
    """A group of layers with a window."""

    number: int
    window: int
    num_for_hit: int  # how many blocks before a position must be there if a sequence is to go on from there
    num_kept: int  # how many full blocks a seat keeps
    block_bytes: int
    table: int  # number of the group's table in the block table


class WindowedBlocks:
    """The windowed blocks of all seats of a cache. In PagedSeat.windowed they are listed by group and position."""

    def __init__(
        self,
        layout: LayerLayout,
        pool: BlockPool,
        pending: PendingBlocks[PagedSeat],
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
        """How many of its latest tokens a seat can drop; None: any number."""
        return min((g.num_kept * self._block_size - g.window + 1 for g in self._groups), default=None)

    # ---------------------------------------------------------------- prefixes
    def limit_prefix(self, hashes: Sequence[BlockHash], blocks: Sequence[int | None], num_blocks: int) -> int:
        """Return the most blocks, up to `num_blocks`, after which a sequence with these hashes can go on.

        The windowed blocks before that position are in the cache, or are computed by another seat together with the
        sequence's block there, which is in `blocks`.
        """

        def can_be_had(group: _WindowGroup, i: int) -> bool:
            block = blocks[i] if i < len(blocks) else None
            return self._find(group, hashes[i]) is not None or (block is not None and block in self._pending)

        return self._limit(num_blocks, can_be_had)

    def limit_length(self, seat: PagedSeat, num_blocks: int) -> int:
        """Return the most blocks, up to `num_blocks`, after which a seat can go on with blocks that it can take."""

        def can_be_had(group: _WindowGroup, i: int) -> bool:
            return seat.blocks[i] in self._pending or self._find_own(group, seat, i) is not None

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

    def _find_own(self, group: _WindowGroup, seat: PagedSeat, i: int) -> int | None:
        """Return the seat's i-th block in a group: one that it holds, or a cached one with the same contents."""
        block = seat.windowed[group.number - 1].get(i)
        block_hash = seat.block_hashes[i] if block is None and i < len(seat.block_hashes) else None
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

    def take(self, seat: PagedSeat, length: int) -> bool:
        """Add references to the cached blocks that the seat's token at position `length` needs.

        Return False if one of them is missing that no other seat computes.
        """
        for group, held in self._iter_held(seat):
            for i in range(self._first_needed(group, length), -(-length // self._block_size)):
                if i in held or seat.blocks[i] in self._pending:
                    continue
                block = self._find_own(group, seat, i)
                if block is None:
                    return False
                self._pool.incref(block)
                self._put(group, seat, i, block)
        return True

    # ---------------------------------------------------------------- a seat's blocks
    def _iter_held(self, seat: PagedSeat) -> Iterator[tuple[_WindowGroup, dict[int, int]]]:
        return zip(self._groups, seat.windowed, strict=True)

    def _first_needed(self, group: _WindowGroup, length: int) -> int:
        """Return the index of the first block that the token at position `length` sees."""
        return max(0, length - group.window + 1) // self._block_size

    def _put(self, group: _WindowGroup, seat: PagedSeat, i: int, block: int) -> None:
        """Make a block the seat's i-th one in a group."""
        seat.windowed[group.number - 1][i] = block
        self._table.write_blocks(seat.index, i, self._pool.columns(block), group.table)

    def count_peak_bytes(self, seat: PagedSeat, num_tokens: int, longest_row: int) -> int:
        """Return an upper bound of the bytes for the rest of a new seat's `num_tokens` tokens."""
        rest = -(-num_tokens // self._block_size) - seat.length // self._block_size
        return sum(
            group.block_bytes
            * min(rest, self._layout.count_blocks(self._layout.groups[group.number], num_tokens, longest_row))
            for group in self._groups
        )

    def count_missing_bytes(self, seat: PagedSeat, end: int) -> int:
        """Return the bytes of the blocks that are missing for the seat's tokens up to position `end`."""
        return sum(group.block_bytes for group, _ in self._iter_missing(seat, end))

    def allocate(self, seat: PagedSeat, end: int) -> bool:
        """Allocate the missing blocks for the seat's tokens up to position `end`; return False if they do not fit."""
        for group, i in list(self._iter_missing(seat, end)):
            block = self._pool.allocate(group.number)
            if block is None:
                return False
            self._put(group, seat, i, block)
        return True

    def _iter_missing(self, seat: PagedSeat, end: int) -> Iterator[tuple[_WindowGroup, int]]:
        for group, held in self._iter_held(seat):
            for i in range(seat.length // self._block_size, -(-end // self._block_size)):
                if i not in held:
                    yield group, i

    def make_writable(self, seat: PagedSeat, end: int) -> bool:
        """Make the seat's blocks up to position `end` unshared and without a hash; False if memory is missing.

        Blocks that others wait for are shared with them already while they are written.
        """
        for i in range(seat.length // self._block_size, -(-end // self._block_size)):
            if i < len(seat.blocks) and seat.blocks[i] in self._pending:
                continue
            for group, held in self._iter_held(seat):
                if i not in held:
                    continue
                block = self._copies.make_writable(held[i])
                if block is None:
                    return False
                if block != held[i]:
                    self._put(group, seat, i, block)
        return True

    # ---------------------------------------------------------------- other seats
    def take_from_owners(self, seat: PagedSeat) -> None:
        """Share the blocks before the seat's next token that other seats compute in the same step."""
        for i in range(
            min(self._first_needed(group, seat.length) for group in self._groups), seat.length // self._block_size
        ):
            owner = self._pending.owner(seat.blocks[i])
            if owner is not None and owner is not seat:
                self._share(owner, seat, i)

    def _share(self, owner: PagedSeat, seat: PagedSeat, i: int) -> None:
        """Make the seat use its owner's blocks at a position, if the seat's next token needs them."""
        for group, held in self._iter_held(seat):
            block, before = owner.windowed[group.number - 1].get(i), held.get(i)
            if block is None or block == before or i < self._first_needed(group, seat.length):
                continue
            self._pool.incref(block)
            self._put(group, seat, i, block)
            if before is not None:
                self._pool.decref(before)

    def fork(self, seat: PagedSeat, child: PagedSeat) -> None:
        """Share the blocks of a seat's committed tokens with its fork."""
        for group, held in self._iter_held(seat):
            for i, block in held.items():
                if i * self._block_size < seat.length:
                    self._pool.incref(block)
                    self._put(group, child, i, block)

    # ---------------------------------------------------------------- steps
    def commit_block(self, seat: PagedSeat, i: int, block_hash: BlockHash | None, waiting: Sequence[PagedSeat]) -> None:
        """Give hashes to the seat's i-th blocks, which are computed now, and share them with the seats that wait."""
        for group, held in self._iter_held(seat):
            if block_hash is not None and not self._pool.has_hash(held[i]) and self._find(group, block_hash) is None:
                self._pool.publish(block_hash._replace(group=group.number), held[i])
        for other in waiting:
            self._share(seat, other, i)

    def drop_passed(self, seat: PagedSeat) -> None:
        """Drop the blocks that the windows have passed.

        They are evicted before all others, but for those before the position where other texts branch off, which are
        kept as long as the seat's other blocks.
        """
        for group, held in self._iter_held(seat):
            first = seat.length // self._block_size - group.num_kept
            for i in [i for i in held if i < first]:
                at_branch = seat.branch - group.num_for_hit <= i < seat.branch
                self._pool.decref(held.pop(i), priority=seat.priority if at_branch else PASSED, ttl=seat.ttl)

    def release(self, seat: PagedSeat, first: int = 0) -> None:
        """Drop the seat's references to its blocks from a position on."""
        for held in seat.windowed:
            for i in sorted((i for i in held if i >= first), reverse=True):
                block = held.pop(i)
                self._copies.cancel(block)
                self._pool.decref(block, priority=seat.priority, ttl=seat.ttl)

    def iter_known(self, seat: PagedSeat, end: int) -> Iterator[tuple[int, int]]:
        """Yield (position, block) of the seat's computed blocks before position `end`, and of those it has dropped."""
        for group in self._groups:
            for i in (i for i in range(end) if seat.blocks[i] not in self._pending):
                if (block := self._find_own(group, seat, i)) is not None:
                    yield i, block

    def check_integrity(self, seat: PagedSeat) -> None:
        for group, held in self._iter_held(seat):
            assert all(self._pool.group(block) == group.number for block in held.values())
            for i in range(self._first_needed(group, seat.length), -(-seat.length // self._block_size)):
                assert i in held or seat.blocks[i] in self._pending, "a block that the next token needs is missing"
