"""A seat that knows its tokens, and with them the names of the blocks that they fill.

Knows the rule by which blocks are named; neither who else holds a block, nor whether it is found under its name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cache_strategies.block_table import TableSeat
from cache_strategies.paged.prefix_index import BlockHash, BlockHasher


class PagedSeat(TableSeat):
    """`tokens` are the committed ones, and while the prompt is computed the rest of it too."""

    __slots__ = ("names", "priority", "salt", "tokens", "ttl")

    def __init__(self, index: int, blocks: list[int], length: int, tokens: list[int], salt: str | None) -> None:
        super().__init__(index, blocks, length)
        self.tokens = tokens
        self.salt = salt  # None: nobody shall find what it fills from now on
        self.names: list[BlockHash | None] = []  # of the full blocks of `tokens`; None: not to be shared
        self.priority = 0  # of what it leaves behind
        self.ttl = math.inf  # seconds; of the same

    def name(self, i: int, prefix: BlockHasher) -> BlockHash | None:
        """Of its i-th block, which is full; computed once, from its parent's."""
        if self.salt is None:
            return None
        while len(self.names) <= i:
            parent = self.names[-1] if self.names else prefix.root(self.salt)
            start = len(self.names) * prefix.block_size
            tokens = self.tokens[start : start + prefix.block_size]
            self.names.append(None if parent is None else prefix.child(parent, tokens))
        return self.names[i]

    def enter(self, ids: Sequence[int]) -> None:
        """These are committed, in place of what stood there of the prompt."""
        before, self.length = self.length, self.length + len(ids)
        self.tokens[before : self.length] = ids

    def cut(self, length: int, full_blocks: int) -> None:
        """Forgets the tokens from `length` on, and all names but those of the blocks that stay full."""
        del self.tokens[length:], self.names[full_blocks:]
        self.length = length
        self.cached = min(self.cached, length)

    def child(self, index: int, blocks: list[int], full_blocks: int) -> PagedSeat:
        """A seat with the same committed tokens."""
        child = PagedSeat(index, blocks, self.length, self.tokens[: self.length], self.salt)
        child.names = self.names[:full_blocks]
        child.cached, child.miss, child.priority, child.ttl = self.cached, self.miss, self.priority, self.ttl
        return child
