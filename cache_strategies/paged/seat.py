"""A seat that knows its tokens, and with them the hashes of the blocks that they fill.

Knows how blocks are hashed; neither which other seats hold a block, nor whether it is found under its hash.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cache_strategies.base import Salt
from cache_strategies.block_table import TableSeat
from cache_strategies.paged.prefix_index import BlockHash, BlockHasher


class PagedSeat(TableSeat):
    """`tokens` are the committed ones, and while the prompt is computed the rest of it too."""

    __slots__ = ("block_hashes", "priority", "salt", "tokens", "ttl")

    def __init__(self, index: int, blocks: list[int], length: int, tokens: list[int], salt: Salt | None) -> None:
        super().__init__(index, blocks, length)
        self.tokens = tokens
        self.salt = salt  # None: what it fills from now on is not to be found
        self.block_hashes: list[BlockHash | None] = []  # of the full blocks of `tokens`; None: not to be shared
        self.priority = 0  # of what it leaves behind
        self.ttl = math.inf  # seconds; of the same

    def get_block_hash(self, i: int, hasher: BlockHasher) -> BlockHash | None:
        """Return the hash of the i-th block, a full one, computed once from its parent's; None: not to be shared."""
        if self.salt is None:
            return None
        while len(self.block_hashes) <= i:
            parent = self.block_hashes[-1] if self.block_hashes else hasher.root_hash(self.salt)
            start = len(self.block_hashes) * hasher.block_size
            tokens = self.tokens[start : start + hasher.block_size]
            self.block_hashes.append(None if parent is None else hasher.hash_block_tokens(parent, tokens))
        return self.block_hashes[i]

    def commit_tokens(self, ids: Sequence[int]) -> None:
        """Commit tokens, in place of what stood there of the prompt."""
        before, self.length = self.length, self.length + len(ids)
        self.tokens[before : self.length] = ids

    def truncate(self, length: int, full_blocks: int) -> None:
        """Drop the tokens from `length` on, and all hashes but those of the blocks that stay full."""
        del self.tokens[length:], self.block_hashes[full_blocks:]
        self.length = length
        self.cached = min(self.cached, length)

    def fork(self, index: int, blocks: list[int], full_blocks: int) -> PagedSeat:
        """Return a seat with the same committed tokens."""
        child = PagedSeat(index, blocks, self.length, self.tokens[: self.length], self.salt)
        child.block_hashes = self.block_hashes[:full_blocks]
        child.cached, child.miss, child.priority, child.ttl = self.cached, self.miss, self.priority, self.ttl
        return child
