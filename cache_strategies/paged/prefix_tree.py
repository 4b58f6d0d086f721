"""The tree of a paged cache's prefixes, as it is at one moment. Changes nothing.

Knows which blocks follow which by their hashes, and merges blocks to nodes (`CachedPrefix`) as a radix tree does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import compress
from operator import attrgetter

from cache_strategies.block_hashes import BlockHash
from cache_strategies.paged.block_pool import BlockPool
from cache_strategies.paged.pins import Pins
from cache_strategies.types import CachedPrefix, Salt

NO_PARENT = -1


def find_prefix(hashes: Iterable[BlockHash], prefix_id: str) -> BlockHash | None:
    """Return the hash of the last block of a prefix, in any group; None if there is none."""
    return next((each for each in hashes if each.prefix_id == prefix_id), None)


def list_path(hashes: Iterable[BlockHash], last: BlockHash) -> list[BlockHash]:
    """Return the hashes, in group 0, of all blocks of a prefix.

    A block that is not cached any more gets an empty hash, which no block has.
    """
    by_prefix = {each.prefix: each for each in hashes}
    path = [BlockHash(b"", last.salt)] * (last.depth + 1)
    block_hash: BlockHash | None = last
    while block_hash is not None:
        path[block_hash.depth] = block_hash._replace(group=0)
        before = by_prefix.get(block_hash.parent_prefix)
        block_hash = before if before is not None and before.depth < block_hash.depth else None
    return path


def list_subtree(hashes: Iterable[BlockHash], tree: Iterable[BlockHash], top: BlockHash) -> list[BlockHash]:
    """Return the hashes, in all groups, of a prefix's last block and of those after it in `tree`; later blocks first.

    Blocks without memory of another group may close a gap that the tree has: what is after it has another root.
    """
    prefixes = {top.prefix}
    for each in sorted(tree, key=attrgetter("depth")):
        if each.parent_prefix in prefixes:
            prefixes.add(each.prefix)
    return sorted((each for each in hashes if each.prefix in prefixes), key=attrgetter("depth"), reverse=True)


class PrefixTree:
    """The blocks of the tree, numbered so that none comes before its parent. A node has the number of its last block.

    Has flat lists by block, as many small objects would cost more than what is computed.
    """

    def __init__(self, pool: BlockPool, pins: Pins, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        tree = sorted(pool.list_tree().items(), key=lambda item: item[0].depth)
        self._hashes = [block_hash for block_hash, _ in tree]
        numbers: dict[Salt, dict[bytes, int]] = {}
        for number, each in enumerate(self._hashes):
            numbers.setdefault(each.salt, {})[each.content] = number
        # A hash that came with data from elsewhere may name any parent: one that does not come before it is none
        parents = ((i, numbers[each.salt].get(each.parent, NO_PARENT)) for i, each in enumerate(self._hashes))
        self._parents = [parent if parent < i else NO_PARENT for i, parent in parents]
        self._pins: dict[int, list[str]] = {}  # by block: ids of the pins that end with it
        for pin_id, (content, salt) in pins.iter_prefixes():
            if (end := numbers.get(salt, {}).get(content)) is not None:
                self._pins.setdefault(end, []).append(pin_id)
        self._references = [pool.count_references(block, pins.blocks) for _, block in tree]
        self._hits = self._sum_hits()
        self._is_node = self._find_nodes()

    def _sum_hits(self) -> list[int]:
        """Return the number of hits of each block: those that ended with it, and those of its subtree."""
        hits = [self._pool.count_hits(each) for each in self._hashes]
        for number in reversed(range(len(hits))):
            if (parent := self._parents[number]) != NO_PARENT:
                hits[parent] += hits[number]
        return hits

    def _find_nodes(self) -> list[bool]:
        """Return for each block whether a node ends with it."""
        is_node = [True] * len(self._parents)
        num_children = Counter(self._parents)
        references, hits = self._references, self._hits
        for number, parent in enumerate(self._parents):
            if parent != NO_PARENT and num_children[parent] == 1 and parent not in self._pins:
                is_node[parent] = references[parent] != references[number] or hits[parent] != hits[number]
        return is_node

    def find_first(self, last: BlockHash) -> BlockHash:
        """Return the hash of the first block of the node that a block is in; its own if it is not in the tree."""
        number = next((number for number, each in enumerate(self._hashes) if each.prefix == last.prefix), None)
        return last if number is None else self._hashes[self._list_blocks(number)[-1]]

    def _list_blocks(self, last: int) -> list[int]:
        """Return a block and those before it in its node, the last first."""
        blocks = [last]
        while (parent := self._parents[blocks[-1]]) != NO_PARENT and not self._is_node[parent]:
            blocks.append(parent)
        return blocks

    def list_nodes(self, limit: int) -> tuple[Sequence[CachedPrefix], int]:
        """Return up to `limit` nodes, the most important ones, parents before children; and the number of others."""
        nodes = list(compress(range(len(self._is_node)), self._is_node))
        chosen = nodes if len(nodes) <= limit else sorted(self._choose(nodes, limit))
        return [self._describe(node) for node in chosen], len(nodes) - len(chosen)

    def _choose(self, nodes: Sequence[int], limit: int) -> Collection[int]:
        """Return up to `limit` nodes, with the parent of each."""
        parent_nodes: list[int] = []  # by block: the node before the one that the block is in
        for parent in self._parents:
            parent_nodes.append(parent if parent == NO_PARENT or self._is_node[parent] else parent_nodes[parent])
        chosen: set[int] = set()
        for node in sorted(nodes, key=self._rank):
            path: list[int] = []
            while node != NO_PARENT and node not in chosen and len(chosen) + len(path) <= limit:
                path.append(node)
                node = parent_nodes[node]
            if len(chosen) + len(path) <= limit:
                chosen.update(path)
            if len(chosen) == limit:
                break
        return chosen

    def _rank(self, node: int) -> tuple[bool, bool, bool, float, float]:
        """Return a key that sorts nodes: those with pins first, then those in use, with hits, used most recently."""
        age, idle = self._pool.measure(self._hashes[node])
        return node not in self._pins, not self._references[node], not self._hits[node], idle or 0.0, age

    def _describe(self, node: int) -> CachedPrefix:
        blocks = self._list_blocks(node)
        last, parent = self._hashes[node], self._parents[blocks[-1]]
        age, idle = self._pool.measure(last)
        return CachedPrefix(
            id=last.prefix_id,
            parent=None if parent == NO_PARENT else self._hashes[parent].prefix_id,
            salt=last.salt,
            first_token=self._hashes[blocks[-1]].depth * self._block_size,
            num_tokens=len(blocks) * self._block_size,
            num_bytes=self._pool.count_bytes([self._hashes[block] for block in blocks]),
            references=self._references[node],
            hits=self._hits[node],
            age=age,
            idle=idle,
            pins=self._pins.get(node, ()),
        )
