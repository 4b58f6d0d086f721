"""Checks of the optional features of a strategy (cache_strategies/features.py), after any operation on it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from cache_strategies.base import KVCache
from cache_strategies.features import BlockNames, PageDescribing, PageMarking, Pinning, PrefixListing
from cache_strategies.types import CachedPrefix, PageState

MARKS = set(PageState) - {PageState.FREE, PageState.UNTOUCHED}  # states of pages that a cache holds
EVERY_NODE = 2**31  # as a limit of list_prefixes()


def check_features(cache: KVCache) -> None:
    """Assert that what a cache says about its pages and prefixes agrees with the arena and with itself."""
    if isinstance(cache, PageMarking):
        _check_marked_pages(cache, cache)
    if isinstance(cache, PageDescribing):
        _check_described_pages(cache, cache)
    if isinstance(cache, PrefixListing):
        _check_prefixes(cache, cache)
    if isinstance(cache, BlockNames):
        _check_block_names(cache)


def _find_own_pages(cache: KVCache) -> NDArray[np.bool_]:
    """Return for each page of the arena whether it belongs to a cache."""
    marks, names = cache.setup.arena.mark_owners()
    own: NDArray[np.bool_] = marks == next(mark for mark, owner in names.items() if owner == cache.name)
    return own


def _check_marked_pages(cache: KVCache, marking: PageMarking) -> None:
    """Assert that a cache marks pages of its own only, and as idle and pinned those that it names elsewhere."""
    unmarked = 255
    states = torch.full((cache.setup.arena.pages,), unmarked, dtype=torch.uint8)
    marking.mark_pages(states)
    own = torch.from_numpy(_find_own_pages(cache))
    assert not (states[~own] != unmarked).any(), "mark_pages() marked pages that the cache does not hold"
    known = {int(state) for state in states[own]} - {unmarked}
    assert known <= MARKS, f"mark_pages() wrote {sorted(known - MARKS)}, which are no states of held pages"
    num_idle, expected = int((states == PageState.IDLE).sum()), cache.idle_pages()
    assert num_idle == expected, f"mark_pages() marked {num_idle} pages as idle, and idle_pages() is {expected}"
    pinned = set(torch.nonzero(states == PageState.PINNED).flatten().tolist())
    assert pinned == set(cache.pinned_pages()), "mark_pages() and pinned_pages() name different pages"


def _check_described_pages(cache: KVCache, describing: PageDescribing) -> None:
    """Assert that a cache describes pages of its own only; of each, only those at both ends are looked at."""
    own = _find_own_pages(cache)
    for pages in (own.nonzero()[0], (~own).nonzero()[0]):
        for page in {*pages[:1].tolist(), *pages[-1:].tolist()}:
            info = describing.describe_page(page)
            assert own[page] or info is None, "describe_page() described a page that the cache does not hold"
            assert info is None or min(info.references, info.num_pins) >= 0, f"describe_page(): {info}"


def _check_prefixes(cache: KVCache, listing: PrefixListing) -> None:
    """Assert that the nodes of the tree of cached prefixes fit each other, the pins and the memory."""
    pins = {pin.id for pin in cache.pins()} if isinstance(cache, Pinning) else set[str]()
    held = cache.setup.arena.num_held_pages(cache.name) * cache.setup.arena.page_bytes
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
    assert num_bytes <= held, f"list_prefixes(): nodes have {num_bytes} bytes, and {held} bytes of pages are held"


def check_drop(cache: KVCache, listing: PrefixListing, prefixes: Sequence[CachedPrefix], top: str) -> None:
    """Drop a node of the tree, which consists of `prefixes`; assert that it is gone with all nodes after it."""
    dropped, before = {top}, cache.setup.arena.num_held_pages(cache.name)
    for each in prefixes:  # parents come first
        if each.parent in dropped:
            dropped.add(each.id)
    expected = sum(each.num_bytes for each in prefixes if each.id not in dropped)
    freed = listing.drop_prefix(top)
    fell = (before - cache.setup.arena.num_held_pages(cache.name)) * cache.setup.arena.page_bytes
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
