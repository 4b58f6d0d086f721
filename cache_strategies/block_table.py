"""What strategies that address their keys through a block table have in common: table rows, the plan, plain commits.

Knows the `Slots` contract of the kernels; not how blocks are obtained. All host arrays are int32, allocated once, and
share their memory with the tensors that kernels read (on the CPU) or are copied to them in one go (elsewhere).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from operator import add
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from typing_extensions import TypeVar

from cache_strategies.base import CacheSetup, Geometry, KVCache, Options, Plan, Row, Seat, SeatShape
from config.errors import SettingsError
from kernels.ops import KVLocation
from kernels.store import KVStore, compute_block_bytes
from kernels.types import LayerSpec, Slots

Int32 = NDArray[np.int32]
INT32_MAX = 2**31 - 1  # slots


class TableOptions(Options):
    """Options of every kind that keeps its keys in a store."""

    kv_dtype: Literal["model", "int8"] = Field(
        "model", description="of keys and values; int8, with a scale for each vector, takes half of bfloat16 and rounds"
    )


def resolve_kv_dtype(options: Options, geometry: Geometry) -> torch.dtype:
    """Return the dtype of keys and values. Raises SettingsError if the model's heads do not suit it."""
    if getattr(options, "kv_dtype", "model") == "model":
        return geometry.kv_dtype
    if odd := {dim for spec in geometry.layers for dim in (spec.head_dim, spec.v_head_dim) if dim % 4}:
        raise SettingsError(f"kv_dtype int8 is for heads of a multiple of 4 dimensions, and this model has {odd}")
    return torch.int8


class TableSeat(Seat):
    """A seat with a row in the block table."""

    __slots__ = ("blocks", "index")

    def __init__(self, index: int, blocks: list[int], length: int = 0) -> None:
        super().__init__(length)
        self.index = index
        self.blocks = blocks


TableSeatT = TypeVar("TableSeatT", bound=TableSeat, default=TableSeat)


class BlockTable:
    """The block table [R, M] and the arrays of a step."""

    def __init__(self, seats: int, width: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._host_table: Int32 = np.zeros((seats, width), np.int32)
        self._host_steps: Int32 = np.zeros((4, seats + 1), np.int32)  # row_seat, q_start, start, kept
        self._table = torch.from_numpy(self._host_table).to(device)  # on the CPU the very same memory
        self._steps = torch.from_numpy(self._host_steps).to(device)
        self._views_by_num_rows: dict[int, tuple[Tensor, ...]] = {}  # the arrays of a step
        self._is_dirty = False  # the host's table, since it was copied
        self._free = list(range(seats))[::-1]

    @property
    def is_full(self) -> bool:
        return not self._free

    def take(self) -> int:
        """Return the index of a free row, for a new seat."""
        return self._free.pop()

    def release(self, index: int) -> None:
        assert index not in self._free
        self._free.append(index)

    def write(self, seat: TableSeat, first: int = 0) -> None:
        """Write the seat's blocks from the `first` on into its row."""
        row, blocks = self._host_table[seat.index, first : len(seat.blocks)], seat.blocks[first:]
        if row.tolist() != blocks:  # in most steps they are the same
            row[:] = blocks
            self._is_dirty = True

    def make_slots(self, rows: Sequence[Row[TableSeatT]], *, sinks: int = 0, ring: int = 0) -> Slots:
        """Return the addresses of a step."""
        lengths = [row.num_tokens for row in rows]
        starts = [row.seat.length for row in rows]
        num_decode = lengths.count(1)
        assert 1 not in lengths[num_decode:], "decode rows stand first"
        B = len(rows)
        max_kept = sinks + ring if ring else INT32_MAX
        self._host_steps[:, : B + 1] = (
            [*(row.seat.index for row in rows), 0],
            list(accumulate(lengths, initial=0)),
            [*starts, -1],
            [*(min(start, max_kept) for start in starts), 0],
        )
        self._copy_to_device()
        row_seat, q_start, start, kept = self._get_row_views(B)
        return Slots(
            self._table,
            self._block_size,
            row_seat,
            q_start,
            start,
            kept,
            num_decode=num_decode,
            max_q=max(lengths, default=1),
            max_kv=max(map(add, starts, lengths), default=1),
            sinks=sinks,
            ring=ring,
        )

    def _get_row_views(self, rows: int) -> tuple[Tensor, ...]:
        """Return the step's arrays cut to `rows` rows; cut once for each number."""
        if rows not in self._views_by_num_rows:
            steps = self._steps
            self._views_by_num_rows[rows] = steps[0, :rows], steps[1, : rows + 1], steps[2, :rows], steps[3, :rows]
        return self._views_by_num_rows[rows]

    def _copy_to_device(self) -> None:
        """Copy the host's arrays and wait for it: the next step writes into the same memory, maybe before the copy."""
        if self._table.device.type == "cpu":
            return
        self._steps.copy_(torch.from_numpy(self._host_steps))
        if self._is_dirty:
            self._table.copy_(torch.from_numpy(self._host_table))
            self._is_dirty = False


class TablePlan(Plan[TableSeatT]):
    """A plan whose keys lie where `Slots` say."""

    def __init__(self, cache: BlockTableCache[TableSeatT], rows: Sequence[Row[TableSeatT]], slots: Slots) -> None:
        self.rows = rows
        self._cache = cache
        self._slots = slots

    @property
    def kv_location(self) -> KVLocation:
        return KVLocation(self._cache.store, self._slots, self._cache.window)

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        setup, store, at = self._cache.setup, self._cache.store, self._slots
        setup.ops.write_kv(store, layer_idx, k, v, at)
        spec = setup.geometry.layers[layer_idx]
        setup.ops.attend(out, q, store, layer_idx, at, spec, window=self._cache.window)

    def gather_kv(self, layer_idx: int, row: int) -> tuple[Tensor, Tensor, Tensor]:
        seat, num_tokens = self.rows[row]
        setup = self._cache.setup
        positions = self._cache.visible_positions(seat.length + num_tokens, setup.geometry.layers[layer_idx])
        k, v = setup.ops.gather(self._cache.store, layer_idx, self._slots, row, positions)
        return k, v, positions


class BlockTableCache(KVCache[TableSeatT]):
    """A cache over one store. A subclass says how large blocks are and where they come from."""

    sinks = 0
    ring = 0
    store: KVStore
    window: int | None = None  # keys that the strategy lets a query see, beside the sinks

    def __init__(self, setup: CacheSetup, options: Options) -> None:
        super().__init__(setup, options)
        geometry = setup.geometry
        tokens, blocks = self.block_layout(options, geometry)
        self.store = KVStore(setup.arena, geometry.layers, tokens, resolve_kv_dtype(options, geometry))
        setup.ops.prepare(geometry.layers, geometry.kv_dtype, self.store.dtype)
        self.table = BlockTable(geometry.max_seats, blocks, tokens, setup.arena.memory.device)
        self.seats: set[TableSeatT] = set()

    @classmethod
    @abstractmethod
    def block_layout(cls, options: Any, geometry: Geometry) -> tuple[int, int]:
        """Return the tokens of a block, and the blocks of the longest sequence."""

    @classmethod
    def seat_shape(cls, options: Any, geometry: Geometry) -> SeatShape:
        tokens, blocks = cls.block_layout(options, geometry)
        return SeatShape(compute_block_bytes(geometry.layers, tokens, resolve_kv_dtype(options, geometry)), blocks)

    @property
    def is_quantized(self) -> bool:
        """Whether keys and values are kept otherwise than they were computed."""
        return self.store.dtype is not self.setup.geometry.kv_dtype

    def plan(self, rows: Sequence[Row[TableSeatT]]) -> Plan[TableSeatT]:
        return TablePlan(self, rows, self.table.make_slots(rows, sinks=self.sinks, ring=self.ring))

    def commit(self, plan: Plan[TableSeatT], tokens: Sequence[Sequence[int]]) -> None:
        for row, ids in zip(plan.rows, tokens, strict=True):
            assert len(ids) <= row.num_tokens
            row.seat.length += len(ids)

    def visible_positions(self, length: int, spec: LayerSpec) -> Tensor:
        last = length - 1
        position = torch.arange(length, device=self.setup.arena.memory.device)
        seen = position >= 0
        if self.window is not None:
            seen &= (position > last - self.window) | (position < self.sinks)
        if spec.window is not None:
            seen &= position > last - spec.window
        return position[seen]

    @property
    def bytes_per_block(self) -> int:
        """What a block takes from the arena, the end of its last page included."""
        return self.store.run * self.setup.arena.page_bytes

    @property
    def bytes_per_token(self) -> float:
        """Of a full block."""
        return self.store.block_bytes / self.store.block_size
