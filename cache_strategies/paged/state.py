"""What a paged cache knows of a sequence: its tokens, the hashes of the blocks that they fill, and its blocks.

Knows how blocks are hashed; not which other sequences share a block, or whether the prefix index has its hash.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cache_strategies.block_hashes import BlockHash, BlockHasher
from cache_strategies.block_table import TableSequence
from cache_strategies.types import Salt


class PagedState(TableSequence):
    """A sequence with its token ids: `tokens` are the committed tokens and, during prefill, the rest of the prompt.

    `blocks` are the blocks of the layers without a window.
    """

    def __init__(
        self, index: int, blocks: list[int], length: int, tokens: list[int], salt: Salt | None, num_windows: int
    ) -> None:
        super().__init__(index, blocks, length)
        # By group of layers with a window: the blocks that the sequence holds, by their position in the text
        self.windowed: Sequence[dict[int, int]] = [{} for _ in range(num_windows)]
        self.branch = 0  # number of leading blocks that open() found cached, whether or not they could be used
        self.tokens = tokens
        self.salt = salt  # None: blocks that the sequence fills from now on get no hash, so they are not shared
        self.block_hashes: list[BlockHash | None] = []  # hashes of the full blocks; None for one not to be shared
        self.priority = 0  # eviction priority of the blocks after close(): blocks of higher priority stay longer
        self.ttl = math.inf  # seconds after close() from which the blocks are evicted before all others

    def get_block_hash(self, i: int, hasher: BlockHasher) -> BlockHash | None:
        """Return the hash of the i-th block, which must be full; None if the block must not be shared."""
        if self.salt is None:
            return None
        while len(self.block_hashes) <= i:
            parent = self.block_hashes[-1] if self.block_hashes else hasher.root_hash(self.salt)
            start = len(self.block_hashes) * hasher.block_size
            tokens = self.tokens[start : start + hasher.block_size]
            self.block_hashes.append(None if parent is None else hasher.hash_block_tokens(parent, tokens))
        return self.block_hashes[i]
