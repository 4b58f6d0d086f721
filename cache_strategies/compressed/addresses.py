"""Groups of layers whose addresses are the same, and the table of each group. Knows neither scorers nor budgets.

Layers that keep equally many keys share blocks and addresses. If each layer has a budget of its own, each is a group;
if each KV head has one, the blocks of a group hold one head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache_strategies.base import Row
from cache_strategies.compressed.seat import CompressedSeat
from kernels.types import LayerSpec, Slots


class AddressGroup(NamedTuple):
    """Layers with the same addresses."""

    layers: Sequence[int]
    num_heads: int  # KV heads of each layer
    window: int | None  # the model's own, of these layers
    split_heads: bool  # whether each KV head has blocks of its own

    @property
    def num_columns(self) -> int:
        """The number of lists of blocks that a sequence has: one, or one for each KV head."""
        return self.num_heads if self.split_heads else 1


def group_layers(layers: Sequence[LayerSpec], *, by_layer: bool, by_head: bool) -> list[AddressGroup]:
    """Divide a model's layers into groups: one of all layers, if they are alike and keep equally many keys."""
    if not (by_layer or by_head) and len({(spec.num_kv_heads, spec.window) for spec in layers}) == 1:
        return [AddressGroup(range(len(layers)), layers[0].num_kv_heads, layers[0].window, False)]
    return [
        AddressGroup([i], spec.num_kv_heads, spec.window, by_head and spec.window is None)
        for i, spec in enumerate(layers)
    ]


class GroupTable:
    """The block table of a group of layers, and the arrays of a step, on the host and on the device.

    All are allocated once. On a CPU the kernels read the host's memory; elsewhere it is copied once per step.
    """

    def __init__(self, group: AddressGroup, seats: int, width: int, block_size: int, device: torch.device) -> None:
        self.group = group
        self._block_size = block_size
        columns = group.num_columns
        shape = (seats, columns) if group.split_heads else (seats,)
        self._host_table: NDArray[np.int32] = np.zeros((seats * columns, width), np.int32)
        self._host_rows: NDArray[np.int32] = np.zeros((2, *shape), np.int32)  # table_row, start
        self._table = torch.from_numpy(self._host_table).to(device)
        self._rows = torch.from_numpy(self._host_rows).to(device)

    def write(self, seat_index: int, column: int, first: int, blocks: Sequence[int]) -> None:
        """Write blocks of a seat's column into the table, the first of them as its `first`-th block."""
        row = self._host_table[seat_index * self.group.num_columns + column]
        row[first : first + len(blocks)] = blocks

    def make_slots(self, rows: Sequence[Row[CompressedSeat]], number: int, q_start: Tensor) -> Slots:
        """Return the addresses of a step's rows in this group, which is the `number`-th one of their seats."""
        kept = [[count + row.seat.num_new for count in row.seat.groups[number].counts] for row in rows]
        columns, B = self.group.num_columns, len(rows)
        at = [[row.seat.index * columns + column for column in range(columns)] for row in rows]
        shape = (B, columns) if self.group.split_heads else (B,)
        self._host_rows[0, :B] = np.array(at, np.int32).reshape(shape)
        self._host_rows[1, :B] = np.array(kept, np.int32).reshape(shape)
        if self._table.device.type != "cpu":
            self._table.copy_(torch.from_numpy(self._host_table))
            self._rows.copy_(torch.from_numpy(self._host_rows))
        lengths = [row.num_tokens for row in rows]
        return Slots(
            self._table,
            self._block_size,
            self._rows[0, :B],
            q_start,
            self._rows[1, :B],
            num_decode=lengths.count(1),
            max_q=max(lengths, default=1),
            max_kv=max((max(counts) + n for counts, n in zip(kept, lengths, strict=True)), default=1),
        )
