"""Caches mark their blocks as what they are (in use, shared, pending, pinned or idle), and say what is in each."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from cache_strategies.base import KVCache
from cache_strategies.features import BlockDescribing, BlockMarking
from cache_strategies.paged.cache import PagedCache
from cache_strategies.types import NO_SALT, BlockInfo, BlockState
from kernels.types import LayerSpec
from tests.cache_strategies.cache_driver import (
    LAYER,
    count_held_blocks,
    enter,
    make_cache,
    make_paged,
    open_sequence,
    read_prompt,
)

TEXT = list(range(10, 26))  # four blocks of 4
WINDOW = LAYER._replace(window=6)
TWO_HEADS = LayerSpec(2, 2, 4, 4)
UNMARKED = 255


def count_states(cache: KVCache) -> Counter[str]:
    """Return the number of allocations by state, as the cache marks them in all its regions."""
    assert isinstance(cache, BlockMarking)
    found = Counter[str]()
    for region in cache.setup.memory.regions:
        states = torch.full((region.placement.extent,), UNMARKED, dtype=torch.uint8)
        cache.mark_blocks(region, states)
        found.update(BlockState(state).name for state in states.tolist() if state != UNMARKED)
    return found


@pytest.mark.parametrize("kind", ["paged", "quest"])
def test_blocks_of_two_sequences_are_shared_until_one_ends(kind: str) -> None:
    cache = make_cache(kind, block_size=4, layers=[TWO_HEADS])
    heads = 2 if kind == "quest" else 1  # allocations of a block
    first = read_prompt(cache, [*TEXT, 1])
    second = read_prompt(cache, [*TEXT, 2])
    assert count_states(cache) == {"SHARED": 4 * heads, "IN_USE": 2 * heads}
    second.close()
    assert count_states(cache) == {"IN_USE": 5 * heads}
    first.close()
    assert count_states(cache) == {"IDLE": 4 * heads}
    cache.evict(cache.idle_bytes)
    assert not count_states(cache)


def test_blocks_that_others_wait_for_are_pending_until_they_are_computed() -> None:
    cache = make_paged()
    sequence = open_sequence(cache, [*TEXT, 1])
    waiting = open_sequence(cache, [*TEXT, 2])
    assert count_states(cache) == {"PENDING": 4, "IN_USE": 2}
    enter(cache, (sequence, TEXT[:8]))
    assert count_states(cache) == {"PENDING": 2, "SHARED": 2, "IN_USE": 2}
    waiting.close()
    assert count_states(cache) == {"PENDING": 2, "IN_USE": 3}


def test_a_pinned_block_stays_pinned_while_it_is_used() -> None:
    cache = make_paged()
    read_prompt(cache, [*TEXT, 1]).close()
    pin = cache.pin(TEXT[:8], salt=NO_SALT, ttl=60)
    assert count_states(cache) == {"PINNED": 2, "IDLE": 2}
    sequence = open_sequence(cache, [*TEXT, 1])
    assert count_states(cache) == {"PINNED": 2, "IN_USE": 3}
    cache.unpin(pin.id)
    assert count_states(cache) == {"IN_USE": 5}
    sequence.close()
    assert count_states(cache) == {"IDLE": 4}


def test_blocks_in_all_regions_are_marked_in_models_with_windows() -> None:
    cache = make_paged(layers=[LAYER, WINDOW, LAYER])
    sequence = read_prompt(cache, [*TEXT, 1])
    held, passed = count_held_blocks(cache), cache.blocks().idle  # of the layer with a window, which has passed them
    assert count_states(cache) == {"IN_USE": held - passed, "IDLE": passed}
    assert passed > 0
    sequence.close()
    assert count_states(cache) == {"IDLE": cache.blocks().idle}
    assert cache.blocks().idle > passed


def test_a_contiguous_cache_marks_the_blocks_of_closed_sequences() -> None:
    cache = make_cache("contiguous")
    first = read_prompt(cache, [*TEXT, 1])
    assert not count_states(cache)  # what is not marked is in use
    first.close()
    assert count_states(cache) == {"IDLE": 1}


# ---------------------------------------------------------------- what is in a block
def describe(cache: KVCache, block: int, region: int = 0) -> BlockInfo:
    """Return what is known about an allocation in one of the regions."""
    assert isinstance(cache, BlockDescribing)
    info = cache.describe_block(cache.setup.memory.regions[region], block)
    assert info is not None
    return info


def place_of(info: BlockInfo) -> tuple[int | None, int | None, int]:
    """Return (first token, number of tokens, references)."""
    return info.first_token, info.num_tokens, info.references


@pytest.mark.parametrize("kind", ["paged", "quest"])
def test_every_allocation_of_a_block_says_which_tokens_it_holds(kind: str) -> None:
    cache = make_cache(kind, block_size=4, layers=[TWO_HEADS, LAYER])
    assert isinstance(cache, PagedCache)
    first = read_prompt(cache, [*TEXT, 1, 2])
    second = read_prompt(cache, [*TEXT, 3])
    for sequence, last in ((first, 2), (second, 1)):
        for i, block in enumerate(sequence.blocks):
            for number in cache.pool.columns(block):
                tokens, references = (4, 2) if i < 4 else (last, 1)
                assert place_of(describe(cache, number)) == (4 * i, tokens, references)
    end = describe(cache, first.blocks[4])
    assert (end.age, end.idle, end.prefix, end.num_pins) == (None, None, None, 0), "a block that is not full"
    assert {describe(cache, block).prefix for block in first.blocks[:4]} > {cache.list_prefixes(9)[0][0].id}
    (region,) = cache.setup.memory.regions
    assert cache.describe_block(region, max(region.placement.list_used()) + 1) is None


def test_a_block_has_the_references_of_sequences_and_pins() -> None:
    cache = make_paged()
    sequence = read_prompt(cache, [*TEXT, 1])
    block, last = sequence.blocks[1], sequence.blocks[3]
    cache.pin(TEXT[:8], salt=NO_SALT, ttl=60), cache.pin(TEXT, salt=NO_SALT, ttl=60)
    assert (describe(cache, block).references, describe(cache, block).num_pins) == (1, 2)
    sequence.close()
    pinned = describe(cache, block)
    assert (pinned.references, pinned.num_pins, pinned.idle) == (0, 2, None)
    for pin in cache.pins():
        cache.unpin(pin.id)
    idle = describe(cache, block)
    assert place_of(idle) == (4, 4, 0)
    assert idle.idle is not None
    assert idle.age is not None
    assert 0 <= idle.idle <= idle.age
    (node,) = cache.list_prefixes(9)[0]
    assert describe(cache, last).prefix == node.id


def test_a_pending_block_has_the_tokens_that_are_computed() -> None:
    cache = make_paged()
    sequence, _ = open_sequence(cache, [*TEXT, 1]), open_sequence(cache, [*TEXT, 2])
    assert place_of(describe(cache, sequence.blocks[1])) == (4, 0, 2)
    enter(cache, (sequence, TEXT[:6]))
    assert [place_of(describe(cache, block)) for block in sequence.blocks[:3]] == [(0, 4, 2), (4, 2, 2), (8, 0, 2)]


def test_blocks_of_layers_with_a_window_are_described_like_others() -> None:
    cache = make_paged(layers=[LAYER, WINDOW, LAYER])
    sequence = read_prompt(cache, [*TEXT, 1])
    full, windowed = (
        sorted(place_of(describe(cache, block, number)) for block in region.placement.list_used())
        for number, region in enumerate(cache.setup.memory.regions)
    )
    held = sorted(sequence.windowed[0])
    assert full == [(4 * i, 4 if i < 4 else 1, 1) for i in range(5)]
    assert windowed == [(4 * i, 4 if i < 4 else 1, int(i in held)) for i in range(5)]
    assert len(held) < 5


def test_a_block_of_a_contiguous_cache_has_all_tokens_of_its_sequence() -> None:
    cache = make_cache("contiguous")
    sequence = read_prompt(cache, [*TEXT, 1])
    block = sequence.blocks[0]
    assert place_of(describe(cache, block)) == (0, 17, 1)
    assert describe(cache, block).idle is None
    sequence.close()
    idle = describe(cache, block)
    assert place_of(idle) == (0, 17, 0)
    assert idle.idle is not None
    assert cache.describe_block(cache.setup.memory.regions[0], block + 1) is None
