"""The block table, and `BlockTableCache`, the base class of strategies that locate keys and values through one.

Knows the `Slots` argument of the kernels; not how blocks are allocated. All host arrays are int32 and allocated once.
If kernels run on the CPU they read the same memory; for another device the arrays are copied once per step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import add
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from typing_extensions import TypeVar

from cache_strategies.base import CacheSetup, KVCache, Options, Plan, Row, Seat
from cache_strategies.memory import Region
from cache_strategies.types import Geometry
from config.errors import SettingsError
from kernels.arguments import check_entries
from kernels.ops import KVLocation
from kernels.store import KVStore, compute_block_bytes
from kernels.types import LayerSpec, Slots

Int32 = NDArray[np.int32]


class TableOptions(Options):
    """Options of every kind that keeps keys and values in a `KVStore`."""

    kv_dtype: Literal["model", "int8"] = Field(
        "model",
        description="dtype of keys and values; int8 (a scale per vector) takes half the memory of bfloat16 and rounds",
    )


def resolve_kv_dtype(options: Options, geometry: Geometry) -> torch.dtype:
    """Return the dtype in which keys and values are stored.

    Raises SettingsError for int8 if a head dimension is not a multiple of 4.
    """
    if getattr(options, "kv_dtype", "model") == "model":
        return geometry.kv_dtype
    if unsupported := {dim for spec in geometry.layers for dim in (spec.head_dim, spec.v_head_dim) if dim % 4}:
        dims = ", ".join(map(str, sorted(unsupported)))
        raise SettingsError(
            f"kv_dtype=int8 needs head dimensions that are multiples of 4, this model has {dims}: use kv_dtype=model"
        )
    return torch.int8


class TableSeat(Seat):
    """A seat with a row of the block table: `index` is the row's number, `blocks` are the numbers of its blocks."""

    __slots__ = ("blocks", "index")

    def __init__(self, index: int, blocks: list[int], length: int = 0) -> None:
        super().__init__(length)
        self.index = index
        self.blocks = blocks

    @property
    def num_kept(self) -> int:
        """The number of tokens in the seat's blocks: `length`, unless a strategy drops tokens and overrides it."""
        return self.length


TableSeatT = TypeVar("TableSeatT", bound=TableSeat, default=TableSeat)


class BlockTable:
    """The block table [max seats, max blocks per seat] and a step's arrays for `Slots`, on the host and the device.

    If layers are divided among several stores, there is a table for each store; a seat has the same row in all of them.
    """

    def __init__(
        self, seats: int, width: int, block_size: int, device: torch.device, num_blocks: Sequence[int]
    ) -> None:
        """Allocate tables for `seats` sequences of up to `width` blocks; `num_blocks` has the blocks of each store."""
        self._block_size = block_size
        self._num_blocks = num_blocks
        self.host_tables: Int32 = np.zeros((len(num_blocks), seats, width), np.int32)
        self._host_steps: Int32 = np.zeros((3, seats + 1), np.int32)  # table_row, q_start, start
        self._all_tables = torch.from_numpy(self.host_tables).to(device)  # on "cpu": a view of the host's array
        self._steps = torch.from_numpy(self._host_steps).to(device)
        self.tables = self._all_tables.unbind()  # by store
        # The rows of all tables, one table after the other: row `store * seats + index` is that of a seat for a store
        self.all_rows = self._all_tables.flatten(0, 1)
        # by number of rows: (table_row, q_start, start), views of `_steps` for that many rows
        self._views_by_num_rows: dict[int, tuple[Tensor, ...]] = {}
        self._is_dirty = False  # whether the host's table has changed since it was copied to the device
        self._free = list(range(seats))[::-1]  # indices of unused table rows

    @property
    def is_full(self) -> bool:
        return not self._free

    def allocate_row(self) -> int:
        """Allocate a table row for a new seat, and return its index."""
        return self._free.pop()

    def release_row(self, index: int) -> None:
        assert index not in self._free
        self._free.append(index)

    def write(self, seat: TableSeat, first: int = 0) -> None:
        """Write seat.blocks[first:] into the seat's row of the table."""
        self.write_blocks(seat.index, first, seat.blocks[first:])

    def write_blocks(self, index: int, first: int, blocks: Sequence[int], store: int = 0) -> None:
        """Write the ids of blocks into a row of a store's table, from column `first` on."""
        row = self.host_tables[store, index, first : first + len(blocks)]
        if row.tolist() != [*blocks]:  # usually they are equal
            row[:] = blocks
            self._is_dirty = True

    def make_slots(self, rows: Sequence[Row[TableSeatT]], *, sinks: int = 0, ring: int = 0) -> Slots:
        """Return the `Slots` of a step's rows, of which decode rows (one token) must come first.

        If `ring` is not 0, each seat has one block: `sinks` slots for its first tokens, then a ring buffer of `ring`
        slots.
        """
        lengths = [row.num_tokens for row in rows]
        starts = [row.seat.num_kept for row in rows]
        num_decode = lengths.count(1)
        assert 1 not in lengths[num_decode:], "decode rows must come first"
        B = len(rows)
        self._host_steps[:, : B + 1] = (
            [*(row.seat.index for row in rows), 0],
            list(accumulate(lengths, initial=0)),
            [*starts, -1],
        )
        self._copy_to_device()
        table_row, q_start, start = self._get_row_views(B)
        slots = Slots(
            self.tables[0],
            self._block_size,
            table_row,
            q_start,
            start,
            num_decode=num_decode,
            max_q=max(lengths, default=1),
            max_kv=max(map(add, starts, lengths), default=1),
            sinks=sinks,
            ring=ring,
        )
        return slots if self._all_tables.device.type == "cpu" else self._check_on_host(slots, B)

    def _check_on_host(self, slots: Slots, num_rows: int) -> Slots:
        """Check addresses by the host's arrays, from which they were copied: no operation then waits for the device.

        Raises ValueError if they are outside of the stores.
        """
        table_row, q_start, start = torch.from_numpy(self._host_steps[:, : num_rows + 1])
        host = replace(slots, table_row=table_row[:num_rows], q_start=q_start, start=start[:num_rows])
        tables = (replace(host, table=torch.from_numpy(table)) for table in self.host_tables)
        num_tokens = [check_entries("plan", *each) for each in zip(tables, self._num_blocks, strict=True)]
        return replace(slots, num_tokens=num_tokens[0])

    def make_slots_by_store(self, rows: Sequence[Row[TableSeatT]]) -> list[Slots]:
        """Return the `Slots` of a step's rows for each store; they differ in their table only."""
        slots = self.make_slots(rows)
        return [slots, *(replace(slots, table=table) for table in self.tables[1:])]

    def _get_row_views(self, rows: int) -> tuple[Tensor, ...]:
        """Return (table_row, q_start, start): views of the device's arrays for `rows` rows, made only once."""
        if rows not in self._views_by_num_rows:
            steps = self._steps
            self._views_by_num_rows[rows] = steps[0, :rows], steps[1, : rows + 1], steps[2, :rows]
        return self._views_by_num_rows[rows]

    def _copy_to_device(self) -> None:
        """Copy the host arrays to the device and wait for it, since the next step overwrites the same host memory."""
        if self._all_tables.device.type == "cpu":
            return
        self._steps.copy_(torch.from_numpy(self._host_steps))
        if self._is_dirty:
            self._all_tables.copy_(torch.from_numpy(self.host_tables))
            self._is_dirty = False


class TablePlan(Plan[TableSeatT]):
    """A plan whose keys and values are addressed by `Slots` in the cache's store, in all layers alike."""

    def __init__(self, cache: BlockTableCache[TableSeatT], rows: Sequence[Row[TableSeatT]], slots: Slots) -> None:
        self.rows = rows
        self._cache = cache
        self._location = KVLocation(cache.store, slots, cache.window)

    def kv_location(self, layer_idx: int) -> KVLocation:
        return self._location

    def gather_kv(self, layer_idx: int, row: int) -> tuple[Tensor, Tensor, Tensor]:
        seat, num_tokens = self.rows[row]
        setup, location = self._cache.setup, self.kv_location(layer_idx)
        positions = self._cache.visible_positions(seat.length + num_tokens, setup.geometry.layers[layer_idx])
        assert positions is not None, "a strategy that does not know them beforehand gathers keys in another way"
        k, v = setup.ops.gather(location.store, layer_idx, location.at, row, positions)
        return k, v, positions


class DividedPlan(TablePlan[TableSeatT]):
    """A plan whose layers are divided among several stores, each with a table of its own."""

    def __init__(self, cache: BlockTableCache[TableSeatT], rows: Sequence[Row[TableSeatT]], slots: Sequence[Slots]):
        super().__init__(cache, rows, slots[0])
        locations = [KVLocation(store, at, cache.window) for store, at in zip(cache.stores, slots, strict=True)]
        self._locations = [locations[store] for store in cache.store_by_layer]

    def kv_location(self, layer_idx: int) -> KVLocation:
        return self._locations[layer_idx]


class BlockTableCache(KVCache[TableSeatT]):
    """A cache that keeps its keys and values in the blocks of a `KVStore`, which it finds through a block table.

    Subclasses choose the size of blocks and allocate them. They may divide the layers among several stores.
    """

    sinks = 0  # number of first tokens of a sequence that a ring buffer never overwrites
    ring = 0  # number of slots of the ring buffer after the sinks; 0: there is no ring buffer
    store: KVStore  # the first store
    window: int | None = None  # maximum number of keys that a query attends to, beside the sinks; None: all keys

    def __init__(self, setup: CacheSetup, options: Options) -> None:
        super().__init__(setup, options)
        geometry = setup.geometry
        tokens, blocks = self.block_layout(options, geometry)
        layers, dtype = geometry.layers, resolve_kv_dtype(options, geometry)
        parts = self.divide_layers(options, geometry)
        self.stores = self.make_stores(parts, tokens, dtype)
        self.store = self.stores[0]
        numbers = {layer: number for number, part in enumerate(parts) for layer in part}
        self.store_by_layer = [numbers[layer] for layer in range(len(layers))]
        setup.ops.prepare(layers, geometry.kv_dtype, dtype)
        num_blocks = [store.num_blocks for store in self.stores]
        self.table = BlockTable(geometry.max_seats, blocks, tokens, setup.memory.device, num_blocks)
        self.seats: set[TableSeatT] = set()
        # number of KV heads by their layers' own window (None: the layer has no window), in all layers together
        self._heads_by_window = Counter[int | None]()
        for spec in layers:
            self._heads_by_window[spec.window] += spec.num_kv_heads

    @classmethod
    @abstractmethod
    def block_layout(cls, options: Any, geometry: Geometry) -> tuple[int, int]:
        """Return (number of tokens in a block, number of blocks of the longest sequence)."""

    @classmethod
    def divide_layers(cls, options: Any, geometry: Geometry) -> Sequence[Sequence[int]]:
        """Return the numbers of the layers in each store."""
        return [range(len(geometry.layers))]

    @abstractmethod
    def make_stores(self, parts: Sequence[Sequence[int]], block_size: int, dtype: torch.dtype) -> list[KVStore]:
        """Return the store of each part of the layers, in regions that are made for them."""

    def make_store(self, layers: Sequence[int], block_size: int, dtype: torch.dtype) -> tuple[Region, KVStore]:
        """Return a new region for the keys and values of some layers, and the store in it."""
        stored = {i: self.setup.geometry.layers[i] for i in layers}
        region = self.setup.memory.region(compute_block_bytes(stored.values(), block_size, dtype))
        return region, KVStore(region, stored, block_size, dtype)

    @property
    def is_quantized(self) -> bool:
        """Whether keys and values are stored in another dtype than they were computed in."""
        return self.store.dtype is not self.setup.geometry.kv_dtype

    def plan(self, rows: Sequence[Row[TableSeatT]]) -> Plan[TableSeatT]:
        if len(self.stores) > 1:
            return DividedPlan(self, rows, self.table.make_slots_by_store(rows))
        return TablePlan(self, rows, self.table.make_slots(rows, sinks=self.sinks, ring=self.ring))

    def visible_positions(self, length: int, spec: LayerSpec) -> Tensor | None:
        last = length - 1
        position = torch.arange(length, device=self.setup.memory.device)
        seen = position >= 0
        if self.window is not None:
            seen &= (position > last - self.window) | (position < self.sinks)
        if spec.window is not None:
            seen &= position > last - spec.window
        return position[seen]

    def count_dropped_tokens(self, seat: TableSeatT) -> int:
        return self._count_unseen_tokens(seat.length)

    def token_budget(self, length: int) -> int | None:
        return None if self.window is None else length - self._count_unseen_tokens(length)

    def _count_unseen_tokens(self, length: int) -> int:
        """Return how many of the first `length` tokens the next one would use, but cannot see, as a mean over heads."""
        if self.window is None:
            return 0
        first_seen = max(0, length - self.window + 1)  # of the window; sinks lie before it
        dropped = 0
        for own_window, heads in self._heads_by_window.items():
            first_used = 0 if own_window is None else max(0, length - own_window + 1)
            dropped += heads * max(0, first_seen - max(first_used, self.sinks))
        return dropped // self._heads_by_window.total()
