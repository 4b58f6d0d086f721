"""A small example of attention in one layer: rows with a past, memory in which all else is NaN, and a step's slots.

For the self-check, tests and benchmarks. Uses no strategy: blocks are assigned at random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.ops import KVLocation, Ops
from kernels.store import KVStore, Pages, compute_block_bytes
from kernels.types import LayerSpec, Slots

CPU = torch.device("cpu")


class Layout(NamedTuple):
    """How the slots of a row are laid out: slots per block, number of sinks, and slots of the ring (0: no ring)."""

    block_size: int
    sinks: int = 0
    ring: int = 0

    @property
    def kind(self) -> str:
        return f"blocks of {self.block_size}" + (f", {self.sinks} sinks and a ring of {self.ring}" if self.ring else "")


class CaseRow(NamedTuple):
    """A row of the batch: `tokens` new tokens after `past` earlier ones; padding if past is negative."""

    past: int
    tokens: int


class AttentionCase:
    """Rows of one layer: their q, k and v, a store that contains their earlier tokens, and the slots of the step."""

    def __init__(
        self,
        ops: Ops,
        layout: Layout,
        spec: LayerSpec,
        rows: Sequence[CaseRow],
        dtype: torch.dtype,
        device: torch.device = CPU,
        *,
        kv_dtype: torch.dtype | None = None,
        before: Sequence[LayerSpec] = (),
        unused_blocks: int = 3,
        memory: Callable[[int], Tensor] | None = None,
    ) -> None:
        """Write the earlier tokens of each row by `ops`; everything else in memory is NaN.

        `before`: layers that precede this one in each block. `unused_blocks`: blocks at the beginning of memory that no
        row uses. `memory`, if given, allocates the bytes, which are then not filled with NaN: for cases that are too
        large for that.
        """
        self.ops, self.layout, self.spec, self.rows, self.device = ops, layout, spec, rows, device
        self.layer = len(before)
        self.generator = torch.Generator().manual_seed(0)
        self.longest = max(1, *(row.past + row.tokens for row in rows))
        width = -(-(layout.sinks + layout.ring or self.longest) // layout.block_size)
        kv_dtype = kv_dtype or dtype
        page = compute_block_bytes([*before, spec], layout.block_size, kv_dtype)
        pages = width * len(rows) + unused_blocks
        if memory is None:
            self.pages = Pages(pages, page, device)
            self.pages.memory.fill_(0xFF)
        else:
            self.pages = Pages(pages, page, device, memory=memory(pages * page))
        self.store = KVStore(self.pages, [*before, spec], layout.block_size, kv_dtype)
        order = torch.randperm(width * len(rows), generator=self.generator).int() + unused_blocks
        self.table = order.view(len(rows), width).to(device)
        lengths = [max(0, row.past) + row.tokens for row in rows]
        self.q = [self._draw(n, spec.num_q_heads, spec.head_dim, dtype) for n in lengths]
        self.k = [self._draw(n, spec.num_kv_heads, spec.head_dim, dtype) for n in lengths]
        self.v = [self._draw(n, spec.num_kv_heads, spec.v_head_dim, dtype) for n in lengths]
        for i, row in enumerate(rows):
            self.write_past(i, row.past)
        self.at = self.make_slots([(i, row.past, row.tokens) for i, row in enumerate(rows)])

    def _draw(self, n: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(n, heads, dim, generator=self.generator).to(self.device, dtype)

    def write_past(self, row: int, past: int) -> None:
        """Write the first `past` tokens of a row, at most as many at a time as its ring has slots."""
        piece = self.layout.ring or self.longest
        for start in range(0, past, piece):
            end = min(past, start + piece)
            at = self.make_slots([(row, start, end - start)])
            self.ops.write_kv(self.store, self.layer, self.k[row][start:end], self.v[row][start:end], at)

    def make_slots(self, rows: Sequence[tuple[int, int, int]]) -> Slots:
        """Return the addresses of some rows, given as (row of the case, start, tokens), the decode rows first.

        The block table has the rows in reverse order, so that kernels must look them up by row_seat.
        """
        case_rows, starts, sizes = (list(column) for column in zip(*rows, strict=True))
        num_decode = next((i for i, n in enumerate(sizes) if n != 1), len(sizes))
        limit = self.layout.sinks + self.layout.ring if self.layout.ring else self.longest
        return Slots(
            table=self.table.flip(0),
            block_size=self.store.block_size,
            row_seat=self._make_int_tensor(len(self.rows) - 1 - row for row in case_rows),
            q_start=self._make_int_tensor(accumulate(sizes, initial=0)),
            start=self._make_int_tensor(starts),
            kept=self._make_int_tensor(min(max(0, start), limit) for start in starts),
            num_decode=num_decode,
            max_q=max(sizes),
            max_kv=max(start + n for _, start, n in rows),
            sinks=self.layout.sinks,
            ring=self.layout.ring,
        )

    def _make_int_tensor(self, values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)

    def get_step_inputs(self, part: Sequence[Tensor]) -> Tensor:
        """Return q, k or v of the step's tokens [N, heads, dim]; padding is NaN."""
        pieces = [
            x[max(0, row.past) :] if row.past >= 0 else torch.full_like(x, torch.nan)
            for x, row in zip(part, self.rows, strict=True)
        ]
        return torch.cat(pieces)

    def write(self) -> None:
        """Write the keys and values of the step's tokens to the store."""
        self.ops.write_kv(self.store, self.layer, self.get_step_inputs(self.k), self.get_step_inputs(self.v), self.at)

    def attend(self, ops: Ops | None = None, *, window: int | None = None) -> list[Tensor]:
        """Return the output of each row, computed by `ops` (default: those of the case); padding rows stay 7."""
        q = self.get_step_inputs(self.q)
        out = torch.full((len(q), self.spec.num_q_heads, self.spec.v_head_dim), 7.0, dtype=q.dtype, device=q.device)
        (ops or self.ops).attend(out, q, self.store, self.layer, self.at, self.spec, window=window)
        return list(out.split([row.tokens for row in self.rows]))


class Step:
    """Implements `kernels.ops.Attention` for a step whose keys are stored at `kv_locations`."""

    def __init__(self, ops: Ops, specs: Sequence[LayerSpec], kv_locations: Sequence[tuple[slice, KVLocation]]) -> None:
        self._ops, self._specs = ops, specs
        self.kv_locations = kv_locations
        self.positions = torch.cat([_compute_positions(where.at) for _, where in kv_locations])
        self.logit_index = torch.arange(len(self.positions), device=self.positions.device)

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the keys and values of a layer and compute its attention, one slice of the tokens after the other."""
        out, spec = q.new_zeros(q.shape), self._specs[layer_idx]
        for tokens, (store, at, window) in self.kv_locations:
            self._ops.write_kv(store, layer_idx, k[tokens], v[tokens], at)
            self._ops.attend(out[tokens], q[tokens], store, layer_idx, at, spec, window=window)
        return out


def _compute_positions(at: Slots) -> Tensor:
    """Return the positions [N] int64 of a step's tokens in their sequences; 0 for padding."""
    rows = zip(at.start.tolist(), at.q_start.diff().tolist(), strict=True)
    each = [torch.arange(start, start + n) if start >= 0 else torch.zeros(n) for start, n in rows]
    return torch.cat(each).to(torch.int64).to(at.start.device)
