"""A sequence under `compressed`: which positions its heads keep, in which blocks. Knows neither stores nor scorers."""

from __future__ import annotations

import torch
from torch import Tensor

from cache_strategies.base import Seat

State = dict[str, Tensor]


class KeptTokens:
    """The keys that one group of layers keeps of a sequence.

    A group has one column, or with split heads one for each KV head: a list of blocks, and a number of keys.
    """

    __slots__ = ("blocks", "counts", "positions", "spare")

    def __init__(self, num_layers: int, num_heads: int, num_columns: int) -> None:
        self.blocks: list[list[int]] = [[] for _ in range(num_columns)]
        self.spare: list[int] = []  # blocks to which the next compaction moves what stays
        self.counts = [0] * num_columns  # keys at the last boundary; all later tokens are kept as well
        # Of the keys at the last boundary, [layers, heads, S], ascending; heads with fewer keys than others end with -1
        self.positions = torch.empty(num_layers, num_heads, 0, dtype=torch.int64)


class CompressedSeat(Seat):
    """A seat, what its groups of layers keep, and what its scorer remembers."""

    __slots__ = ("boundary", "groups", "index", "query_blocks", "states")

    def __init__(self, index: int, groups: list[KeptTokens]) -> None:
        super().__init__()
        self.miss = "window"
        self.index = index  # number of the seat among the open ones: its rows of the tables
        self.groups = groups
        self.boundary = 0  # position of the last boundary: all later tokens are kept by all heads
        self.query_blocks: list[int] = []  # blocks with the latest queries, while a boundary is near
        self.states: dict[tuple[int, int], tuple[State, State]] = {}  # of the scorer, by layer and first head

    @property
    def num_new(self) -> int:
        """The number of tokens since the last boundary."""
        return self.length - self.boundary
