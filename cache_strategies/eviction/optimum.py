"""Computes the highest hit rate that a prefix cache of a given size could reach on a recorded trace of requests.

Belady's rule (1966): with the future known, evict the entry whose next use is farthest away. All blocks of a request
are used at the same time here. The result is an upper bound for PagedCache under any eviction policy, because the
optimum gets three advantages:
 - Blocks of a running request take no room. After the request, any `capacity` blocks are kept (none of the request's
   own, if others are more useful).
 - A cached block counts as a hit even if a block before it is missing.
 - Any block may be dropped at any time; a block can only be kept if it was cached or computed before.
So the choices of every policy are among those considered here, and evicting the farthest next use is the best of them:
keeping a block from one visit to the next is an interval of time that earns one hit, at most `capacity` intervals may
overlap at any time, and dropping the interval that ends last keeps the most (interval graphs, Carlisle and Lloyd 1995).

The second advantage has no effect on the result. A request that uses a block uses all blocks before it, so these are
never used later than it; and of blocks with the same next use the last one is evicted first. So prefixes are kept.

Knows hashes of blocks and their order; neither memory nor policies.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from cache_strategies.block_hashes import BlockHash, BlockHasher
from cache_strategies.types import NO_SALT

NEVER = 1 << 62


class Visit(NamedTuple):
    """One request of a trace: the hashes of the full blocks of its prompt and answer."""

    blocks: Sequence[BlockHash]
    num_reusable: int  # number of leading blocks that can be hits; the prompt's last token is always computed


def make_visits(requests: Iterable[tuple[Sequence[int], Sequence[int]]], block_size: int) -> list[Visit]:
    """Return a visit for each request, given as the token ids of its prompt and its answer."""
    hasher = BlockHasher(block_size, "")
    return [
        Visit(list(hasher.hash_blocks([*prompt, *answer], NO_SALT)), max(0, len(prompt) - 1) // block_size)
        for prompt, answer in requests
    ]


def count_distinct_blocks(visits: Iterable[Visit]) -> int:
    """Return the number of distinct blocks of all visits: the capacity of a cache that never evicts."""
    return len(set(chain.from_iterable(visit.blocks for visit in visits)))


def compute_max_hits(visits: Sequence[Visit], capacity: int) -> int:
    """Return the maximum number of block hits with a cache of `capacity` blocks, in O(n log n) for n blocks."""
    kept: dict[BlockHash, int] = {}  # index of the next visit of each cached block
    # A heap of (-next visit, -place in the request, block); if `kept` has another next visit, the item is outdated.
    eviction_heap: list[tuple[int, int, BlockHash]] = []
    hits = 0
    for visit, next_visits in zip(visits, _find_next_visits(visits), strict=True):
        hits += sum(block in kept for block in visit.blocks[: visit.num_reusable])
        for place, (block, when) in enumerate(zip(visit.blocks, next_visits, strict=True)):
            if when == NEVER:
                kept.pop(block, None)
            else:
                kept[block] = when
                heapq.heappush(eviction_heap, (-when, -place, block))
        while len(kept) > capacity:
            when, _, block = heapq.heappop(eviction_heap)
            if kept.get(block) == -when:
                del kept[block]
    return hits


def _find_next_visits(visits: Sequence[Visit]) -> list[list[int]]:
    """Return, for every block of every visit, the index of the next visit that can find it cached, or NEVER.

    It is NEVER, too, if the next visit with this block has to compute it in any case: then keeping it gains no hit.
    """
    next_visit: dict[BlockHash, int] = {}
    next_visits = []
    for number in reversed(range(len(visits))):
        blocks, num_reusable = visits[number]
        next_visits.append([next_visit.get(block, NEVER) for block in blocks])
        next_visit.update(dict.fromkeys(blocks[:num_reusable], number))
        next_visit.update(dict.fromkeys(blocks[num_reusable:], NEVER))
    return next_visits[::-1]
