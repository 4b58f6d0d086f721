"""contiguous: one run of memory a sequence, long enough for max_seq_len. The baseline: exact, simple, generous.

A sequence's keys of one layer are one dense tensor, which `view` hands out without a copy.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cache_strategies.base import KEEPS_EVERYTHING, CacheSetup, Geometry, Seat
from cache_strategies.slab import SlabCache
from cache_strategies.table import TableOptions, TableSeat


class ContiguousCache(SlabCache):
    """Slots are positions."""

    options_type = TableOptions

    def __init__(self, setup: CacheSetup, options: TableOptions) -> None:
        super().__init__(setup, options)
        self.contract = KEEPS_EVERYTHING._replace(exact=not self.rounds)

    @classmethod
    def block_plan(cls, options: Any, geometry: Geometry) -> tuple[int, int]:
        return geometry.max_seq_len, 1

    def view(self, seat: Seat, layer: int) -> tuple[Tensor, Tensor]:
        """K [H, length, D] and V [H, length, Dv] of a seat, in place: they see later tokens enter."""
        assert isinstance(seat, TableSeat)
        assert not self.rounds, "int8 means nothing without its scales"
        block = seat.blocks[0]
        return self.store.k(layer)[block, :, : seat.length], self.store.v(layer)[block, :, : seat.length]
