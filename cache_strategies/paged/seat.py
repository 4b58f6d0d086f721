"""The seat of a paged cache: a sequence's tokens, and the hashes of the blocks that they fill.

Knows how blocks are hashed; does not know which other seats share a block, or whether the prefix index has its hash.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cache_strategies.block_table import TableSeat
from cache_strategies.paged.prefix_index import BlockHash, BlockHasher
from cache_strategies.types import Salt


class PagedSeat(TableSeat):
    """A seat with its token ids: `tokens` are the committed tokens and, during prefill, the rest of the prompt.

    `blocks` are the blocks of the layers without a window.
    """

    __slots__ = ("block_hashes", "branch", "priority", "salt", "tokens", "ttl", "windowed")

    def __init__(
        self, index: int, blocks: list[int], length: int, tokens: list[int], salt: Salt | None, num_windows: int = 0
    ) -> None:
        super().__init__(index, blocks, length)
        # by group of layers with a window: the blocks that the seat holds, by their position in the text
        self.windowed: Sequence[dict[int, int]] = [{} for _ in range(num_windows)]
        self.branch = 0  # number of leading blocks that open() found cached, whether or not they could be used
        self.tokens = tokens
        self.salt = salt  # None: blocks that the seat fills from now on get no hash, so they are not shared
        self.block_hashes: list[BlockHash | None] = []  # hashes of the full blocks; None for one not to be shared
        self.priority = 0  # eviction priority of the blocks after close(): blocks of higher priority stay longer
        self.ttl = math.inf  # seconds after close() from which the blocks are evicted before all others

    def get_block_hash(self, i: int, hasher: BlockHasher) -> BlockHash | None:
        """Return the hash of the seat's i-th block, which must be full; None if the block must not be shared."""
        if self.salt is None:
            return None
        while len(self.block_hashes) <= i:
            parent = self.block_hashes[-1] if self.block_hashes else hasher.root_hash(self.salt)
            start = len(self.block_hashes) * hasher.block_size
            tokens = self.tokens[start : start + hasher.block_size]
            self.block_hashes.append(None if parent is None else hasher.hash_block_tokens(parent, tokens))
        return self.block_hashes[i]

    def commit_tokens(self, ids: Sequence[int]) -> None:
        """Commit the token ids `ids` at the end of the seat; they replace prompt tokens at the same positions."""
        before, self.length = self.length, self.length + len(ids)
        self.tokens[before : self.length] = ids

    def truncate(self, length: int, full_blocks: int) -> None:
        """Drop the tokens from position `length` on, and the hashes of all but the first `full_blocks` blocks."""
        del self.tokens[length:], self.block_hashes[full_blocks:]
        self.length = length
        self.cached = min(self.cached, length)

    def fork(self, index: int, blocks: list[int], full_blocks: int) -> PagedSeat:
        """Return a new seat over `blocks` with the same committed tokens; `index` is its row in the block table."""
        child = PagedSeat(index, blocks, self.length, self.tokens[: self.length], self.salt, len(self.windowed))
        child.branch = self.branch
        child.block_hashes = self.block_hashes[:full_blocks]
        child.cached, child.miss, child.priority, child.ttl = self.cached, self.miss, self.priority, self.ttl
        return child
