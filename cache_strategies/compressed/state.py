"""What `compressed` knows of a sequence: which positions its heads keep, in which blocks. Knows no stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cache_strategies.base import KVSequence

State = dict[str, Tensor]
States = dict[tuple[int, int], tuple[State, State]]  # by layer and first head: `Past.state` and `Past.key_state`


def count_state_bytes(states: States) -> int:
    """Return the bytes of all tensors that a scorer remembers of a sequence."""
    return sum(x.nbytes for pair in states.values() for state in pair for x in state.values())


class KeptTokens:
    """The keys that one group of layers keeps of a sequence.

    A group has one column, or with split heads one for each KV head: a list of blocks, and a number of keys.
    """

    __slots__ = ("blocks", "counts", "positions")

    def __init__(self, num_layers: int, num_heads: int, num_columns: int, device: torch.device) -> None:
        self.blocks: list[list[int]] = [[] for _ in range(num_columns)]
        self.counts = [0] * num_columns  # keys at the last boundary; all later tokens are kept as well
        # Of the keys at the last boundary, [layers, heads, S], ascending; heads with fewer keys than others end with -1
        self.positions = torch.empty(num_layers, num_heads, 0, dtype=torch.int64, device=device)

    def exceeds(self, budget: int, num_new: int) -> bool:
        """Return whether the columns hold more than `budget` keys on average, with `num_new` new tokens in each."""
        return sum(self.counts) + num_new * len(self.counts) > budget * len(self.counts)

    def list_positions(self, first_new: int, end: int) -> list[Tensor]:
        """Return the positions [layers, heads of the column, S] of all keys by column, new tokens included.

        The tokens from first_new to end - 1 have come since the last boundary.
        """
        new = torch.arange(first_new, end, device=self.positions.device)
        parts = self.positions.split(1, dim=1) if len(self.counts) > 1 else [self.positions]
        return [
            torch.cat((part[:, :, :count], new.expand(*part.shape[:2], -1)), 2)
            for part, count in zip(parts, self.counts, strict=True)
        ]


class Selection(NamedTuple):
    """The keys of a group that stay: how many, at which positions, and from where to where each is moved."""

    counts: Sequence[int]  # by column
    positions: Tensor  # [layers, heads, most kept], padded with -1
    src: Tensor  # slots to read, [layers, kept, heads of a block]; with split heads, the columns one after another
    dst: Tensor  # slots to write, [kept]: the first ones of each column


@dataclass
class Move:
    """A compaction whose keys are chosen. It moves them layer by layer, and goes on where it was if a layer fails."""

    selections: Sequence[Selection | None]  # by group; None: all keys stay
    states: States  # what the scorer remembers then
    num_moved: int = 0  # layers
    num_finished: int = 0  # groups whose positions and counts are those after it


class TappedQueries(NamedTuple):
    """The queries of a row's tokens from position `first` on, and of rows after it: [layers, tokens, Hq, D]."""

    first: int
    queries: Tensor


class CompressedState(KVSequence):
    """A sequence: what its groups of layers keep of it, and what its scorer remembers."""

    def __init__(self, index: int, groups: list[KeptTokens]) -> None:
        self.miss = "window"
        self.index = index  # number of the sequence among the open ones: its rows of the tables
        self.groups = groups
        self.boundary = 0  # position of the last boundary: all later tokens are kept by all heads
        self.query_block: int | None = None  # the block with the latest queries, while a boundary is near
        self.tapped: TappedQueries | None = None  # of the latest row
        self.states: States = {}  # forks share them until their next boundaries
        self.state_bytes = 0  # of `states`
        self.move: Move | None = None  # while a compaction is under way

    @property
    def num_new(self) -> int:
        """The number of tokens since the last boundary."""
        return self.length - self.boundary
