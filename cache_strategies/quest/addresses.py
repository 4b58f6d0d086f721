"""The addresses of a step in layers whose KV heads have blocks of their own: all keys, or the blocks that rows choose.

The block table has a table for each head, so a sequence's head is a row of `BlockTable.all_rows`. Rows that choose
blocks get a table of their own in each layer; to the addresses of the other rows they are padding, and vice versa.
Arrays of addresses are allocated once. Knows how many blocks a row reads, not which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache_strategies.base import Rows
from cache_strategies.block_table import BlockTable
from cache_strategies.paged.state import PagedState
from cache_strategies.quest.options import NUM_PROTECTED
from cache_strategies.quest.selection import Candidates, TextSizes, make_candidates
from cache_strategies.quest.summaries import BlockSummaries
from kernels.store import KVStore
from kernels.types import Slots

PADDING = -1  # as the index of a row's first token


class HeadGroup(NamedTuple):
    """Layers in one store of split heads that have the same number of KV heads."""

    layers: Sequence[int]
    num_heads: int
    store: KVStore
    summaries: BlockSummaries


class Chosen(NamedTuple):
    """Rows of a step that choose blocks, and the sizes of their texts."""

    rows: Sequence[int]  # their numbers among all rows of the step
    sizes: Sequence[TextSizes]


class ChoosingRows(NamedTuple):
    """The S rows of a step that choose, and their table in each layer.

    A row's table has the first block and the last full one, which all queries read, then those that it selects, and at
    last the one that is being written: the order of the others does not matter, as they are full.
    """

    which: Tensor | slice  # their numbers among the rows of the step
    blocks: Tensor  # [S, H, blocks of the longest text] int32: the ids of all their blocks
    candidates: Candidates
    tables: Tensor  # [layers, S, H, most blocks that a row reads] int32
    slots: Slots  # with the table of the first layer
    others: Slots | None  # of the rows that read all their keys; None: there are none


class HeadAddresses:
    """A step's addresses in a group of layers."""

    def __init__(self, group: HeadGroup, table: BlockTable, num_read: int) -> None:
        """Allocate arrays for the rows of a step; a row that chooses reads at most `num_read` blocks."""
        self.group = group
        self._table = table
        sequences, heads, device = table.max_seats, group.num_heads, table.all_rows.device
        # (table_row, start), (start without the rows that choose), (table_row, start) of those that choose
        self._host: NDArray[np.int32] = np.zeros((5, sequences, heads), np.int32)
        self._arrays = torch.from_numpy(self._host).to(device)  # on "cpu": a view of the host's array
        self._tables = torch.zeros((len(group.layers), sequences * heads * num_read), dtype=torch.int32, device=device)
        self._number = {layer: i for i, layer in enumerate(group.layers)}
        self.all: Slots  # of all rows
        self._step: ChoosingRows | None = None  # None: no row chooses

    @property
    def step(self) -> ChoosingRows:
        """The rows of the step that choose."""
        assert self._step is not None
        return self._step

    def update(self, rows: Rows[PagedState], base: Slots, chosen: Chosen) -> None:
        """Set the addresses of a step, of which `base` are those in layers without split heads."""
        B, host = len(rows), self._host
        index = np.array([each.index for each in rows.sequences], np.int32)
        start = np.array([each.length for each in rows.sequences], np.int32)[:, None]
        host[0, :B] = index[:, None] + np.arange(self.group.num_heads) * self._table.max_seats
        host[1, :B] = start
        if chosen.rows:
            self._set_chosen(chosen, start)
        if self._arrays.device.type != "cpu":
            self._arrays.copy_(torch.from_numpy(host))
        views = self._arrays[:, :B]
        self.all = replace(base, table=self._table.all_rows, table_row=views[0], start=views[1])
        self._step = self._make_step(chosen, views, base) if chosen.rows else None

    def _set_chosen(self, chosen: Chosen, start: NDArray[np.int32]) -> None:
        """Fill the host's arrays for the rows that choose, and for the others."""
        B, host, which = len(start), self._host, list(chosen.rows)
        num_read = np.array([each.num_read for each in chosen.sizes], np.int32)[:, None]
        host[2, :B] = start
        host[2, which] = PADDING
        host[3, :B], host[4, :B] = 0, PADDING
        host[3, which] = np.arange(len(which) * self.group.num_heads).reshape(len(which), -1)
        host[4, which] = (num_read - 1) * self._table.block_size + start[which] % self._table.block_size

    def _make_step(self, chosen: Chosen, views: Tensor, base: Slots) -> ChoosingRows:
        """Return the addresses of the rows that choose, and of the others, whose arrays have been filled."""
        which, sizes, device = list(chosen.rows), chosen.sizes, views.device
        is_first = which == list(range(len(which)))
        rows = slice(len(which)) if is_first else torch.tensor(which, device=device)
        longest, width = max(each.num_blocks for each in sizes), max(each.num_read for each in sizes)
        blocks = self._table.all_rows[:, :longest][views[0][rows].long()]  # [S, H, longest]
        S, H, _ = blocks.shape
        positions = torch.tensor([[0, n - 2, n - 1] for n, _ in sizes], device=device)  # of what all queries read
        protected = blocks.gather(2, positions[:, None].expand(S, H, NUM_PROTECTED))
        tables = self._tables[:, : S * H * width].view(-1, S, H, width)
        tables[..., : NUM_PROTECTED - 1] = protected[..., :-1]
        last = torch.tensor([[n - 1] for _, n in sizes], device=device)[:, None].expand(S, H, 1)
        tables.scatter_(3, last.expand(len(tables), S, H, 1), protected[..., -1:].expand(len(tables), S, H, 1))
        most = width * self._table.block_size  # keys that a row reads
        slots = replace(base, table=tables[0].flatten(0, 1), table_row=views[3], start=views[4], max_kv=most)
        others = replace(self.all, start=views[2]) if len(which) < len(views[0]) else None
        return ChoosingRows(rows, blocks, make_candidates(blocks, sizes), tables, slots, others)

    def get_selected(self, layer: int) -> Tensor:
        """Return the columns of a layer's table for the blocks that rows select, [S, H, most that a row selects]."""
        return self.step.tables[self._number[layer], :, :, NUM_PROTECTED - 1 :]

    def address(self, layer: int) -> Slots:
        """Return the addresses in a layer of the rows that select blocks, which they have done."""
        step = self.step
        return replace(step.slots, table=step.tables[self._number[layer]].flatten(0, 1))

    def list_read(self, layer: int, number: int, size: TextSizes) -> Tensor:
        """Return which blocks of its text [H, num_read] the row `number` of those that select reads in a layer."""
        ids = self.step.tables[self._number[layer], number, :, : size.num_read]
        own = self.step.blocks[number, :, : size.num_blocks]
        is_read = (own[:, :, None] == ids[:, None]).any(2)  # [H, num_blocks]
        return is_read.nonzero()[:, 1].view(len(ids), size.num_read)
