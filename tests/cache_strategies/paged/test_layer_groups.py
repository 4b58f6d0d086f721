"""Layers are grouped by their window, and a sequence of any length has a known number of blocks in each group."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from cache_strategies.paged.layer_groups import LayerLayout, group_by_window
from kernels.types import LayerSpec

FULL = LayerSpec(4, 8, 256, 256)
WINDOW = FULL._replace(window=1024)
GEMMA_3_4B = [FULL if i % 6 == 5 else WINDOW for i in range(34)]


def group(layers: Sequence[LayerSpec], *, by_head: bool = False) -> LayerLayout:
    return group_by_window(layers, 32, 8192, by_head=by_head)


def shape_of(layout: LayerLayout) -> list[tuple[int | None, int, int]]:
    """Return the window of each group, its number of layers, and the allocations of a block."""
    return [(each.window, len(each.layers), each.num_columns) for each in layout.groups]


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        (GEMMA_3_4B, [(None, 5, 1), (1024, 29, 1)]),
        ([WINDOW, FULL] * 13, [(None, 13, 1), (1024, 13, 1)]),
        ([WINDOW] * 32, [(None, 0, 0), (1024, 32, 1)]),
        ([FULL, WINDOW, WINDOW._replace(window=128), WINDOW], [(None, 1, 1), (1024, 2, 1), (128, 1, 1)]),
        ([FULL] * 4, [(None, 4, 1)]),
        ([WINDOW._replace(window=8192)] * 4, [(None, 4, 1)]),
        ([FULL, WINDOW._replace(window=8130)], [(None, 2, 1)]),
    ],
    ids=["Gemma 3", "Gemma 2", "Mistral", "two windows", "no window", "a window of the whole text", "almost"],
)
def test_layers_are_grouped_by_windows_that_drop_something(
    layers: Sequence[LayerSpec], shape: list[tuple[int | None, int, int]]
) -> None:
    layout = group(layers)
    assert shape_of(layout) == shape
    assert layout.has_windows == (len(shape) > 1)
    assert shape_of(layout)[layout.widest_group] == next(each for each in shape if each[1])
    assert [len(each.layers) for each in layout.stored] == [layers for _, layers, _ in shape if layers]


def test_each_head_of_layers_without_a_window_can_have_allocations_of_its_own() -> None:
    layers = [FULL, WINDOW, FULL._replace(num_kv_heads=8)]
    assert shape_of(group(layers, by_head=True)) == [(None, 2, 8), (1024, 1, 1)]
    assert shape_of(group([WINDOW], by_head=True)) == [(None, 0, 0), (1024, 1, 1)]


@pytest.mark.parametrize("_", range(30))
def test_groups_have_all_layers_once(_: int, rng: random.Random) -> None:
    layers = [FULL._replace(window=rng.choice([None, 5, 40, 64])) for _ in range(rng.randint(1, 30))]
    layout = group_by_window(layers, 8, rng.choice([64, 500, 4000]))
    assert sorted(i for each in layout.groups for i in each.layers) == list(range(len(layers)))
    assert layout.groups[0].window is None
    assert all({layers[i].window for i in each.layers} == {each.window} for each in layout.groups[1:])


def test_a_group_with_a_window_has_constantly_many_blocks_of_a_long_text() -> None:
    layout = group(GEMMA_3_4B)
    full, windowed = layout.groups
    assert [layout.count_blocks(full, length, 512) for length in (1, 32, 33, 8192)] == [1, 1, 2, 256]
    # 1,023 tokens in the window lie in 32 blocks, one more is kept, and a row of 512 tokens can touch 17 more
    assert [layout.count_blocks(windowed, length, 512) for length in (1, 33, 1600, 8192)] == [1, 2, 50, 33 + 17]


def test_which_layers_keep_windows_is_said() -> None:
    assert group(GEMMA_3_4B).describe() == "29 of 34 layers keep a window of 1024 tokens"
