"""thinned: a strategy that drops every second group of older tokens; an example of dropping in compact().

A text has a boundary at every multiple of `every`, and rows end there. At a boundary, tokens before the latest `recent`
stay if their group of `group` positions has an even number. What stays is moved to the first slots of the sequence's
block, in order, so addresses count kept tokens:

    slots | kept at the last boundary | tokens since: fewer than every |
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from cache_strategies.base import CacheSetup, Locations, Rows
from cache_strategies.block_table import TableOptions
from cache_strategies.single_block import SingleBlockCache, SingleBlockSequence
from cache_strategies.types import Contract, Geometry
from kernels.ops import KVLocation
from kernels.types import Slots


class ThinnedOptions(TableOptions):
    """The options of an instance, as given in the settings."""

    recent: int = Field(256, ge=1, le=65536, description="latest tokens at a boundary that all stay")
    group: int = Field(16, ge=1, le=65536, description="tokens of a group; of older groups every second one stays")
    every: int = Field(128, ge=1, le=65536, description="tokens from one boundary to the next")


class ThinnedSequence(SingleBlockSequence):
    """A sequence that knows the positions of the tokens that were kept at the last boundary."""

    cache: ThinnedCache
    miss = "window"  # why open() finds nothing cached: what is dropped would be missing in other texts

    def __init__(self, cache: ThinnedCache, block: int, length: int = 0) -> None:
        super().__init__(cache, block, length)
        self.kept: list[int] = []
        self.boundary = 0
        self.num_moved = 0  # layers that a compaction has moved which failed before its end
        self._set_next_boundary()

    def _set_next_boundary(self) -> None:
        every = self.cache.options.every
        self.stop = (self.length // every + 1) * every

    @property
    def num_kept(self) -> int:
        return len(self.kept) + self.length - self.boundary

    def list_positions(self, end: int) -> list[int]:
        """Return the positions of the tokens in the sequence's block, up to position `end`."""
        return [*self.kept, *range(self.boundary, end)]

    def commit(self, ids: Sequence[int]) -> None:
        super().commit(ids)
        self._set_next_boundary()

    def fork(self) -> ThinnedSequence | None:
        child = super().fork()  # copies the block
        if child is not None:
            child.kept, child.boundary = self.kept, self.boundary
        return child

    def compact(self) -> bool:
        cache = self.cache
        if self.length % cache.options.every or self.length == self.boundary:
            return False
        positions = self.list_positions(self.length)
        stay = [index for index, position in enumerate(positions) if cache.stays(position, self.length)]
        first_slot = self.blocks[0] * cache.store.block_size
        src = torch.tensor(stay, device=cache.store.device) + first_slot
        dst = torch.arange(len(stay), device=cache.store.device) + first_slot
        # A call that raises is repeated: layers whose tokens have been moved must not be moved again, and what the
        # sequence says of itself changes last.
        for layer in range(self.num_moved, len(cache.setup.geometry.layers)):
            cache.setup.ops.copy_tokens(cache.store, layer, src, dst)
            self.num_moved = layer + 1
        self.kept, self.boundary, self.num_moved = [positions[i] for i in stay], self.length, 0
        return len(stay) < len(positions)


class ThinnedCache(SingleBlockCache[ThinnedSequence]):
    """A cache with one block for each sequence, in which the kept tokens lie in order."""

    interface_version = 3
    options_type = ThinnedOptions
    options: ThinnedOptions
    sequence_type = ThinnedSequence
    test_options = ({"recent": 12, "group": 3, "every": 16}, {"recent": 1, "group": 1, "every": 7})

    def __init__(self, setup: CacheSetup, options: ThinnedOptions) -> None:
        super().__init__(setup, options)
        self.contract = Contract(exact=False, rewind=0)

    @classmethod
    def block_layout(cls, options: Any, geometry: Geometry) -> tuple[int, int]:
        """Return (slots of a block, 1): room for what a boundary leaves of the longest text, and the tokens since."""
        old = max(0, geometry.max_seq_len - options.recent)
        return min(geometry.max_seq_len, old // 2 + options.group + options.recent + options.every), 1

    def locate(self, rows: Rows[ThinnedSequence]) -> Locations:
        """Return addresses that count kept tokens; layers with a window know where it begins among these."""
        slots = self.table.make_slots(rows)
        by_window = {
            spec.window: KVLocation(self.store, self._add_window(slots, rows, spec.window), None)
            for spec in self.setup.geometry.layers
        }
        self._located = [by_window[spec.window] for spec in self.setup.geometry.layers]
        return Locations(self._located)

    def _add_window(self, slots: Slots, rows: Rows[ThinnedSequence], window: int | None) -> Slots:
        """Return slots with the index of the oldest kept token in the window of each token of the step."""
        if window is None:
            return slots
        first_seen = [
            bisect_right(each.list_positions(rows.end(row)), position - window)
            for row, each in enumerate(rows.sequences)
            for position in range(each.length, rows.end(row))
        ]
        return replace(slots, window_start=torch.tensor(first_seen, dtype=torch.int32, device=self.store.device))

    def gather(self, layer: int, rows: Rows[ThinnedSequence], row: int) -> tuple[Tensor, Tensor, Tensor]:
        positions = rows.sequences[row].list_positions(rows.end(row))
        window, location = self.setup.geometry.layers[layer].window, self._located[layer]
        assert location is not None
        first = 0 if window is None else bisect_right(positions, positions[-1] - window)
        indices = torch.arange(first, len(positions), device=self.store.device)
        k, v = self.setup.ops.gather(self.store, layer, location.at, row, indices)
        return k, v, torch.tensor(positions[first:], device=self.store.device)

    def stays(self, position: int, boundary: int) -> bool:
        """Return whether a token is kept at a boundary after it."""
        return position >= boundary - self.options.recent or position // self.options.group % 2 == 0

    def count_visible(self, layer: int, length: int) -> int:
        window, boundary = self.setup.geometry.layers[layer].window, length - length % self.options.every
        first = 0 if window is None else max(0, length + 1 - window)  # of what the next token uses
        return sum(self.stays(position, boundary) for position in range(first, length))
