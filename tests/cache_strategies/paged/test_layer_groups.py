"""Layers are divided by window into parts of nearly equal bytes, so that all groups can use the same pages."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from cache_strategies.paged.layer_groups import MAX_PADDING, LayerLayout, divide_layers
from kernels.store import compute_block_bytes
from kernels.types import LayerSpec

FULL = LayerSpec(4, 8, 256, 256)
WINDOW = FULL._replace(window=1024)
GEMMA_3_4B = [FULL if i % 6 == 5 else WINDOW for i in range(34)]


def divide(layers: Sequence[LayerSpec], *, max_seq_len: int = 8192, block_size: int = 32) -> LayerLayout:
    return divide_layers(layers, block_size, max_seq_len, torch.bfloat16)


def shape_of(layout: LayerLayout) -> list[tuple[int | None, list[int]]]:
    """Return the window of each group, and the number of layers in each of its parts."""
    return [(group.window, [len(part) for part in group.parts]) for group in layout.groups]


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        (GEMMA_3_4B, [(None, [5]), (1024, [5, 5, 5, 5, 5, 4])]),
        ([WINDOW, FULL] * 13, [(None, [13]), (1024, [13])]),
        ([FULL] * 21 + [WINDOW] * 7, [(None, [7, 7, 7]), (1024, [7])]),
        ([WINDOW] * 32, [(None, []), (1024, [32])]),
        (
            [FULL, WINDOW, WINDOW._replace(window=128), WINDOW],
            [(None, [1]), (1024, [1, 1]), (128, [1])],
        ),
    ],
    ids=["Gemma 3", "Gemma 2", "Qwen 2", "Mistral", "two windows"],
)
def test_layers_are_grouped_by_window(layers: Sequence[LayerSpec], shape: list[tuple[int | None, list[int]]]) -> None:
    layout = divide(layers)
    assert shape_of(layout) == shape
    assert layout.padding <= MAX_PADDING


@pytest.mark.parametrize(
    "layers",
    [
        [FULL] * 4,
        [WINDOW._replace(window=8192)] * 4,
        [FULL, WINDOW._replace(window=8100)],
        [FULL._replace(head_dim=64, v_head_dim=64), WINDOW._replace(num_kv_heads=32, window=7000)],
    ],
    ids=["no window", "a window of the whole text", "almost", "more padding than it saves"],
)
def test_layers_are_one_group_if_that_takes_no_more_memory(layers: Sequence[LayerSpec]) -> None:
    layout = divide(layers)
    assert shape_of(layout) == [(None, [len(layers)])]
    assert layout.padding == 0
    assert layout.part_bytes == compute_block_bytes(layers, 32, torch.bfloat16)


@pytest.mark.parametrize("_", range(60))
def test_parts_have_all_layers_once_and_fit(_: int, rng: random.Random) -> None:
    kinds = [
        LayerSpec(rng.choice([1, 2, 4]), 8, dim := rng.choice([16, 32]), dim, window=rng.choice([None, 5, 40, 64]))
        for _ in range(3)
    ]
    layers = [rng.choice(kinds) for _ in range(rng.randint(1, 30))]
    layout = divide(layers, max_seq_len=(length := rng.choice([64, 500, 4000])), block_size=8)
    assert sorted(i for part in layout.parts for i in part) == list(range(len(layers)))
    sizes = [compute_block_bytes([spec], 8, torch.bfloat16) for spec in layers]
    assert max(sum(sizes[i] for i in part) for part in layout.parts) == layout.part_bytes
    assert layout.groups[0].window is None
    assert all(
        {layers[i].window for part in group.parts for i in part} == {group.window} for group in layout.groups[1:]
    )
    whole = sum(sizes) * -(-length // 8)
    assert layout.part_bytes * layout.count_part_blocks(length, longest_row=1) <= whole


def test_what_padding_wastes_is_said() -> None:
    assert divide(GEMMA_3_4B).describe() == (
        "29 of 34 layers keep a window of 1024 tokens; a block has up to 5 layers, and at most 2.9% of the memory is "
        "padding"
    )
