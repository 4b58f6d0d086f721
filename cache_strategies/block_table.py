"""The block table, and `BlockTableCache`, the base class of strategies that locate keys and values through one.

Knows the `Slots` argument of the kernels; not how blocks are allocated. All host arrays are int32 and allocated once.
If kernels run on the CPU they read the same memory; for another device the arrays are copied once per step.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import add
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor
from typing_extensions import TypeVar

from cache_strategies.base import CacheSetup, KVCache, KVSequence, Locations, Options, Rows
from cache_strategies.memory import Region
from cache_strategies.types import Geometry
from cache_strategies.visible import count_dropped_tokens
from config.errors import SettingsError
from kernels.arguments import check_entries
from kernels.kv_formats import INT4, INT8, KVFormat, KVFormats, as_formats
from kernels.ops import KVLocation
from kernels.store import KVStore, compute_block_bytes
from kernels.types import LayerSpec, Slots

log = logging.getLogger(__name__)

Int32 = NDArray[np.int32]
KVDtype = Literal["model", "int8", "int4"]


class TableOptions(Options):
    """Options of every kind that keeps keys and values in a `KVStore`."""

    k_dtype: KVDtype = Field(
        "model",
        description="how keys are stored: as computed, or rounded to int8 (half of bfloat16) or int4 (0.28 of it)",
    )
    v_dtype: KVDtype = Field("model", description="how values are stored; they need fewer bits than keys")
    hadamard: bool = Field(True, description="rotate vectors before they are rounded to int4, which spreads outliers")
    center: bool = Field(
        True, description="subtract the mean of keys before they are rounded to int8 or int4; attention ignores it"
    )

    @model_validator(mode="before")
    @classmethod
    def _read_kv_dtype(cls, values: Any) -> Any:
        """Take `kv_dtype`, the former name of both options."""
        if not isinstance(values, Mapping) or "kv_dtype" not in values:
            return values
        values = dict(values)
        both = values.pop("kv_dtype")
        log.warning("the option kv_dtype is deprecated: use k_dtype = v_dtype = %r", both)
        return {"k_dtype": both, "v_dtype": both} | values


def resolve_kv_formats(options: Options, geometry: Geometry) -> KVFormats:
    """Return the formats in which keys and values are stored: those of the options, by default as computed.

    Raises SettingsError if a head dimension does not suit a format.
    """
    if not isinstance(options, TableOptions):
        return as_formats(geometry.kv_dtype)
    layers = geometry.layers
    k = _resolve_kv_format(options, "k_dtype", geometry.kv_dtype, {spec.head_dim for spec in layers})
    v = _resolve_kv_format(options, "v_dtype", geometry.kv_dtype, {spec.v_head_dim for spec in layers})
    return KVFormats(k._replace(centered=centers_keys(options)), v)


def centers_keys(options: Options) -> bool:
    """Return whether keys are stored minus their mean (`LayerSpec.k_mean`)."""
    return isinstance(options, TableOptions) and options.k_dtype != "model" and options.center


def _resolve_kv_format(
    options: TableOptions, option: Literal["k_dtype", "v_dtype"], computed: torch.dtype, dims: set[int]
) -> KVFormat:
    """Return the format that an option names. Raises SettingsError if a head dimension does not suit it."""
    name: KVDtype = getattr(options, option)
    formats = {"model": KVFormat(computed), "int8": INT8, "int4": INT4._replace(rotated=options.hadamard)}
    format = formats[name]
    if unsupported := sorted(dim for dim in dims if dim % format.divisor):
        raise SettingsError(
            f"{option}={name} needs head dimensions that are multiples of {format.divisor}, this model has "
            f"{', '.join(map(str, unsupported))}: use {option}=model"
        )
    return format


class TableSequence(KVSequence):
    """A sequence with a row of the block table: `index` is the row's number, `blocks` are the numbers of its blocks."""

    def __init__(self, index: int, blocks: list[int], length: int = 0) -> None:
        self.index = index
        self.blocks = blocks
        self.length = self.found = length

    @property
    def num_kept(self) -> int:
        """The number of tokens in the blocks: `length`, unless a strategy drops tokens and overrides it."""
        return self.length


TableSequenceT = TypeVar("TableSequenceT", bound=TableSequence, default=TableSequence)


class BlockTable:
    """The block table [max sequences, max blocks per sequence] and a step's arrays for `Slots`, on host and device.

    If layers are divided among several stores, there is a table for each store; a sequence has the same row in all.
    """

    def __init__(
        self, max_seats: int, width: int, block_size: int, device: torch.device, num_blocks: Sequence[int]
    ) -> None:
        """Allocate tables for `max_seats` sequences of up to `width` blocks; `num_blocks` are those of each store."""
        self.block_size, self.max_seats = block_size, max_seats
        self._num_blocks = num_blocks
        self.host_tables: Int32 = np.zeros((len(num_blocks), max_seats, width), np.int32)
        self._host_steps: Int32 = np.zeros((3, max_seats + 1), np.int32)  # table_row, q_start, start
        self._all_tables = torch.from_numpy(self.host_tables).to(device)  # on "cpu": a view of the host's array
        self._steps = torch.from_numpy(self._host_steps).to(device)
        self.tables = self._all_tables.unbind()  # by store
        # The rows of all tables, one table after the other: `store * max_seats + index` is a sequence for a store
        self.all_rows = self._all_tables.flatten(0, 1)
        # by number of rows: (table_row, q_start, start), views of `_steps` for that many rows
        self._views_by_num_rows: dict[int, tuple[Tensor, ...]] = {}
        self._is_dirty = False  # whether the host's table has changed since it was copied to the device
        self._free = list(range(max_seats))[::-1]  # indices of unused table rows

    @property
    def is_full(self) -> bool:
        return not self._free

    def allocate_row(self) -> int:
        """Allocate a table row for a new sequence, and return its index."""
        return self._free.pop()

    def release_row(self, index: int) -> None:
        assert index not in self._free
        self._free.append(index)

    def write(self, sequence: TableSequence, first: int = 0) -> None:
        """Write sequence.blocks[first:] into the sequence's row of the table."""
        self.write_blocks(sequence.index, first, sequence.blocks[first:])

    def write_blocks(self, index: int, first: int, blocks: Sequence[int], store: int = 0) -> None:
        """Write the ids of blocks into a row of a store's table, from column `first` on."""
        row = self.host_tables[store, index, first : first + len(blocks)]
        if row.tolist() != [*blocks]:  # usually they are equal
            row[:] = blocks
            self._is_dirty = True

    def make_slots(self, rows: Rows[TableSequenceT], *, sinks: int = 0, ring: int = 0) -> Slots:
        """Return the `Slots` of a step's rows.

        If `ring` is not 0, each sequence has one block: `sinks` slots for its first tokens, then a ring buffer of
        `ring` slots.
        """
        starts = [each.num_kept for each in rows.sequences]
        B = len(rows)
        self._host_steps[:, : B + 1] = (
            [*(each.index for each in rows.sequences), 0],
            list(accumulate(rows.counts, initial=0)),
            [*starts, -1],
        )
        self._copy_to_device()
        table_row, q_start, start = self._get_row_views(B)
        slots = Slots(
            self.tables[0],
            self.block_size,
            table_row,
            q_start,
            start,
            num_decode=rows.num_decode,
            max_q=rows.longest,
            max_kv=max(map(add, starts, rows.counts), default=1),
            sinks=sinks,
            ring=ring,
        )
        return slots if self._all_tables.device.type == "cpu" else self._check_on_host(slots, B)

    def make_q_start(self, rows: Rows[Any]) -> Tensor:
        """Return the index of each row's first token, and copy the tables to the device: for groups, before a step."""
        B = len(rows)
        self._host_steps[1, : B + 1] = list(accumulate(rows.counts, initial=0))
        self._copy_to_device()
        return self._get_row_views(B)[1]

    def _check_on_host(self, slots: Slots, num_rows: int) -> Slots:
        """Check addresses by the host's arrays, from which they were copied: no operation then waits for the device.

        Raises ValueError if they are outside of the stores.
        """
        table_row, q_start, start = torch.from_numpy(self._host_steps[:, : num_rows + 1])
        host = replace(slots, table_row=table_row[:num_rows], q_start=q_start, start=start[:num_rows])
        tables = (replace(host, table=torch.from_numpy(table)) for table in self.host_tables)
        num_tokens = [check_entries("locate", *each) for each in zip(tables, self._num_blocks, strict=True)]
        return replace(slots, num_tokens=num_tokens[0])

    def make_slots_by_store(self, rows: Rows[TableSequenceT]) -> list[Slots]:
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


class TableGroup:
    """The addresses of layers that keep equally many keys: a table, or one for each column if KV heads differ.

    Arrays are allocated once, on the host and on the device.
    """

    def __init__(self, table: BlockTable, first_table: int, num_columns: int, *, by_head: bool) -> None:
        """Use the tables of a block table from `first_table` on; with `by_head` each KV head has a table."""
        self._table = table
        self._first = first_table
        self._columns = np.arange(first_table, first_table + num_columns, dtype=np.int32) * table.max_seats
        self._by_head = by_head
        shape = (table.max_seats, num_columns) if by_head else (table.max_seats,)
        self._host: Int32 = np.zeros((2, *shape), np.int32)  # table_row, start
        self._arrays = torch.from_numpy(self._host).to(table.all_rows.device)  # on "cpu": a view of the host's array

    def write(self, index: int, column: int, first: int, blocks: Sequence[int]) -> None:
        """Write blocks of a sequence's column into the table, the first of them as its `first`-th block."""
        self._table.write_blocks(index, first, blocks, self._first + column)

    def make_slots(self, rows: Rows[Any], kept: Sequence[Sequence[int]], q_start: Tensor) -> Slots:
        """Return the addresses of a step's rows; `kept` are the numbers of keys by row and column."""
        B, host = len(rows), self._host
        index = np.array([each.index for each in rows.sequences], np.int32)
        counts = np.array(kept, np.int32).reshape(B, -1)
        host[0, :B] = index[:, None] + self._columns if self._by_head else index
        host[1, :B] = counts if self._by_head else counts[:, 0]
        if self._arrays.device.type != "cpu":
            self._arrays.copy_(torch.from_numpy(host))
        return Slots(
            self._table.all_rows if self._by_head else self._table.tables[self._first],
            self._table.block_size,
            self._arrays[0, :B],
            q_start,
            self._arrays[1, :B],
            num_decode=rows.num_decode,
            max_q=rows.longest,
            max_kv=max((max(each) + n for each, n in zip(kept, rows.counts, strict=True)), default=1),
        )


class BlockTableCache(KVCache[TableSequenceT]):
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
        layers, formats = geometry.layers, resolve_kv_formats(options, geometry)
        parts = self.divide_layers(options, geometry)
        self.stores = self.make_stores(parts, tokens, formats)
        self.store = self.stores[0]
        numbers = {layer: number for number, part in enumerate(parts) for layer in part}
        self.store_by_layer = [numbers[layer] for layer in range(len(layers))]
        setup.ops.prepare(layers, geometry.kv_dtype, formats)
        num_blocks = [store.num_blocks for store in self.stores]
        self.table = BlockTable(geometry.max_seats, blocks, tokens, setup.memory.device, num_blocks)
        self.sequences: set[TableSequenceT] = set()
        self._located: Sequence[KVLocation | None] = ()  # of the latest step, by layer

    @classmethod
    @abstractmethod
    def block_layout(cls, options: Any, geometry: Geometry) -> tuple[int, int]:
        """Return (number of tokens in a block, number of blocks of the longest sequence)."""

    @classmethod
    def divide_layers(cls, options: Any, geometry: Geometry) -> Sequence[Sequence[int]]:
        """Return the numbers of the layers in each store."""
        return [range(len(geometry.layers))]

    @abstractmethod
    def make_stores(self, parts: Sequence[Sequence[int]], block_size: int, formats: KVFormats) -> list[KVStore]:
        """Return the store of each part of the layers, in regions that are made for them."""

    def make_store(self, layers: Sequence[int], block_size: int, formats: KVFormats) -> tuple[Region, KVStore]:
        """Return a new region for the keys and values of some layers, and the store in it."""
        stored = {i: self.setup.geometry.layers[i] for i in layers}
        region = self.setup.memory.region(compute_block_bytes(stored.values(), block_size, formats))
        return region, KVStore(region, stored, block_size, formats)

    @property
    def is_quantized(self) -> bool:
        """Whether keys or values are rounded when they are stored."""
        return self.store.formats.are_quantized

    def locate(self, rows: Rows[TableSequenceT]) -> Locations:
        if len(self.stores) == 1:
            slots = self.table.make_slots(rows, sinks=self.sinks, ring=self.ring)
            location = KVLocation(self.store, slots, self.window)
            self._located = [location] * len(self.store_by_layer)
        else:
            stored = zip(self.stores, self.table.make_slots_by_store(rows), strict=True)
            locations = [KVLocation(store, at, self.window) for store, at in stored]
            self._located = [locations[store] for store in self.store_by_layer]
        return Locations(self._located)

    def gather(self, layer: int, rows: Rows[TableSequenceT], row: int) -> tuple[Tensor, Tensor, Tensor]:
        location = self._located[layer]
        assert location is not None
        positions = self.list_visible_positions(rows.end(row), self.setup.geometry.layers[layer])
        k, v = self.setup.ops.gather(location.store, layer, location.at, row, positions)
        return k, v, positions

    def list_visible_positions(self, length: int, spec: LayerSpec) -> Tensor:
        """Return the positions [S], ascending, that the last of `length` tokens attends to in a layer."""
        last = length - 1
        position = torch.arange(length, device=self.setup.memory.device)
        seen = position >= 0
        if self.window is not None:
            seen &= (position > last - self.window) | (position < self.sinks)
        if spec.window is not None:
            seen &= position > last - spec.window
        return position[seen]

    def count_visible(self, layer: int, length: int) -> int | None:
        if self.window is None:
            return None
        first = max(0, length - self.window + 1)  # of the window; sinks lie before it
        own_window = self.setup.geometry.layers[layer].window
        first_used = 0 if own_window is None else max(0, length - own_window + 1)
        return length - max(first, first_used) + max(0, min(self.sinks, first) - first_used)

    def budget(self, length: int) -> int | None:
        return None if self.window is None else length - count_dropped_tokens(self, length)
