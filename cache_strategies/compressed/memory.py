"""The memory of `compressed`: how layers are divided, stores and tables by group of layers, blocks of sequences.

Knows neither scorers nor when keys are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from cache_strategies.base import CacheSetup
from cache_strategies.block_table import BlockTable, TableGroup, resolve_kv_formats
from cache_strategies.compressed.addresses import AddressGroup, group_layers
from cache_strategies.compressed.options import Budgets, CompressedOptions
from cache_strategies.compressed.state import CompressedState
from cache_strategies.types import Geometry
from kernels.kv_formats import KVFormats, Plane
from kernels.store import KVStore, compute_block_bytes


@dataclass(frozen=True)
class CompressedLayout:
    """How the layers of a model are divided, and how many keys they keep."""

    options: CompressedOptions
    geometry: Geometry
    windows: Sequence[int | None]  # by layer: of layers that keep what their next query sees, and not the budget

    @cached_property
    def groups(self) -> Sequence[AddressGroup]:
        """The groups of layers that keep equally many keys."""
        by_layer = self.options.by_layer != "uniform"
        return group_layers(self.geometry.layers, self.windows, by_layer=by_layer, by_head=self.options.by_head)

    @cached_property
    def budgets(self) -> Budgets:
        return Budgets(self.options, self.windows)

    @property
    def formats(self) -> KVFormats:
        return resolve_kv_formats(self.options, self.geometry)

    def list_block_bytes(self) -> list[int]:
        """Return the bytes of a block of each group."""
        sizes = []
        for group in self.groups:
            specs = [self.geometry.layers[i] for i in group.layers]
            stored = [spec._replace(num_kv_heads=1) if group.split_heads else spec for spec in specs]
            sizes.append(compute_block_bytes(stored, self.options.block_size, self.formats))
        return sizes

    def count_peak_blocks(self, num_tokens: int) -> list[int]:
        """Return for each group the most blocks of a sequence of `num_tokens` tokens."""
        counts = []
        for group in self.groups:
            kept = self.budgets.count_kept(group.layers[0], num_tokens)
            most = min(num_tokens, kept + self.options.every)
            counts.append(count_column_blocks(most, group, self.options.block_size))
        return counts


def count_column_blocks(num_tokens: int, group: AddressGroup, block_size: int) -> int:
    """Return the most blocks for `num_tokens` keys of each column, however the columns share them."""
    if group.num_columns == 1:
        return -(-num_tokens // block_size)
    return -(-num_tokens * group.num_columns // block_size) + group.num_columns


class CompressedMemory:
    """The stores and tables of one cache: one of each for each group of layers."""

    def __init__(self, setup: CacheSetup, layout: CompressedLayout) -> None:
        self._setup = setup
        self._layout = layout
        geometry = setup.geometry
        self.specs = geometry.layers
        self.block_size = layout.options.block_size
        self.formats = layout.formats
        self.groups = layout.groups
        numbers = {layer: number for number, group in enumerate(self.groups) for layer in group.layers}
        self.group_by_layer = [numbers[layer] for layer in range(len(geometry.layers))]
        self.regions = [setup.memory.region(size) for size in layout.list_block_bytes()]
        self.stores = [
            KVStore(
                region,
                {i: geometry.layers[i] for i in group.layers},
                self.block_size,
                self.formats,
                split_heads=group.split_heads,
            )
            for region, group in zip(self.regions, self.groups, strict=True)
        ]
        columns = [group.num_columns for group in self.groups]
        num_blocks = [store.num_blocks for store, n in zip(self.stores, columns, strict=True) for _ in range(n)]
        width = max(map(self._count_width, self.groups))
        self.table = BlockTable(geometry.max_seats, width, self.block_size, setup.memory.device, num_blocks)
        firsts = [sum(columns[:number]) for number in range(len(columns))]
        self.tables = [
            TableGroup(self.table, first, group.num_columns, by_head=group.split_heads)
            for first, group in zip(firsts, self.groups, strict=True)
        ]

    def _count_width(self, group: AddressGroup) -> int:
        """Return the most blocks in a row of a group's table."""
        longest = self._setup.geometry.max_seq_len
        kept = self._layout.budgets.count_kept(group.layers[0], longest) * group.num_columns
        return -(-min(longest, kept + self._layout.options.every) // self.block_size)

    def release(self, number: int, blocks: Sequence[int]) -> None:
        """Free blocks of a group."""
        self.regions[number].release(blocks)

    def copy_blocks(self, number: int, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy blocks of a group."""
        self._setup.ops.copy_blocks(self.stores[number], list(src), list(dst))

    def extend(self, sequence: CompressedState, number: int, column: int, num_tokens: int) -> bool:
        """Add the blocks that a column lacks for `num_tokens` tokens; return False if there is not enough memory."""
        blocks = sequence.groups[number].blocks[column]
        missing = -(-num_tokens // self.block_size) - len(blocks)
        if missing <= 0:
            return True
        new = self.regions[number].allocate(missing)
        if new is None:
            return False
        self.tables[number].write(sequence.index, column, len(blocks), new)
        blocks += new
        return True

    def shrink(self, number: int, blocks: list[int], num_tokens: int) -> None:
        """Free the blocks of a column that `num_tokens` tokens do not need."""
        used = -(-num_tokens // self.block_size)
        self.release(number, blocks[used:])
        del blocks[used:]

    def read_keys(self, sequence: CompressedState, number: int, layer: int, column: int) -> Tensor:
        """Return the keys [S,H,D] of a sequence in a layer, or of one of its split heads (H = 1)."""
        plane, _ = self.stores[number].planes(layer)
        if self.groups[number].split_heads:
            plane = plane.take_head(column)
        return self._read(plane, sequence, number, column)

    def read_values(self, sequence: CompressedState, number: int, layer: int, column: int) -> Tensor:
        """Return the values [S,H,Dv] of a sequence in a layer, or of one of its split heads (H = 1)."""
        return self._read(self.stores[number].planes(layer)[1], sequence, number, column)

    def _read(self, plane: Plane, sequence: CompressedState, number: int, column: int) -> Tensor:
        kept = sequence.groups[number]
        count = kept.counts[column] + sequence.num_new
        blocks = torch.tensor(kept.blocks[column][: -(-count // self.block_size)], device=plane.numbers.device)
        # by head in memory, as scorers read them
        return plane.decode_blocks(blocks).movedim(2, 0).flatten(1, 2)[:, :count].transpose(0, 1)
