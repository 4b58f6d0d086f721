"""Finds blocks by their tokens: the index from hash to block, and blocks yet to be computed.

A prefix is all tokens up to the end of a block, with their salt. In each group of layers it ends with another block.

Knows neither memory nor reference counts, nor what a sequence contains.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Generic

from cache_strategies.base import S
from cache_strategies.block_hashes import BlockHash, Prefix
from cache_strategies.types import Miss, Salt
from config.block_hashes import name_block

MAX_EVICTED_HASHES = 1 << 16  # maximum number of evicted blocks whose hashes are kept, to explain later misses


class PrefixIndex:
    """Maps block hashes to blocks and back, counts hits, and remembers the hashes of evicted blocks."""

    def __init__(self, tree_group: int = 0) -> None:
        """Make an empty index; the blocks of `tree_group` form the tree of prefixes, in which hits are counted."""
        self.tree_group = tree_group
        # Number of hits that ended with each prefix. Those that went on to a block that is gone count with the block
        # before it, so that the hits of a prefix are the sum of these numbers in its subtree.
        self._hits: dict[Prefix, int] = {}
        self._block_by_hash: dict[BlockHash, int] = {}
        self._hash_by_block: dict[int, BlockHash] = {}
        self._names: dict[int, int] = {}  # by block of the tree's group: config.block_hashes.name_block
        self._salts_by_content: dict[tuple[bytes, int], set[Salt]] = {}  # by content hash and group: salts of blocks
        self._evicted: OrderedDict[BlockHash, None] = OrderedDict()  # oldest first

    def find(self, block_hash: BlockHash) -> int | None:
        return self._block_by_hash.get(block_hash)

    def find_hash(self, block: int) -> BlockHash | None:
        return self._hash_by_block.get(block)

    def publish(self, block_hash: BlockHash, block: int) -> None:
        assert block_hash not in self._block_by_hash
        assert block not in self._hash_by_block
        self._block_by_hash[block_hash], self._hash_by_block[block] = block, block_hash
        if block_hash.group == self.tree_group:
            self._names[block] = name_block(block_hash.content, block_hash.salt)
        self._salts_by_content.setdefault((block_hash.content, block_hash.group), set()).add(block_hash.salt)
        self._evicted.pop(block_hash, None)

    def unpublish(self, block: int) -> BlockHash | None:
        """Remove a block's hash and return it; None if the block has no hash."""
        block_hash = self._hash_by_block.pop(block, None)
        if block_hash is not None:
            del self._block_by_hash[block_hash]
            self._names.pop(block, None)
            key = block_hash.content, block_hash.group
            salts = self._salts_by_content[key]
            salts.remove(block_hash.salt)
            if not salts:
                del self._salts_by_content[key]
            if block_hash.group == self.tree_group and (hits := self._hits.pop(block_hash.prefix, 0)):
                self._add_hits(block_hash.parent_prefix, hits)
        return block_hash

    def evict(self, block_hash: BlockHash) -> int:
        """Remove a hash from the index, remember that its block was evicted, and return the block."""
        block = self._block_by_hash[block_hash]
        self.unpublish(block)
        self._evicted[block_hash] = None
        if len(self._evicted) > MAX_EVICTED_HASHES:
            self._evicted.popitem(last=False)
        return block

    # ---------------------------------------------------------------- hits
    def record_hit(self, prefix: Prefix) -> None:
        """Count a sequence that found all blocks of a prefix."""
        self._add_hits(prefix, 1)

    def count_hits(self, prefix: Prefix) -> int:
        """Return the number of hits that ended with a prefix, and are not counted with a longer one."""
        return self._hits.get(prefix, 0)

    def _add_hits(self, prefix: Prefix, hits: int) -> None:
        """Count hits with a prefix, if its block is in the tree."""
        content, salt = prefix
        if salt in self._salts_by_content.get((content, self.tree_group), ()):
            self._hits[prefix] = self._hits.get(prefix, 0) + hits

    # ---------------------------------------------------------------- reports
    def find_miss_reason(self, block_hash: BlockHash) -> Miss:
        """Return why the index has no block for a hash: evicted, cached under another salt, or never cached."""
        if block_hash in self._evicted:
            return "evicted"
        salts = self._salts_by_content.get((block_hash.content, block_hash.group), ())
        return "salt" if any(map(block_hash.salt.differs_only_in_cache_salt, salts)) else "cold"

    def list_hashes(self) -> Sequence[BlockHash]:
        return list(self._block_by_hash)

    def list_tree(self) -> Mapping[BlockHash, int]:
        """Return the blocks of the group that forms the tree, by their hashes."""
        return {each: block for each, block in self._block_by_hash.items() if each.group == self.tree_group}

    def list_names(self) -> Collection[int]:
        """Return the names of the blocks of the group that forms the tree."""
        return self._names.values()

    def __contains__(self, block: int) -> bool:
        return block in self._hash_by_block

    def __len__(self) -> int:
        return len(self._hash_by_block)

    def check_integrity(self) -> None:
        assert {block: block_hash for block_hash, block in self._block_by_hash.items()} == self._hash_by_block
        assert sum(map(len, self._salts_by_content.values())) == len(self._block_by_hash)
        assert not self._evicted.keys() & self._block_by_hash.keys()
        tree = self.list_tree().items()
        assert self._names == {block: name_block(each.content, each.salt) for each, block in tree}
        assert self._hits.keys() <= {block_hash.prefix for block_hash in self.list_tree()}


class PendingBlocks(Generic[S]):
    """The blocks that can be found by hash but are not computed yet, each with a queue of sequences.

    The first sequence in the queue computes the block; the others wait for it. If the first one closes, the next takes
    over.
    """

    def __init__(self) -> None:
        self._queues: dict[int, list[S]] = {}

    def add(self, block: int, sequence: S) -> None:
        self._queues[block] = [sequence]

    def add_waiter(self, block: int, sequence: S) -> None:
        """Add a sequence that waits for a block; do nothing if the block is already computed."""
        if block in self._queues:
            self._queues[block].append(sequence)

    def __contains__(self, block: int) -> bool:
        return block in self._queues

    def owner(self, block: int) -> S | None:
        queue = self._queues.get(block)
        return queue[0] if queue else None

    def is_awaited(self, block: int) -> bool:
        """Return whether another sequence than the one that computes a block waits for it."""
        return len(self._queues.get(block, ())) > 1

    def mark_computed(self, block: int) -> Sequence[S]:
        """Record that a block is computed; return the sequences that waited for it."""
        return self._queues.pop(block, [])[1:]

    def remove_sequence(self, block: int, sequence: S) -> S | None:
        """Remove a sequence from a block's queue; return the one that must compute the block instead of it, or None.

        None if the sequence was not the first in the queue or was the last one: then the block is no longer pending.
        """
        queue = self._queues.get(block)
        if not queue or sequence not in queue:
            return None
        owned = queue[0] is sequence
        queue.remove(sequence)
        if not queue:
            del self._queues[block]
            return None
        return queue[0] if owned else None

    def __len__(self) -> int:
        return len(self._queues)

    def items(self) -> Iterator[tuple[int, list[S]]]:
        return iter(self._queues.items())
