"""The hashes by which blocks of tokens are found: each covers all tokens up to a block's end, and its text's salt.

Knows neither memory nor what is kept of a block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cache_strategies.types import Salt
from config.block_hashes import hash_block, hash_root

STATES = -1  # in place of a group: the recurrent states after the block
Prefix = tuple[bytes, Salt]  # the `content` and the salt of a BlockHash


class BlockHash(NamedTuple):
    """A block's hash, which covers all tokens up to its end, the salt of the sequences that may share it, its group."""

    content: bytes  # config.block_hashes.hash_block of the block before it and the tokens
    salt: Salt
    group: int = 0  # number of the group of layers whose keys and values are in the block, or STATES
    # Both follow from `content`, so that hashes with equal contents are equal
    parent: bytes = b""  # the content of the block before it
    depth: int = -1  # number of blocks before it; -1: no block, but the parent of first blocks

    @property
    def prefix(self) -> Prefix:
        """The prefix that ends with the block."""
        return self[:2]

    @property
    def parent_prefix(self) -> Prefix:
        """The prefix that ends with the block before it."""
        return self.parent, self.salt

    @property
    def prefix_id(self) -> str:
        """A short name of the prefix: 32 hexadecimal digits."""
        return hashlib.blake2b(self.content + repr(self.salt).encode(), digest_size=16).hexdigest()


class BlockHasher:
    """Computes block hashes, which cover all tokens up to a block's end. Equal hashes mean equal keys and values."""

    def __init__(self, block_size: int, scope: str) -> None:
        """Make a hasher; `scope` names what keys and values depend on besides tokens: instance, dtype and model."""
        self.block_size = block_size
        self.root = hash_root(scope)

    def root_hash(self, salt: Salt) -> BlockHash:
        """Return the parent hash of a sequence's first block; it differs for each salt."""
        return BlockHash(self.root, salt)

    def hash_block_tokens(self, parent: BlockHash, tokens: Sequence[int]) -> BlockHash | None:
        """Return the hash of a block of `tokens`, given the hash of the block before it, `parent`.

        None if one of the tokens is an embedding without a token id (a negative id).
        """
        if min(tokens) < 0:
            return None
        content = hash_block(parent.content, tokens)
        return BlockHash(content, parent.salt, 0, parent.content, parent.depth + 1)

    def hash_blocks(self, tokens: Sequence[int], salt: Salt, parent: BlockHash | None = None) -> Iterator[BlockHash]:
        """Yield the hashes of a sequence's full blocks, up to the first block with an embedding; computed lazily.

        `parent` is the hash of the block before the tokens; None: they begin the text.
        """
        block_hash = self.root_hash(salt) if parent is None else parent
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            found = self.hash_block_tokens(block_hash, tokens[end - self.block_size : end])
            if found is None:
                return
            yield (block_hash := found)
