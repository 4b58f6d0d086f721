"""The memory of `compressed`: stores and tables by group of layers, blocks of sequences, and how many they need.

Knows neither scorers nor when keys are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cache_strategies.base import CacheSetup
from cache_strategies.block_table import resolve_kv_dtype
from cache_strategies.compressed.addresses import AddressGroup, GroupTable, group_layers
from cache_strategies.compressed.options import Budgets, CompressedOptions
from cache_strategies.compressed.seat import CompressedSeat
from cache_strategies.types import Geometry
from kernels.store import KVStore, Plane, compute_block_bytes


class CompressedMemory:
    """The stores and tables of one cache: one of each for each group of layers."""

    def __init__(self, setup: CacheSetup, options: CompressedOptions, budgets: Budgets) -> None:
        self._setup = setup
        self._options = options
        self._budgets = budgets
        geometry = setup.geometry
        self.specs = geometry.layers
        self.block_size = options.block_size
        self.dtype = resolve_kv_dtype(options, geometry)
        self.groups = make_groups(options, geometry)
        numbers = {layer: number for number, group in enumerate(self.groups) for layer in group.layers}
        self.group_by_layer = [numbers[layer] for layer in range(len(geometry.layers))]
        sizes = list_block_bytes(options, geometry)
        self.regions = [setup.memory.region(size) for size in sizes]
        self.stores = [
            KVStore(
                region,
                {i: geometry.layers[i] for i in group.layers},
                self.block_size,
                self.dtype,
                split_heads=group.split_heads,
            )
            for region, group in zip(self.regions, self.groups, strict=True)
        ]
        self.tables = [
            GroupTable(group, geometry.max_seats, self._count_width(group), self.block_size, setup.memory.device)
            for group in self.groups
        ]

    def _count_width(self, group: AddressGroup) -> int:
        """Return the most blocks in a row of a group's table."""
        geometry, every = self._setup.geometry, self._options.every
        longest = geometry.max_seq_len
        kept = self._budgets.count_kept(group.layers[0], longest) * group.num_columns
        return -(-min(longest, kept + every) // self.block_size)

    def count_bytes(self, number: int, num_blocks: int) -> int:
        """Return the bytes of this number of blocks of a group."""
        return num_blocks * self.regions[number].size

    def release(self, number: int, blocks: Sequence[int]) -> None:
        """Free blocks of a group."""
        self.regions[number].release(blocks)

    def copy_blocks(self, number: int, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy blocks of a group."""
        self._setup.ops.copy_blocks(self.stores[number], list(src), list(dst))

    def extend(self, seat: CompressedSeat, number: int, column: int, num_tokens: int) -> bool:
        """Add the blocks that a column lacks for `num_tokens` tokens; return False if there is not enough memory."""
        blocks = seat.groups[number].blocks[column]
        missing = -(-num_tokens // self.block_size) - len(blocks)
        if missing <= 0:
            return True
        new = self.regions[number].allocate(missing)
        if new is None:
            return False
        self.tables[number].write(seat.index, column, len(blocks), new)
        blocks += new
        return True

    def shrink(self, number: int, blocks: list[int], num_tokens: int) -> None:
        """Free the blocks of a column that `num_tokens` tokens do not need."""
        used = -(-num_tokens // self.block_size)
        self.release(number, blocks[used:])
        del blocks[used:]

    def read_keys(self, seat: CompressedSeat, number: int, layer: int, column: int) -> Tensor:
        """Return the keys [S,H,D] of a seat in a layer, or of one of its split heads (H = 1)."""
        return self._read(self.stores[number].planes(layer)[0], seat, number, column)

    def read_values(self, seat: CompressedSeat, number: int, layer: int, column: int) -> Tensor:
        """Return the values [S,H,Dv] of a seat in a layer, or of one of its split heads (H = 1)."""
        return self._read(self.stores[number].planes(layer)[1], seat, number, column)

    def _read(self, plane: Plane, seat: CompressedSeat, number: int, column: int) -> Tensor:
        kept = seat.groups[number]
        count = kept.counts[column] + seat.num_new
        blocks = torch.tensor(kept.blocks[column][: -(-count // self.block_size)], device=plane.numbers.device)
        numbers = plane.numbers.index_select(0, blocks)  # [blocks, H, block_size, dim]
        if plane.scale is not None:
            numbers = self._setup.ops.dequantize(numbers, plane.scale.index_select(0, blocks))
        # by head in memory, as scorers read them
        return numbers.transpose(0, 1).flatten(1, 2)[:, :count].transpose(0, 1)


# -------------------------------------------------------------------- sizes
def make_groups(options: CompressedOptions, geometry: Geometry) -> list[AddressGroup]:
    """Return the groups of a model's layers that keep equally many keys."""
    return group_layers(geometry.layers, by_layer=options.by_layer != "uniform", by_head=options.by_head)


def list_block_bytes(options: CompressedOptions, geometry: Geometry) -> list[int]:
    """Return the bytes of a block of each group."""
    dtype, sizes = resolve_kv_dtype(options, geometry), []
    for group in make_groups(options, geometry):
        specs = [geometry.layers[i] for i in group.layers]
        stored = [spec._replace(num_kv_heads=1) if group.split_heads else spec for spec in specs]
        sizes.append(compute_block_bytes(stored, options.block_size, dtype))
    return sizes


def count_column_blocks(num_tokens: int, group: AddressGroup, block_size: int) -> int:
    """Return the most blocks for `num_tokens` keys of each column, however the columns share them."""
    if group.num_columns == 1:
        return -(-num_tokens // block_size)
    return -(-num_tokens * group.num_columns // block_size) + group.num_columns


def count_peak_blocks(options: CompressedOptions, geometry: Geometry, num_tokens: int) -> list[int]:
    """Return for each group the most blocks of a sequence of `num_tokens` tokens."""
    budgets, counts = Budgets(options, geometry), []
    for group in make_groups(options, geometry):
        kept = budgets.count_kept(group.layers[0], num_tokens)
        counts.append(count_column_blocks(min(num_tokens, kept + options.every), group, options.block_size))
    return counts
