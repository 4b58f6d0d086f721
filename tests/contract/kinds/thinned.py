"""thinned: a strategy that drops every second group of older tokens; an example of dropping in compact().

A text has a boundary at every multiple of `every`, and rows end there. At a boundary, tokens before the latest `recent`
stay if their group of `group` positions has an even number. What stays is moved to the first slots of the sequence's
block, in order, so addresses count kept tokens:

    slots | kept at the last boundary | tokens since: fewer than every |
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from cache_strategies.base import CacheSetup, Plan, Row
from cache_strategies.block_table import TableOptions, TableSeat
from cache_strategies.single_block import SingleBlockCache
from cache_strategies.types import Contract, Geometry
from kernels.ops import KVLocation


class ThinnedOptions(TableOptions):
    """The options of an instance, as given in the settings."""

    recent: int = Field(256, ge=1, le=65536, description="latest tokens at a boundary that all stay")
    group: int = Field(16, ge=1, le=65536, description="tokens of a group; of older groups every second one stays")
    every: int = Field(128, ge=1, le=65536, description="tokens from one boundary to the next")


class ThinnedSeat(TableSeat):
    """A seat that knows the positions of the tokens that were kept at the last boundary."""

    __slots__ = ("boundary", "kept", "num_moved")

    def __init__(self, index: int, blocks: list[int], length: int = 0) -> None:
        super().__init__(index, blocks, length)
        self.miss = "window"  # why open() finds nothing cached: what is dropped would be missing in other texts
        self.kept: list[int] = []
        self.boundary = 0
        self.num_moved = 0  # layers that a compaction has moved which failed before its end

    @property
    def num_kept(self) -> int:
        return len(self.kept) + self.length - self.boundary

    def list_positions(self, num_new: int = 0) -> list[int]:
        """Return the positions of the tokens in the seat's block, with those of `num_new` tokens after them."""
        return [*self.kept, *range(self.boundary, self.length + num_new)]


class ThinnedPlan(Plan[ThinnedSeat]):
    """A plan whose addresses count kept tokens; layers with a window of their own know where it begins among these."""

    def __init__(self, cache: ThinnedCache, rows: Sequence[Row[ThinnedSeat]]) -> None:
        self.rows = rows
        self._cache = cache
        self._positions = [row.seat.list_positions(row.num_tokens) for row in rows]
        self._slots = cache.table.make_slots(rows)
        self._by_window = {spec.window: self._locate(spec.window) for spec in cache.setup.geometry.layers}

    def _locate(self, window: int | None) -> KVLocation:
        """Return the addresses for layers with a window, or without one."""
        slots = self._slots
        if window is not None:
            first_seen = [  # by token of the step: the index of the oldest kept token in its window
                bisect_right(positions, row.seat.length + i - window)
                for positions, row in zip(self._positions, self.rows, strict=True)
                for i in range(row.num_tokens)
            ]
            device = self._cache.store.device
            slots = replace(slots, window_start=torch.tensor(first_seen, dtype=torch.int32, device=device))
        return KVLocation(self._cache.store, slots, None)

    def kv_location(self, layer_idx: int) -> KVLocation:
        return self._by_window[self._cache.setup.geometry.layers[layer_idx].window]

    def gather_kv(self, layer_idx: int, row: int) -> tuple[Tensor, Tensor, Tensor]:
        positions, window = self._positions[row], self._cache.setup.geometry.layers[layer_idx].window
        first = 0 if window is None else bisect_right(positions, positions[-1] - window)
        store, slots, _ = self.kv_location(layer_idx)
        indices = torch.arange(first, len(positions), device=store.device)
        k, v = self._cache.setup.ops.gather(store, layer_idx, slots, row, indices)
        return k, v, torch.tensor(positions[first:], device=store.device)


class ThinnedCache(SingleBlockCache[ThinnedSeat]):
    """A cache with one block for each sequence, in which the kept tokens lie in order."""

    interface_version = 2
    options_type = ThinnedOptions
    options: ThinnedOptions
    seat_type = ThinnedSeat
    test_options = ({"recent": 12, "group": 3, "every": 16}, {"recent": 1, "group": 1, "every": 7})

    def __init__(self, setup: CacheSetup, options: ThinnedOptions) -> None:
        super().__init__(setup, options)
        self.contract = Contract(
            exact=False, forkable=True, rewind=0, replayable=True, chunk_invariant=True, max_row=options.every
        )

    @classmethod
    def block_layout(cls, options: Any, geometry: Geometry) -> tuple[int, int]:
        """Return (slots of a block, 1): room for what a boundary leaves of the longest text, and the tokens since."""
        old = max(0, geometry.max_seq_len - options.recent)
        return min(geometry.max_seq_len, old // 2 + options.group + options.recent + options.every), 1

    def row_limit(self, seat: ThinnedSeat) -> int:
        return self.options.every - seat.length % self.options.every

    def fork(self, seat: ThinnedSeat) -> ThinnedSeat | None:
        child = super().fork(seat)  # copies the block
        if child is not None:
            child.kept, child.boundary = seat.kept, seat.boundary
        return child

    def plan(self, rows: Sequence[Row[ThinnedSeat]]) -> ThinnedPlan:
        return ThinnedPlan(self, rows)

    def compact(self, seat: ThinnedSeat) -> int | None:
        if seat.length % self.options.every or seat.length == seat.boundary:
            return None
        before, positions = self.count_dropped_tokens(seat), seat.list_positions()
        stay = [index for index, position in enumerate(positions) if self._stays(position, seat.length)]
        src = torch.tensor(stay, device=self.store.device) + seat.blocks[0] * self.store.block_size
        dst = torch.arange(len(stay), device=self.store.device) + seat.blocks[0] * self.store.block_size
        # A call that raises is repeated: layers whose tokens have been moved must not be moved again, and the seat
        # changes last.
        for layer in range(seat.num_moved, len(self.setup.geometry.layers)):
            self.setup.ops.copy_tokens(self.store, layer, src, dst)
            seat.num_moved = layer + 1
        seat.kept, seat.boundary, seat.num_moved = [positions[i] for i in stay], seat.length, 0
        return self.count_dropped_tokens(seat) - before

    def _stays(self, position: int, length: int) -> bool:
        return position >= length - self.options.recent or position // self.options.group % 2 == 0

    def count_dropped_tokens(self, seat: ThinnedSeat) -> int:
        positions, dropped, heads = seat.list_positions(), 0, 0
        for spec in self.setup.geometry.layers:
            first = 0 if spec.window is None else max(0, seat.length + 1 - spec.window)  # of what the next token uses
            kept = len(positions) - bisect_left(positions, first)
            dropped += (seat.length - first - kept) * spec.num_kv_heads
            heads += spec.num_kv_heads
        return dropped // heads
