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
from cache_strategies.compressed.options import Budgets, CompressedOptions, make_scorer
from cache_strategies.compressed.seat import CompressedSeat
from cache_strategies.types import Geometry
from kernels.store import KVStore, compute_block_bytes


class CompressedMemory:
    """The stores and tables of one cache: one of each for each group of layers."""

    def __init__(self, setup: CacheSetup, options: CompressedOptions, budgets: Budgets) -> None:
        self._setup = setup
        self._options = options
        self._budgets = budgets
        geometry, arena = setup.geometry, setup.arena
        self.block_size = options.block_size
        self.dtype = resolve_kv_dtype(options, geometry)
        self.groups = make_groups(options, geometry)
        numbers = {layer: number for number, group in enumerate(self.groups) for layer in group.layers}
        self.group_by_layer = [numbers[layer] for layer in range(len(geometry.layers))]
        self.stores = [
            KVStore(
                arena,
                {i: geometry.layers[i] for i in group.layers},
                self.block_size,
                self.dtype,
                split_heads=group.split_heads,
            )
            for group in self.groups
        ]
        self.tables = [
            GroupTable(group, geometry.max_seats, self._count_width(group), self.block_size, arena.memory.device)
            for group in self.groups
        ]

    def _count_width(self, group: AddressGroup) -> int:
        """Return the most blocks in a row of a group's table."""
        geometry, every = self._setup.geometry, self._options.every
        longest = geometry.max_seq_len
        kept = self._budgets.count_kept(group.layers[0], longest) * group.num_columns
        return -(-min(longest, kept + every) // self.block_size)

    def allocate(self, number: int, count: int) -> list[int] | None:
        """Return this number of new blocks of a group; None if there is not enough memory."""
        blocks: list[int] = []
        while len(blocks) < count:
            block = self._setup.arena.allocate(self._setup.name, self.stores[number].pages_per_block)
            if block is None:
                self.release(number, blocks)
                return None
            blocks.append(block)
        return blocks

    def release(self, number: int, blocks: Sequence[int]) -> None:
        """Free blocks of a group."""
        for block in blocks:
            self._setup.arena.release(self._setup.name, block, self.stores[number].pages_per_block)

    def extend(self, number: int, blocks: list[int], num_tokens: int) -> bool:
        """Append the blocks that are missing for `num_tokens` tokens; return False if memory is."""
        missing = self.allocate(number, max(0, -(-num_tokens // self.block_size) - len(blocks)))
        blocks += missing or ()
        return missing is not None

    def read_kv(self, seat: CompressedSeat, number: int, layer: int, column: int) -> tuple[Tensor, Tensor]:
        """Return the keys [S,H,D] and values [S,H,Dv] of a seat in a layer, or of one of its split heads (H = 1)."""
        kept, store = seat.groups[number], self.stores[number]
        count = kept.counts[column] + seat.num_new
        blocks = torch.tensor(kept.blocks[column][: -(-count // self.block_size)], device=store.device)
        found = []
        for plane in store.planes(layer):
            numbers = plane.numbers[blocks]  # [blocks, H, block_size, dim]
            if plane.scale is not None:
                numbers = self._setup.ops.dequantize(numbers, plane.scale[blocks])
            found.append(numbers.transpose(1, 2).flatten(0, 1)[:count])
        return found[0], found[1]


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
    """Return for each group the most blocks of a sequence of `num_tokens` tokens, while its keys are moved."""
    budgets, counts = Budgets(options, geometry), []
    last = num_tokens // options.every * options.every  # the last boundary
    for group in make_groups(options, geometry):
        kept = budgets.count_kept(group.layers[0], num_tokens)
        held = count_column_blocks(min(num_tokens, kept + options.every), group, options.block_size)
        is_compacted = last > budgets.count_kept(group.layers[0], last)
        counts.append(held + (count_column_blocks(kept, group, options.block_size) if is_compacted else 0))
    return counts


def count_query_blocks(options: CompressedOptions, geometry: Geometry, sizes: Sequence[int]) -> int:
    """Return the most blocks, of the smallest size, that a sequence's latest queries take."""
    num_queries = make_scorer("compressed", options, ()).num_queries
    if num_queries == 0:
        return 0
    full = [spec for spec in geometry.layers if spec.window is None]
    width = max((spec.num_q_heads * spec.head_dim for spec in full), default=0) * geometry.kv_dtype.itemsize
    vectors = (options.every if num_queries is None else num_queries) * len(full)
    largest = max(sizes)
    return -(-vectors // max(1, largest // max(1, width))) * -(-largest // min(sizes))
