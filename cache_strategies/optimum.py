"""How much of a known sequence of requests a prefix cache of a given size could have found at best.

Belady's rule (1966): whoever knows the future lets go of what is wanted again last. Here a request's blocks come at
once, and it is a bound on what PagedCache can find under any eviction policy, for three things are granted to it:
 - what a request computes needs no room while it runs: only afterwards are `capacity` blocks of all that there is kept,
   whichever they are (none of the request's own, if others are worth more);
 - a block that is kept counts as found even where one before it is missing;
 - a policy may drop any block at any time, and asks for nothing but that what it keeps was there before.
A policy's choices are therefore among those that are open here, and of these it is best to let the farthest go: keeping
a block from one visit to the next is an interval of time that earns one hit, at most `capacity` intervals may overlap
anywhere, and dropping of too many the one that ends last leaves the most (interval graphs, Carlisle and Lloyd 1995).

The second grant is worth nothing in the end. Whoever wants a block wants all those before it, so these are wanted no
later, and of blocks that are wanted by the same request the last goes first: what is kept are prefixes.

Knows hashes of blocks and their order; neither memory nor policies.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from cache_strategies.base import NO_SALT
from cache_strategies.paged.prefix_index import BlockHash, BlockHasher

NEVER = 1 << 62


class Visit(NamedTuple):
    """The full blocks that a request leaves behind: those of its prompt and, after them, of its answer."""

    blocks: Sequence[BlockHash]
    num_reusable: int  # leading blocks that it could have found: one token of a prompt is always computed


def make_visits(requests: Iterable[tuple[Sequence[int], Sequence[int]]], block_size: int) -> list[Visit]:
    """Return the visits of requests, given as prompts and answers."""
    hasher = BlockHasher(block_size, "")
    return [
        Visit(list(hasher.hash_blocks([*prompt, *answer], NO_SALT)), max(0, len(prompt) - 1) // block_size)
        for prompt, answer in requests
    ]


def count_distinct_blocks(visits: Iterable[Visit]) -> int:
    """Return the number of blocks of a cache in which everything would have had room."""
    return len(set(chain.from_iterable(visit.blocks for visit in visits)))


def compute_max_hits(visits: Sequence[Visit], capacity: int) -> int:
    """Return how many blocks a cache of `capacity` blocks could have found. Takes n log n for n blocks."""
    kept: dict[BlockHash, int] = {}  # until which visit
    # A heap of (-visit, -place, block); an entry whose visit is not that in `kept` is outdated.
    last_wanted: list[tuple[int, int, BlockHash]] = []
    hits = 0
    for visit, next_visits in zip(visits, _find_next_visits(visits), strict=True):
        hits += sum(block in kept for block in visit.blocks[: visit.num_reusable])
        for place, (block, when) in enumerate(zip(visit.blocks, next_visits, strict=True)):
            if when == NEVER:
                kept.pop(block, None)
            else:
                kept[block] = when
                heapq.heappush(last_wanted, (-when, -place, block))
        while len(kept) > capacity:
            when, _, block = heapq.heappop(last_wanted)
            if kept.get(block) == -when:
                del kept[block]
    return hits


def _find_next_visits(visits: Sequence[Visit]) -> list[list[int]]:
    """Return for every block of every visit the number of the next visit that could find it.

    Never, if that one has to compute it anyway: then there is no point in keeping it until there.
    """
    coming: dict[BlockHash, int] = {}
    next_visits = []
    for number in reversed(range(len(visits))):
        blocks, num_reusable = visits[number]
        next_visits.append([coming.get(block, NEVER) for block in blocks])
        coming.update(dict.fromkeys(blocks[:num_reusable], number))
        coming.update(dict.fromkeys(blocks[num_reusable:], NEVER))
    return next_visits[::-1]
