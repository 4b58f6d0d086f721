"""Layers with a window keep what their window needs: memory, takeovers, forks, pins, eviction, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from cache_strategies import registry
from cache_strategies.base import KVSequence, Rows
from cache_strategies.memory import make_memory
from cache_strategies.paged.cache import PagedCache, PagedSequence
from cache_strategies.spaces import find_space
from cache_strategies.types import NO_SALT, Geometry
from config.settings import StrategySettings
from kernels.reference.backend import ReferenceOps
from kernels.types import LayerSpec
from tests.cache_strategies.cache_driver import (
    BLOCK,
    LAYER,
    assert_nothing_leaked,
    count_bytes,
    count_held_blocks,
    enter,
    evict,
    find_cached,
    make_paged,
    open_sequence,
    read_prompt,
    visible_tokens,
    write,
)

WINDOW = LAYER._replace(window=6)  # a hit needs two blocks of 4 before it, and a sequence keeps three
HYBRID = (WINDOW, LAYER)
TWO_WINDOWS = (WINDOW, LAYER, LAYER._replace(window=11), WINDOW)
ALL_WINDOWS = (WINDOW, WINDOW)
MODELS = {"hybrid": HYBRID, "two windows": TWO_WINDOWS, "all windows": ALL_WINDOWS}
TEXT = list(range(100, 150))  # 12 blocks of 4, and two tokens

models = pytest.mark.parametrize("layers", MODELS.values(), ids=MODELS)


def assert_sees_its_text(cache: PagedCache, sequence: PagedSequence, text: Sequence[int]) -> None:
    """Assert that the next token sees the end of `text` in every layer: as much as the layer's window covers."""
    assert sequence.length == len(text)
    for layer, spec in enumerate(cache.setup.geometry.layers):
        assert visible_tokens(cache, sequence, layer) == list(text[max(0, len(text) - (spec.window or 99) + 1) :])


def read_in_rows(cache: PagedCache, sequence: PagedSequence, text: Sequence[int], size: int) -> None:
    while sequence.length < len(text):
        enter(cache, (sequence, text[sequence.length : sequence.length + size]))


# ---------------------------------------------------------------- memory
def gemma_3_4b(*, has_windows: bool, dim: int = 16) -> list[LayerSpec]:
    """Return the layers of Gemma 3 4B: every sixth one sees the whole text, the others a window of 1,024 tokens.

    Heads have `dim` dimensions, of which the model has 256.
    """
    full = LayerSpec(4, 8, dim, dim)
    return [full if i % 6 == 5 or not has_windows else full._replace(window=1024) for i in range(34)]


def prefill(layers: Sequence[LayerSpec], length: int) -> tuple[PagedCache, KVSequence]:
    """Return a cache and a sequence after the prefill of a text in rows of 512 tokens; nothing of it is computed."""
    instances = registry.resolve_instances({"it": StrategySettings(kind="paged")})
    geometry = Geometry(layers, torch.bfloat16, 1, length, 512)
    memory = make_memory(registry.compute_sequence_bytes(instances, geometry, find_space("cpu").round_block))
    cache = registry.build_caches(instances, geometry, memory, ReferenceOps())["it"]
    assert isinstance(cache, PagedCache)
    sequence = open_sequence(cache, range(length))
    while sequence.length < length:
        row = range(sequence.length, sequence.length + 512)
        cache.poll()
        assert sequence.reserve(len(row))
        usage = cache.usage()
        assert usage.used + usage.wasted <= count_bytes(cache, length)
        cache.locate(Rows([sequence], [len(row)]))
        sequence.commit(row)
    cache.check_integrity()
    return cache, sequence


def test_gemma_3_takes_about_a_quarter_of_the_memory_of_a_long_text() -> None:
    caches = [prefill(gemma_3_4b(has_windows=has_windows), 8192)[0] for has_windows in (True, False)]
    windows, full = (cache.usage() for cache in caches)
    assert windows.tokens == full.tokens == 8192
    assert full.used == full.reserved
    assert windows.used / full.used == pytest.approx(0.257, abs=1e-3)
    assert windows.wasted == 0


def test_idle_blocks_are_idle_with_what_rounding_adds_to_them() -> None:
    cache, sequence = prefill(gemma_3_4b(has_windows=True, dim=36), 2048)
    assert cache.usage().wasted > 0, "blocks take whole pages of the system"
    sequence.close()
    usage = cache.usage()
    assert (usage.used, usage.wasted) == (0, 0)
    assert usage.idle == usage.reserved > 0


@models
@pytest.mark.parametrize("size", [1, 3, 8])
def test_windows_keep_as_many_blocks_whatever_the_length(layers: Sequence[LayerSpec], size: int) -> None:
    cache = make_paged(layers=layers)
    sequence = open_sequence(cache, TEXT[:1])
    for end in range(size, len(TEXT), size):
        enter(cache, (sequence, TEXT[sequence.length : end]))
        assert_sees_its_text(cache, sequence, TEXT[:end])
        for held, group in zip(sequence.windowed, cache.layout.groups[1:], strict=True):
            kept = math.ceil((group.window - 1) / BLOCK) + 1  # type: ignore[operator]
            assert len(held) <= kept + 1, "one more is partly filled"
        usage = cache.usage()
        assert usage.used + usage.wasted <= count_bytes(cache, end + 1)
        assert usage.reserved == usage.used + usage.idle + usage.wasted
    sequence.close()
    assert_nothing_leaked(cache)


@models
def test_nothing_is_dropped_before_a_step_is_committed(layers: Sequence[LayerSpec]) -> None:
    cache = make_paged(layers=layers)
    sequence = read_prompt(cache, TEXT[:30])
    before = [dict(held) for held in sequence.windowed]
    cache.poll()
    assert sequence.reserve(15)
    for _ in range(2):
        write(cache, (sequence, TEXT[30:45]), commit=False)
        assert all(held.items() >= old.items() for held, old in zip(sequence.windowed, before, strict=True))
    write(cache, (sequence, TEXT[30:45]))
    assert all(min(held) > 5 for held in sequence.windowed)
    assert_sees_its_text(cache, sequence, TEXT[:45])


# ---------------------------------------------------------------- sequences that share
@models
def test_a_sequence_that_waits_gets_the_windows_of_the_sequence_that_computes(layers: Sequence[LayerSpec]) -> None:
    cache = make_paged(layers=layers)
    first, second, third = open_sequence(cache, TEXT), open_sequence(cache, TEXT[:30]), open_sequence(cache, TEXT)
    assert [sequence.found for sequence in (first, second, third)] == [0, 28, 48]
    enter(cache, (first, TEXT))
    evict(cache, 99)
    assert second.ready()
    assert_sees_its_text(cache, second, TEXT[:28])
    enter(cache, (second, TEXT[28:30]))
    assert third.ready()
    enter(cache, (third, TEXT[48:]))
    for sequence, length in ((first, 50), (second, 30), (third, 50)):
        assert_sees_its_text(cache, sequence, TEXT[:length])
        sequence.close()
    assert_nothing_leaked(cache)


@models
def test_it_is_ready_in_the_step_that_computes_its_windows(layers: Sequence[LayerSpec]) -> None:
    cache = make_paged(layers=layers)
    first, second = open_sequence(cache, TEXT), open_sequence(cache, TEXT[:30])
    cache.poll()
    assert first.reserve(50)
    assert second.ready()
    assert second.reserve(2)
    write(cache, (first, TEXT), (second, TEXT[28:30]), commit=False)  # failed
    write(cache, (first, TEXT), (second, TEXT[28:30]))
    for sequence, length in ((first, 50), (second, 30)):
        assert_sees_its_text(cache, sequence, TEXT[:length])
        sequence.close()
    assert_nothing_leaked(cache)


@models
@pytest.mark.parametrize("computed", [0, 3, 18, 33])
def test_a_sequence_that_takes_over_goes_on_where_the_other_stopped(layers: Sequence[LayerSpec], computed: int) -> None:
    cache = make_paged(layers=layers)
    first, second, third = open_sequence(cache, TEXT), open_sequence(cache, TEXT), open_sequence(cache, TEXT[:40])
    read_in_rows(cache, first, TEXT[:computed], 5)
    first.close()
    cache.check_integrity()
    assert second.length == computed // BLOCK * BLOCK
    assert third.length == 36
    assert not third.ready()
    read_in_rows(cache, second, TEXT, 7)
    assert third.ready()
    read_in_rows(cache, third, TEXT[:40], 7)
    for sequence, length in ((second, 50), (third, 40)):
        assert_sees_its_text(cache, sequence, TEXT[:length])
        sequence.close()
    assert_nothing_leaked(cache)


@models
def test_a_sequence_that_takes_over_without_windows_computes_more(layers: Sequence[LayerSpec]) -> None:
    cache = make_paged(layers=layers)
    first, second = open_sequence(cache, TEXT), open_sequence(cache, TEXT)
    read_in_rows(cache, first, TEXT[:30], 10)
    cache.clear()
    first.close()
    assert second.length == 0
    read_in_rows(cache, second, TEXT, 10)
    assert_sees_its_text(cache, second, TEXT)
    second.close()
    assert_nothing_leaked(cache)


@models
def test_forks_share_windows_until_one_writes(layers: Sequence[LayerSpec]) -> None:
    cache = make_paged(layers=layers)
    parent = read_prompt(cache, TEXT[:30])
    held = count_held_blocks(cache)
    forks = [parent.fork() for _ in range(3)]
    assert count_held_blocks(cache) == held
    for i, child in enumerate(forks):
        assert child is not None
        enter(cache, (child, [i] * 9))
        assert_sees_its_text(cache, child, [*TEXT[:30], *[i] * 9])
        cache.check_integrity()
    assert_sees_its_text(cache, parent, TEXT[:30])
    for sequence in (parent, *forks):
        assert sequence is not None
        sequence.close()
    assert_nothing_leaked(cache)


# ---------------------------------------------------------------- rewinding
@models
def test_the_promised_number_of_tokens_can_be_dropped(layers: Sequence[LayerSpec]) -> None:
    for length in range(20, 45):
        cache = make_paged(layers=layers)
        sequence = read_prompt(cache, TEXT[:length])
        rewind = cache.contract.rewind
        assert rewind is not None
        assert rewind >= BLOCK
        evict(cache, 99)
        sequence.truncate(length - rewind)
        assert_sees_its_text(cache, sequence, TEXT[: length - rewind])
        cache.check_integrity()


@models
def test_a_sequence_that_drops_more_goes_back_to_where_it_can_go_on(layers: Sequence[LayerSpec]) -> None:
    cache = make_paged(layers=layers)
    sequence = read_prompt(cache, TEXT)
    sequence.truncate(30)
    assert sequence.length == 30, "what the window has passed is still cached"
    enter(cache, (sequence, TEXT[30:]))
    evict(cache, 99)
    sequence.truncate(30)
    assert sequence.length == 0
    read_in_rows(cache, sequence, TEXT, 9)
    assert_sees_its_text(cache, sequence, TEXT)
    sequence.close()
    assert_nothing_leaked(cache)


def test_without_a_window_that_drops_anything_a_sequence_rewinds_to_any_length() -> None:
    assert make_paged(layers=(LAYER, LAYER._replace(window=64))).contract.rewind is None


# ---------------------------------------------------------------- what is kept
@models
def test_a_pin_keeps_what_a_sequence_needs_to_go_on(layers: Sequence[LayerSpec]) -> None:
    cache = make_paged(layers=layers)
    read_prompt(cache, TEXT).close()
    pin = cache.pin(TEXT[:42], salt=NO_SALT, ttl=60)
    assert pin.num_tokens == 40
    evict(cache, 99)
    cache.check_integrity()
    assert find_cached(cache, TEXT) == 40
    assert cache.usage().reserved == pin.num_bytes
    pinned = cache.pinned_blocks()
    assert sum(len(blocks) * region.size for region, blocks in pinned.items()) == pin.num_bytes
    sequence = read_prompt(cache, TEXT)
    assert sequence.found == 40
    assert_sees_its_text(cache, sequence, TEXT)
    sequence.close()
    assert cache.unpin(pin.id)
    assert_nothing_leaked(cache)


def windowed_blocks(cache: PagedCache, text: Sequence[int]) -> list[int]:
    """Return the indices of a text's blocks that are cached in the first group of windowed layers."""
    hashes = cache._hash_blocks(text, NO_SALT)
    return [i for i, each in enumerate(hashes) if cache.pool.find(each._replace(group=1)) is not None]


def test_what_windows_have_passed_is_evicted_before_all_else() -> None:
    cache = make_paged(layers=HYBRID)
    other = [*range(200, 230)]
    for text in (TEXT, other):
        sequence = open_sequence(cache, text)
        read_in_rows(cache, sequence, text, 4)
        sequence.close()
    assert windowed_blocks(cache, TEXT) == list(range(12))
    assert windowed_blocks(cache, other) == list(range(7))
    evict(cache, 9 + 4)  # all that was passed, first that of the older text
    assert windowed_blocks(cache, TEXT) == [9, 10, 11]
    assert windowed_blocks(cache, other) == [4, 5, 6]
    assert (find_cached(cache, [*TEXT, 1]), find_cached(cache, [*other, 1])) == (48, 28)
    assert find_cached(cache, TEXT[:20]) == 0
    evict(cache, 12 + 3)  # then the older text
    assert (find_cached(cache, [*TEXT, 1]), find_cached(cache, [*other, 1])) == (0, 28)


def test_windows_where_texts_branch_off_are_kept_like_other_blocks() -> None:
    cache = make_paged(layers=HYBRID)
    common = TEXT[:20]
    for i in range(3):
        text = [*common, *[i] * 20]
        sequence = open_sequence(cache, text)
        assert sequence.found == (20 if i else 0)
        read_in_rows(cache, sequence, text, 4)
        sequence.close()
        evict(cache, 1)
    assert evict(cache, 10) == 10  # of 15 blocks that were passed, 2 are at the branch, and 3 were evicted before
    assert find_cached(cache, [*common, 7]) == 20
    assert windowed_blocks(cache, common) == [3, 4]


@models
def test_an_idle_prefix_without_windows_is_computed_by_one_sequence_for_all(layers: Sequence[LayerSpec]) -> None:
    cache = make_paged(layers=layers)
    read_prompt(cache, TEXT).close()
    for block in windowed_blocks(cache, TEXT):
        each = cache._hash_blocks(TEXT, NO_SALT)[block]._replace(group=1)
        cache.pool.unpublish(cache.pool.find(each))  # type: ignore[arg-type]
    first, second = open_sequence(cache, TEXT), open_sequence(cache, TEXT)
    assert (first.found, second.found) == (0, 48)
    assert not second.ready()
    enter(cache, (first, TEXT))
    enter(cache, (second, TEXT[48:]))
    for sequence in (first, second):
        assert_sees_its_text(cache, sequence, TEXT)
        sequence.close()
    assert_nothing_leaked(cache)


@models
def test_why_a_prefix_cannot_be_used_is_said(layers: Sequence[LayerSpec]) -> None:
    cache = make_paged(layers=layers)
    assert open_sequence(cache, TEXT).miss == "cold"
    cache = make_paged(layers=layers)
    sequence = open_sequence(cache, TEXT)
    read_in_rows(cache, sequence, TEXT, 4)
    evict(cache, 99)
    short = open_sequence(cache, TEXT[:30])
    assert (short.found, short.miss) == (0, "evicted")
    assert open_sequence(cache, TEXT).miss is None


# ---------------------------------------------------------------- values that are not finite
@models
def test_what_is_not_finite_is_not_found_even_if_the_window_has_passed_it(layers: Sequence[LayerSpec]) -> None:
    cache = make_paged(layers=layers)
    sequence = open_sequence(cache, TEXT)
    read_in_rows(cache, sequence, TEXT[:16], 4)
    block = sequence.windowed[0][3]
    enter(cache, (sequence, TEXT[16:]))
    assert block not in sequence.windowed[0].values(), "the window has passed it"
    store = next(store for store in cache.stores if 0 in store.layers)
    store.v(0)[cache.pool.columns(block)[0], 0, -1, 2] = math.nan
    sequence.spoiled = True
    sequence.close()
    cache.check_integrity()
    assert find_cached(cache, TEXT) == 12
    assert_nothing_leaked(cache)


def test_the_start_says_which_layers_keep_windows(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        make_paged(layers=TWO_WINDOWS)
    assert "strategy 'it': 2 of 4 layers keep a window of 6 tokens, 1 of 4 layers keep a window of 11" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO"):
        cache = make_paged()
    assert not caplog.text
    assert cache.inspect()["layer_groups"] == [{"window": None, "layers": 1}]
