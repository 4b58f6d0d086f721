"""Caches mark their pages as what they are: in use, shared, pending, pinned or idle, and write nothing else."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from cache_strategies.base import KVCache
from cache_strategies.features import PageMarking
from cache_strategies.types import NO_SALT, PageState
from kernels.types import LayerSpec
from tests.cache_strategies.cache_driver import LAYER, enter, make_cache, make_paged, open_seat, read_prompt

TEXT = list(range(10, 26))  # four blocks of 4
WINDOW = LayerSpec(1, 1, 4, 4, window=6)
UNMARKED = 255


def count_states(cache: KVCache) -> Counter[str]:
    """Return the number of pages by state, as the cache marks them."""
    assert isinstance(cache, PageMarking)
    states = torch.full((cache.setup.arena.pages,), UNMARKED, dtype=torch.uint8)
    cache.mark_pages(states)
    return Counter(PageState(state).name for state in states.tolist() if state != UNMARKED)


@pytest.mark.parametrize("kind", ["paged", "quest"])
def test_blocks_of_two_sequences_are_shared_until_one_ends(kind: str) -> None:
    cache = make_cache(kind, block_size=4)
    pages = cache.bytes_for(4) // cache.setup.arena.page_bytes  # of a block
    first = read_prompt(cache, [*TEXT, 1])
    second = read_prompt(cache, [*TEXT, 2])
    assert count_states(cache) == {"SHARED": 4 * pages, "IN_USE": 2 * pages}
    cache.close(second)
    assert count_states(cache) == {"IN_USE": 5 * pages}
    cache.close(first)
    assert count_states(cache) == {"IDLE": 4 * pages}
    cache.reclaim(99)
    assert not count_states(cache)


def test_blocks_that_others_wait_for_are_pending_until_they_are_computed() -> None:
    cache = make_paged()
    seat = open_seat(cache, [*TEXT, 1])
    waiting = open_seat(cache, [*TEXT, 2])
    assert count_states(cache) == {"PENDING": 4, "IN_USE": 2}
    enter(cache, (seat, TEXT[:8]))
    assert count_states(cache) == {"PENDING": 2, "SHARED": 2, "IN_USE": 2}
    cache.close(waiting)
    assert count_states(cache) == {"PENDING": 2, "IN_USE": 3}


def test_a_pinned_block_stays_pinned_while_it_is_used() -> None:
    cache = make_paged()
    cache.close(read_prompt(cache, [*TEXT, 1]))
    pin = cache.pin(TEXT[:8], salt=NO_SALT, ttl=60)
    assert count_states(cache) == {"PINNED": 2, "IDLE": 2}
    seat = open_seat(cache, [*TEXT, 1])
    assert count_states(cache) == {"PINNED": 2, "IN_USE": 3}
    cache.unpin(pin.id)
    assert count_states(cache) == {"IN_USE": 5}
    cache.close(seat)
    assert count_states(cache) == {"IDLE": 4}


def test_all_parts_of_blocks_are_marked_in_models_with_windows() -> None:
    cache = make_paged(layers=[LAYER, WINDOW, LAYER])
    seat = read_prompt(cache, [*TEXT, 1])
    held = cache.setup.arena.num_held_pages("it")
    passed = cache.idle_pages()  # of the layer with a window, which has passed them
    assert count_states(cache) == {"IN_USE": held - passed, "IDLE": passed}
    assert passed > 0
    cache.close(seat)
    assert count_states(cache) == {"IDLE": cache.idle_pages()}
    assert cache.idle_pages() > passed


def test_a_contiguous_cache_marks_the_blocks_of_closed_sequences() -> None:
    cache = make_cache("contiguous")
    pages = cache.bytes_for(1) // cache.setup.arena.page_bytes
    first = read_prompt(cache, [*TEXT, 1])
    assert not count_states(cache)  # what is not marked is in use
    cache.close(first)
    assert count_states(cache) == {"IDLE": pages}
