"""The summaries of full blocks: for each dimension the largest and the smallest number among a block's keys.

They lie behind the keys and values of a block of one KV head, [2, D] for each layer in which queries select, and are
shared, copied and freed with it. They have the dtype in which keys are read (float32 for quantized ones), so nothing is
rounded and what they bound stays bounded. Summaries of centered keys leave out the center, which would add the same to
the bounds of all blocks. Which blocks have a summary is known on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from cache_strategies.quest.options import selects_in
from kernels.kv_formats import KVFormat, Plane
from kernels.store import ALIGN, KVStore
from kernels.types import LayerSpec

BATCH_BYTES = 4 << 20  # of the keys that are summarized at once; about the size of a cache


def compute_summary_bytes(spec: LayerSpec, format: KVFormat) -> int:
    """Return the bytes of a block's summary for one KV head of a layer, in whole cache lines; 0 without selection."""
    size = 2 * spec.head_dim * format.read_dtype.itemsize if selects_in(spec) else 0
    return -(-size // ALIGN) * ALIGN


class _Run(NamedTuple):
    """Layers that follow each other in a block and have the same dimensions."""

    keys: Plane  # [blocks, layers, block_size, D]
    summaries: Tensor  # [blocks, layers, 2 D], the largest numbers first


class BlockSummaries:
    """The summaries in all blocks of a store of split heads."""

    def __init__(self, store: KVStore, layers: Mapping[int, LayerSpec]) -> None:
        """View the room behind the keys and values of these layers, which are all of the store's."""
        self._store = store
        self._runs: list[_Run] = []
        self._by_layer: dict[int, Tensor] = {}
        offset = store.extra_offset

        def kind_of(layer: int) -> tuple[bool, int, int]:
            return selects_in(layers[layer]), layers[layer].head_dim, layers[layer].v_head_dim

        for (selects, _, _), group in groupby(layers, key=kind_of):
            if selects:
                offset = self._add_run(list(group), layers, offset)

    def _add_run(self, numbers: list[int], layers: Mapping[int, LayerSpec], offset: int) -> int:
        """View the layers of a run, whose summaries begin at a byte of a block; return the byte behind them."""
        store, count = self._store, len(numbers)
        dtype, dim = store.formats.k.read_dtype, layers[numbers[0]].head_dim
        plane, _ = store.planes(numbers[0])
        step = store.k_offset(numbers[1]) - store.k_offset(numbers[0]) if count > 1 else 0  # bytes
        keys = plane._replace(center=None).map(lambda part: _repeat_layers(part[:, 0], count, step))
        summaries = store.memory.view(dtype).as_strided(
            (store.num_blocks, count, 2 * dim),
            (store.page_bytes // dtype.itemsize, 2 * dim, 1),
            offset // dtype.itemsize,
        )
        self._runs.append(_Run(keys, summaries))
        self._by_layer |= {layer: summaries[:, i] for i, layer in enumerate(numbers)}
        return offset + count * 2 * dim * dtype.itemsize

    def get(self, layer: int) -> Tensor:
        """Return the summaries of a layer in all blocks, [blocks, 2 D]: the largest numbers, then the smallest."""
        return self._by_layer[layer]

    def fill(self, blocks: Tensor) -> None:
        """Compute the summaries of these blocks [n] int64, which are full. May be repeated."""
        for run in self._runs:
            batch = max(1, BATCH_BYTES // max(1, run.keys.numbers[0].nbytes))
            for some in blocks.split(batch):
                smallest, largest = run.keys.select(some).decode().aminmax(dim=2)
                run.summaries[some] = torch.cat((largest, smallest), dim=2)


def _repeat_layers(first: Tensor, count: int, step: int) -> Tensor:
    """View the first layer's tensor [blocks, ...] and those `step` bytes behind each other as [blocks, layers, ...]."""
    strides = first.stride()
    return first.as_strided(
        (first.shape[0], count, *first.shape[1:]),
        (strides[0], step // first.itemsize, *strides[1:]),
        first.storage_offset(),
    )
