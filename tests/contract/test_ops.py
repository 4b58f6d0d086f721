"""Attention of every backend against float64, over the shapes of models and the lengths around tiles and blocks.

`make test` takes every pair of values once; `make test-slow` takes them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from allpairspy import AllPairs

from kernels.ops import LayerSpec
from kernels.scene import Layout, RowOf, Scene
from tests.contract.brute import attention, everything, seen
from tests.kernels.matrix import BACKENDS, TOLERANCE

OTHER = LayerSpec(3, 3, 40, 72)  # a layer before the one that is tried


class Case(NamedTuple):
    backend: str
    dtype: torch.dtype
    head_dim: int
    group: int
    length: int
    block_size: int
    window: int | None
    layers_before: int


VALUES: Sequence[Sequence[Any]] = (
    list(BACKENDS),
    list(TOLERANCE),
    [64, 80, 96, 128, 256],
    [1, 2, 4, 7, 8],
    [1, 15, 16, 17, 1000, 4097],
    [16, 32, 5000],
    [None, 100],
    [0, 2],
)


def _name(case: Case) -> str:
    return "-".join(str(value).removeprefix("torch.") for value in case)


def _attends(case: Case) -> None:
    spec = LayerSpec(2, 2 * case.group, case.head_dim, case.head_dim, scale=case.head_dim**-0.5)
    chunk = min(9, case.length)
    rows = [RowOf(case.length - 1, 1), RowOf(case.length - chunk, chunk)]
    scene = Scene(
        BACKENDS[case.backend](),
        Layout(case.block_size),
        spec,
        rows if chunk > 1 else rows[:1],
        case.dtype,
        before=[OTHER] * case.layers_before,
    )
    scene.write()
    for i, out in enumerate(scene.attend(window=case.window)):
        keeps = everything if case.window is None else lambda q, k: q - k < case.window
        past = scene.rows[i].past
        mask = seen(spec, case.length, keeps)[past:]
        want = attention(scene.q[i][past:], scene.k[i], scene.v[i], spec, mask)
        assert (out.double() - want).abs().max() < TOLERANCE[case.dtype], f"row {i}"


@pytest.mark.parametrize("case", [Case(*values) for values in AllPairs(VALUES)], ids=_name)
def test_attention_in_float64_every_pair(case: Case) -> None:
    _attends(case)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_in_float64_the_full_product(backend: str) -> None:
    for values in _product(backend):
        _attends(Case(*values))


def _product(backend: str) -> Iterator[tuple[Any, ...]]:
    return product([backend], *VALUES[1:])


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_beyond_32_bits(backend: str) -> None:
    spec, layout = LayerSpec(2, 4, 64, 64, scale=0.125), Layout(32)
    far = 1 + (1 << 32) // (2 * 2 * 32 * 64 * 2)  # blocks in 4 GiB
    rows = [RowOf(99, 1), RowOf(40, 9)]
    scenes = [Scene(BACKENDS[backend](), layout, spec, rows, torch.bfloat16, unused_blocks=n) for n in (3, far)]
    assert scenes[1].arena.memory.nbytes > 1 << 32
    for scene in scenes:
        scene.write()
    for near, beyond in zip(*(scene.attend() for scene in scenes), strict=True):
        assert torch.equal(near, beyond)
