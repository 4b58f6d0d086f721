"""Checks of the optional features of a strategy (cache_strategies/features.py), after any operation on it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cache_strategies.base import KVCache
from cache_strategies.features import BlockDescribing, BlockMarking, BlockNames, Pinning, PrefixListing
from cache_strategies.types import BlockState, CachedPrefix

MARKS = set(BlockState) - {BlockState.FREE}  # states of blocks that a cache holds
EVERY_NODE = 2**31  # as a limit of list_prefixes()


def check_features(cache: KVCache) -> None:
    """Assert that what a cache says about its blocks and prefixes agrees with its regions and with itself."""
    if isinstance(cache, BlockMarking):
        _check_marked_blocks(cache, cache)
    if isinstance(cache, BlockDescribing):
        _check_described_blocks(cache, cache)
    if isinstance(cache, PrefixListing):
        _check_prefixes(cache, cache)
    if isinstance(cache, BlockNames):
        _check_block_names(cache)


def _check_marked_blocks(cache: KVCache, marking: BlockMarking) -> None:
    """Assert that a cache marks blocks of its own only, and as idle and pinned those that it names elsewhere."""
    unmarked, idle_bytes = 255, 0
    pinned = cache.pinned_blocks() if isinstance(cache, Pinning) else {}
    for region in cache.setup.memory.regions:
        states = torch.full((region.placement.extent,), unmarked, dtype=torch.uint8)
        marking.mark_blocks(region, states)
        own = torch.zeros(len(states), dtype=torch.bool)
        own[region.placement.list_used()] = True
        assert not (states[~own] != unmarked).any(), "mark_blocks() marked blocks that the cache does not hold"
        known = {int(state) for state in states[own]} - {unmarked}
        assert known <= MARKS, f"mark_blocks() wrote {sorted(known - MARKS)}, which are no states of held blocks"
        idle_bytes += int((states == BlockState.IDLE).sum()) * region.size
        marked = set(torch.nonzero(states == BlockState.PINNED).flatten().tolist())
        assert marked == set(pinned.get(region, ())), "mark_blocks() and pinned_blocks() name different blocks"
    expected = cache.idle_bytes
    assert idle_bytes == expected, (
        f"mark_blocks() marked blocks of {idle_bytes} bytes as idle, and idle_bytes is {expected}"
    )


def _check_described_blocks(cache: KVCache, describing: BlockDescribing) -> None:
    """Assert that a cache describes blocks of its own only; of each region, only those at both ends are looked at."""
    for region in cache.setup.memory.regions:
        own = region.placement.list_used()
        others = sorted({0, 1, region.pages - 1} - set(own))
        for block in {*own[:1], *own[-1:], *others}:
            info = describing.describe_block(region, block)
            assert block not in others or info is None, (
                "describe_block() described a block that the cache does not hold"
            )
            assert info is None or min(info.references, info.num_pins) >= 0, f"describe_block(): {info}"


def check_evict(cache: KVCache, num_bytes: int) -> None:
    """Free idle blocks of a cache; assert that enough of them are freed, and counted right."""
    memory, idle = cache.setup.memory, cache.idle_bytes
    held = memory.held_bytes
    freed = cache.evict(num_bytes)
    fell = held - memory.held_bytes
    assert freed == fell, f"evict() returned {freed}, and freed {fell} bytes"
    least = min(num_bytes, idle)
    assert least <= freed <= idle, f"evict({num_bytes}) freed {freed} bytes, and idle_bytes was {idle}"


def _check_prefixes(cache: KVCache, listing: PrefixListing) -> None:
    """Assert that the nodes of the tree of cached prefixes fit each other, the pins and the memory."""
    pins = {pin.id for pin in cache.pins()} if isinstance(cache, Pinning) else set[str]()
    held = cache.setup.memory.held_bytes
    prefixes, omitted = listing.list_prefixes(EVERY_NODE)
    assert omitted == 0, f"list_prefixes() left out {omitted} nodes, fewer than its limit"
    known: dict[str, CachedPrefix] = {}
    for each in prefixes:
        assert each.id not in known, f"list_prefixes() returned two nodes with the id {each.id}"
        known[each.id] = each
        assert min(each.first_token, each.num_bytes, each.references, each.hits) >= 0 < each.num_tokens, f"{each}"
        assert pins.issuperset(each.pins), f"list_prefixes() named pins that pins() does not: {each}"
        if each.parent is not None:
            assert each.parent in known, f"list_prefixes() returned no parent before {each}"
            parent = known[each.parent]
            end = parent.first_token + parent.num_tokens
            assert each.first_token == end, f"a node begins at {each.first_token}, and its parent ends at {end}"
            assert parent.hits >= each.hits, f"a node has {each.hits} hits, and its parent {parent.hits}"
            assert parent.salt == each.salt, "a node has another salt than its parent"
    num_bytes = sum(each.num_bytes for each in prefixes)
    assert num_bytes <= held, f"list_prefixes(): nodes have {num_bytes} bytes, and {held} bytes of blocks are held"


def check_drop(cache: KVCache, listing: PrefixListing, prefixes: Sequence[CachedPrefix], top: str) -> None:
    """Drop a node of the tree, which consists of `prefixes`; assert that it is gone with all nodes after it."""
    dropped, before = {top}, cache.setup.memory.held_bytes
    for each in prefixes:  # parents come first
        if each.parent in dropped:
            dropped.add(each.id)
    expected = sum(each.num_bytes for each in prefixes if each.id not in dropped)
    freed = listing.drop_prefix(top)
    fell = before - cache.setup.memory.held_bytes
    assert freed == fell, f"drop_prefix() returned {freed} bytes, and freed {fell}"
    left, _ = listing.list_prefixes(EVERY_NODE)
    num_bytes = sum(each.num_bytes for each in left)
    assert not {each.id for each in left} & dropped, "drop_prefix() left nodes that it should drop"
    assert num_bytes == expected, f"drop_prefix() left nodes of {num_bytes} bytes, and others have {expected}"
    assert listing.drop_prefix(top) is None, "drop_prefix() did not return None for an unknown id"


def _check_block_names(naming: BlockNames) -> None:
    """Assert that a cache names blocks only if it says how, and with numbers of 32 bits."""
    names = naming.list_block_names()
    if naming.block_naming() is None:
        assert not names, "list_block_names() named blocks, and block_naming() is None"
    assert all(0 <= name < 1 << 32 for name in names), "list_block_names() returned names of more than 32 bits"
