"""How blocks of tokens are hashed and named: what caches, and processes that route requests to them, have to agree on.

A block's hash covers all tokens up to its end; its name, 32 bits, covers the salt of its sequences as well. Names are
for choosing between caches only: what a cache finds depends on hashes. Needs neither torch nor numpy.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

NAME_TYPE = "I"  # array's type code of block names


def hash_root(scope: str) -> bytes:
    """Return the hash before a sequence's first block; `scope` names what keys and values depend on besides tokens."""
    return hashlib.sha256(scope.encode()).digest()


def hash_block(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the hash of a block of `tokens`, none of which is negative, after the block with the hash `parent`.

    sha256, not Python's hash(), which can collide (GHSA-rm76-4mrf-v9r8).
    """
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


def name_block(block_hash: bytes, salt: Iterable[object]) -> int:
    """Return a block's name, a number of 32 bits; `salt` has the fields of the sequence's Salt."""
    digest = hashlib.blake2b(block_hash + "\0".join(map(str, salt)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")


class BlockNamer:
    """The names of a growing sequence's full blocks, in order."""

    def __init__(self, root: bytes, block_size: int, salt: Iterable[object]) -> None:
        self.names: list[int] = []
        self._block_size = block_size
        self._salt = tuple(salt)
        self._last_hash = root  # of the last full block
        self._rest: list[int] = []  # the tokens after the last full block

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens, none of which is negative, and the names of the blocks that they complete."""
        self._rest += tokens
        size = self._block_size
        num_full = len(self._rest) // size
        for i in range(num_full):
            self._last_hash = hash_block(self._last_hash, self._rest[i * size : (i + 1) * size])
            self.names.append(name_block(self._last_hash, self._salt))
        del self._rest[: num_full * size]
