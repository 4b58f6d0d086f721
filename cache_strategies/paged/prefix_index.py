"""Which block holds which tokens: names of full blocks, and the blocks that are published but not computed yet.

Knows names and seats as opaque things; neither memory nor reference counts.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cache_strategies.base import Miss, Seat, tenant_of

GHOSTS = 1 << 16  # names of evicted blocks that are remembered, to tell those who miss them


class BlockHash(NamedTuple):
    """All that decides what is in a block, and who may see it."""

    content: bytes  # sha256 over parent, tokens, instance, dtype, model: Python's hash() collides (GHSA-rm76-4mrf-v9r8)
    salt: str


class BlockHasher:
    """Names blocks by all tokens up to their end, so that equal names mean equal contents."""

    def __init__(self, block_size: int, scope: str) -> None:
        """`scope`: whatever else decides the contents: instance, dtype, model."""
        self.block_size = block_size
        self._root = hashlib.sha256(scope.encode()).digest()

    def root(self, salt: str) -> BlockHash:
        """The name before the first block; another salt shares nothing."""
        return BlockHash(self._root, salt)

    def child(self, parent: BlockHash, tokens: Sequence[int]) -> BlockHash | None:
        """The name of the block after `parent`; None if it cannot be shared (it holds a nameless embedding)."""
        if min(tokens) < 0:
            return None
        return BlockHash(hashlib.sha256(parent.content + array("q", tokens).tobytes()).digest(), parent.salt)

    def of(self, tokens: Sequence[int], salt: str) -> Iterator[BlockHash]:
        """Names of the full blocks of a text, computed one by one."""
        name: BlockHash | None = self.root(salt)
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            assert name is not None
            name = self.child(name, tokens[end - self.block_size : end])
            if name is None:
                return
            yield name


class PrefixIndex:
    """Names to blocks and back."""

    def __init__(self) -> None:
        self._block: dict[BlockHash, int] = {}
        self._name: dict[int, BlockHash] = {}
        self._salts: dict[bytes, set[str]] = {}  # under which the same content is known
        self._evicted: OrderedDict[BlockHash, None] = OrderedDict()

    def find(self, name: BlockHash) -> int | None:
        return self._block.get(name)

    def name(self, block: int) -> BlockHash | None:
        return self._name.get(block)

    def publish(self, name: BlockHash, block: int) -> None:
        assert name not in self._block
        assert block not in self._name
        self._block[name], self._name[block] = block, name
        self._salts.setdefault(name.content, set()).add(name.salt)
        self._evicted.pop(name, None)

    def forget(self, block: int) -> BlockHash | None:
        """The block's contents are about to change, or go; the name it had."""
        name = self._name.pop(block, None)
        if name is not None:
            del self._block[name]
            salts = self._salts[name.content]
            salts.remove(name.salt)
            if not salts:
                del self._salts[name.content]
        return name

    def evict(self, name: BlockHash) -> int:
        """Forgets a block for want of room; which it was."""
        block = self._block[name]
        self.forget(block)
        self._evicted[name] = None
        if len(self._evicted) > GHOSTS:
            self._evicted.popitem(last=False)
        return block

    def why_missing(self, name: BlockHash) -> Miss:
        """What to tell whoever looked for a name that is not here."""
        if name in self._evicted:
            return "evicted"
        tenants = map(tenant_of, self._salts.get(name.content, ()))
        return "salt" if tenant_of(name.salt) in tenants else "cold"

    def names(self) -> Sequence[BlockHash]:
        return list(self._block)

    def __contains__(self, block: int) -> bool:
        return block in self._name

    def __len__(self) -> int:
        return len(self._name)

    def check_integrity(self) -> None:
        assert {block: name for name, block in self._block.items()} == self._name
        assert sum(map(len, self._salts.values())) == len(self._block)
        assert not self._evicted.keys() & self._block.keys()


class PendingBlocks:
    """Blocks somebody promised to compute: the first seat in line computes, the others wait and inherit the work."""

    def __init__(self) -> None:
        self._lines: dict[int, list[Seat]] = {}

    def promise(self, block: int, seat: Seat) -> None:
        self._lines[block] = [seat]

    def wait(self, block: int, seat: Seat) -> None:
        """No effect if the block is computed already."""
        if block in self._lines:
            self._lines[block].append(seat)

    def __contains__(self, block: int) -> bool:
        return block in self._lines

    def owner(self, block: int) -> Seat | None:
        line = self._lines.get(block)
        return line[0] if line else None

    def computed(self, block: int) -> None:
        self._lines.pop(block, None)

    def leave(self, block: int, seat: Seat) -> Seat | None:
        """`seat` lets go; returns the heir if there is one now. A block nobody is left for is no longer pending."""
        line = self._lines.get(block)
        if not line or seat not in line:
            return None
        owned = line[0] is seat
        line.remove(seat)
        if not line:
            del self._lines[block]
            return None
        return line[0] if owned else None

    def __len__(self) -> int:
        return len(self._lines)

    def items(self) -> Iterator[tuple[int, list[Seat]]]:
        return iter(self._lines.items())
