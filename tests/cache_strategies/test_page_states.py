"""Caches mark their pages as what they are (in use, shared, pending, pinned or idle), and say what is in each."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from cache_strategies.base import KVCache
from cache_strategies.features import PageDescribing, PageMarking
from cache_strategies.types import NO_SALT, PageInfo, PageState
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


# ---------------------------------------------------------------- what is in a page
def describe(cache: KVCache, page: int) -> PageInfo:
    assert isinstance(cache, PageDescribing)
    info = cache.describe_page(page)
    assert info is not None
    return info


def place_of(info: PageInfo) -> tuple[int | None, int | None, int]:
    """Return (first token, number of tokens, references)."""
    return info.first_token, info.num_tokens, info.references


@pytest.mark.parametrize("kind", ["paged", "quest"])
def test_every_page_of_a_block_says_which_tokens_it_holds(kind: str) -> None:
    cache = make_cache(kind, block_size=4, layers=[LAYER, LAYER])
    run = cache.bytes_for(4) // cache.setup.arena.page_bytes
    first = read_prompt(cache, [*TEXT, 1, 2])
    second = read_prompt(cache, [*TEXT, 3])
    for seat, last in ((first, 2), (second, 1)):
        for i, block in enumerate(seat.blocks):
            for page in range(block, block + run):
                tokens, references = (4, 2) if i < 4 else (last, 1)
                assert place_of(describe(cache, page)) == (4 * i, tokens, references)
    end = describe(cache, first.blocks[4])
    assert (end.age, end.idle, end.prefix, end.num_pins) == (None, None, None, 0), "a block that is not full"
    assert {describe(cache, block).prefix for block in first.blocks[:4]} > {cache.list_prefixes(9)[0][0].id}
    free = int((cache.setup.arena.mark_owners()[0] == 0).argmax())
    assert cache.describe_page(free) is None


def test_a_page_has_the_references_of_sequences_and_the_pins_of_its_block() -> None:
    cache = make_paged()
    seat = read_prompt(cache, [*TEXT, 1])
    block, last = seat.blocks[1], seat.blocks[3]
    cache.pin(TEXT[:8], salt=NO_SALT, ttl=60), cache.pin(TEXT, salt=NO_SALT, ttl=60)
    assert (describe(cache, block).references, describe(cache, block).num_pins) == (1, 2)
    cache.close(seat)
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
    seat, _ = open_seat(cache, [*TEXT, 1]), open_seat(cache, [*TEXT, 2])
    assert place_of(describe(cache, seat.blocks[1])) == (4, 0, 2)
    enter(cache, (seat, TEXT[:6]))
    assert [place_of(describe(cache, block)) for block in seat.blocks[:3]] == [(0, 4, 2), (4, 2, 2), (8, 0, 2)]


def test_blocks_of_layers_with_a_window_are_described_like_others() -> None:
    cache = make_paged(layers=[LAYER, WINDOW, LAYER])
    seat = read_prompt(cache, [*TEXT, 1])
    marks, _ = cache.setup.arena.mark_owners()
    found = Counter(place_of(describe(cache, page)) for page in marks.nonzero()[0].tolist())
    held = sorted(seat.windowed[0])
    expected = Counter({(4 * i, 4 if i < 4 else 1, 1): 2 for i in range(5)})
    expected += Counter((4 * i, 4 if i < 4 else 1, 1) for i in held)
    passed = [i for i in range(4) if i not in held]
    assert found == expected + Counter((4 * i, 4, 0) for i in passed)
    assert passed


def test_a_page_of_a_contiguous_cache_has_all_tokens_of_its_sequence() -> None:
    cache = make_cache("contiguous")
    seat = read_prompt(cache, [*TEXT, 1])
    page = seat.blocks[0] + cache.store.pages_per_block - 1
    assert place_of(describe(cache, page)) == (0, 17, 1)
    assert describe(cache, page).idle is None
    cache.close(seat)
    idle = describe(cache, page)
    assert place_of(idle) == (0, 17, 0)
    assert idle.idle is not None
    assert cache.describe_page((page + 1) % cache.setup.arena.pages) is None
