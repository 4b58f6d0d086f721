"""A small example of attention in one layer: rows with a past, memory in which all else is NaN, and a step's slots.

For the self-check, tests and benchmarks. Uses no strategy: blocks are assigned at random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.arguments import by_head
from kernels.kv_formats import KVFormats
from kernels.ops import AttentionSlice, KVLocation, Ops
from kernels.store import KVStore, Pages, compute_block_bytes
from kernels.types import LayerSpec, Slots

CPU = torch.device("cpu")


class Layout(NamedTuple):
    """How the tokens of a row are stored: slots per block, number of sinks, and slots of the ring (0: no ring)."""

    block_size: int
    sinks: int = 0
    ring: int = 0
    dropped: bool = False  # some tokens of the past were dropped, so that indices are no positions
    split_heads: bool = False  # each KV head has blocks of its own, and keeps another number of tokens

    @property
    def kind(self) -> str:
        ring = f", {self.sinks} sinks and a ring of {self.ring}" if self.ring else ""
        return (
            f"blocks of {self.block_size}{ring}{self.dropped * ', tokens dropped'}{self.split_heads * ', split heads'}"
        )


class CaseRow(NamedTuple):
    """A row of the batch: `tokens` new tokens after `past` kept ones; padding if past is negative."""

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
        formats: KVFormats | torch.dtype | None = None,
        before: Sequence[LayerSpec] = (),
        unused_blocks: int = 3,
        memory: Callable[[int], Tensor] | None = None,
    ) -> None:
        """Write the earlier tokens of each row by `ops`; everything else in memory is NaN.

        Keys and values are stored in `formats`, by default in `dtype`.

        `before`: layers that precede this one in each block. `unused_blocks`: blocks at the beginning of memory that no
        row uses. `memory`, if given, allocates the bytes, which are then not filled with NaN: for cases that are too
        large for that.
        """
        self.ops, self.layout, self.spec, self.rows, self.device = ops, layout, spec, rows, device
        self.layer = len(before)
        self.generator = torch.Generator().manual_seed(0)
        self.longest = max(1, *(row.past + row.tokens for row in rows))
        self.heads = spec.num_kv_heads if layout.split_heads else 1  # of a row, with addresses of their own
        width = -(-(layout.sinks + layout.ring or self.longest) // layout.block_size)
        stored = [each._replace(num_kv_heads=1) if layout.split_heads else each for each in (*before, spec)]
        page = compute_block_bytes(stored, layout.block_size, formats or dtype)
        pages = width * len(rows) * self.heads + unused_blocks
        if memory is None:
            self.pages = Pages(pages, page, device)
            self.pages.memory.fill_(0xFF)
        else:
            self.pages = Pages(pages, page, device, memory=memory(pages * page))
        self.store = KVStore(
            self.pages, [*before, spec], layout.block_size, formats or dtype, split_heads=layout.split_heads
        )
        order = torch.randperm(width * len(rows) * self.heads, generator=self.generator).int() + unused_blocks
        self.table = order.view(len(rows) * self.heads, width).to(device)
        lengths = [max(0, row.past) + row.tokens for row in rows]
        self.q = [self._draw(n, spec.num_q_heads, spec.head_dim, dtype) for n in lengths]
        self.k = [self._draw(n, spec.num_kv_heads, spec.head_dim, dtype) for n in lengths]
        self.v = [self._draw(n, spec.num_kv_heads, spec.v_head_dim, dtype) for n in lengths]
        self.positions = [self._draw_positions(row) for row in rows]  # by row: [heads, kept tokens and new ones]
        for i, row in enumerate(rows):
            self.write_past(i, row.past)
        self.at = self.make_slots([(i, row.past, row.tokens) for i, row in enumerate(rows)])

    def _draw(self, n: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(n, heads, dim, generator=self.generator).to(self.device, dtype)

    def _draw_positions(self, row: CaseRow) -> Tensor:
        """Return the positions [heads, n] of a row's tokens: ascending, with gaps if tokens were dropped."""
        past = max(0, row.past)
        new = torch.arange(row.tokens)
        if not self.layout.dropped:
            return torch.arange(past + row.tokens).expand(self.heads, -1)
        kept = [torch.randperm(2 * past, generator=self.generator)[:past].sort().values for _ in range(self.heads)]
        return torch.stack([torch.cat((each, 2 * past + new)) for each in kept])

    def count_past(self, past: int, head: int) -> int:
        """Return the number of tokens that a head keeps of `past` ones; later heads keep fewer if heads are split."""
        return max(0, past - 3 * head) if self.layout.split_heads and past >= 0 else past

    def write_past(self, row: int, past: int) -> None:
        """Write the first `past` tokens of a row, at most as many at a time as its ring has slots."""
        piece = self.layout.ring or self.longest
        for start in range(0, past, piece):
            end = min(past, start + piece)
            at = self._make_slots([(row, start, end - start)], [[start] * self.heads], None)
            self.ops.write_kv(self.store, self.layer, self.k[row][start:end], self.v[row][start:end], at)

    def make_slots(self, rows: Sequence[tuple[int, int, int]]) -> Slots:
        """Return the addresses of some rows, given as (row of the case, tokens before, tokens), the decode rows first.

        The block table has the rows in reverse order, so that kernels must look them up by table_row.
        """
        starts = [[self.count_past(past, head) for head in range(self.heads)] for _, past, _ in rows]
        has_window = self.layout.dropped and self.spec.window is not None
        return self._make_slots(rows, starts, self._find_window_starts(rows, starts) if has_window else None)

    def _make_slots(
        self, rows: Sequence[tuple[int, int, int]], starts: list[list[int]], window_start: Tensor | None
    ) -> Slots:
        """Return the addresses of rows; `starts` has the index of each row's first token in each head."""
        sizes = [tokens for _, _, tokens in rows]
        table_rows = [[self.heads * (len(self.rows) - row) - 1 - h for h in range(self.heads)] for row, _, _ in rows]
        table_row, start = (
            torch.tensor(x, dtype=torch.int32, device=self.device).view(len(rows), self.heads)
            for x in (table_rows, starts)
        )
        return Slots(
            table=self.table.flip(0),
            block_size=self.store.block_size,
            table_row=self._join_heads(table_row),
            q_start=torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=self.device),
            start=self._join_heads(start),
            num_decode=next((i for i, n in enumerate(sizes) if n != 1), len(sizes)),
            max_q=max(sizes),
            max_kv=max(max(each) + n for each, n in zip(starts, sizes, strict=True)),
            sinks=self.layout.sinks,
            ring=self.layout.ring,
            window_start=None if window_start is None else self._join_heads(window_start),
        )

    def _join_heads(self, x: Tensor) -> Tensor:
        """Return x [n, heads] as it is if heads are split, else [n]."""
        return x if self.layout.split_heads else x[:, 0].contiguous()

    def _find_window_starts(self, rows: Sequence[tuple[int, int, int]], starts: list[list[int]]) -> Tensor:
        """Return the index [N, heads] of the oldest token that each token of the rows sees in the model's window."""
        assert self.spec.window is not None
        oldest = []
        for (row, past, tokens), row_starts in zip(rows, starts, strict=True):
            new = self.positions[row][0, max(0, past) :][:tokens]
            kept = [torch.cat((x[: max(0, n)], new)) for x, n in zip(self.positions[row], row_starts, strict=True)]
            outside = new - self.spec.window
            oldest.append(torch.stack([torch.searchsorted(each, outside, right=True) for each in kept], 1))
        return torch.cat(oldest).to(self.device, torch.int32)

    def list_kept(self, row: int, head: int) -> tuple[Tensor, Tensor]:
        """Return (which of the row's k and v a head keeps [S], new tokens last; their positions in the text [S])."""
        past, tokens = self.rows[row]
        which = torch.tensor([*range(self.count_past(past, head)), *range(past, past + tokens)])
        return which, self.positions[row][head % self.heads, which]

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

    def attend(self, ops: Ops | None = None, *, window: int | None = None, lse: Tensor | None = None) -> list[Tensor]:
        """Return the output of each row, computed by `ops` (default: those of the case); padding rows stay 7."""
        q = self.get_step_inputs(self.q)
        out = torch.full((len(q), self.spec.num_q_heads, self.spec.v_head_dim), 7.0, dtype=q.dtype, device=q.device)
        (ops or self.ops).attend(out, q, self.store, self.layer, self.at, self.spec, window=window, lse=lse)
        return list(out.split([row.tokens for row in self.rows]))

    def attend_with_lse(self, ops: Ops | None = None, *, window: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Return (output, logarithms of the sums of exponentials) of each row; those of padding rows stay 7."""
        sizes = [row.tokens for row in self.rows]
        lse = torch.full((sum(sizes), self.spec.num_q_heads), 7.0, device=self.device)
        outs = self.attend(ops, window=window, lse=lse)
        return list(zip(outs, lse.split(sizes), strict=True))


class Step:
    """Implements `kernels.ops.Attention` for a step whose keys are at the same addresses in all layers."""

    def __init__(self, ops: Ops, specs: Sequence[LayerSpec], stored: Sequence[tuple[slice, KVLocation]]) -> None:
        """Take for each strategy its tokens and where they are stored."""
        self._ops, self._specs = ops, specs
        self.slices = [AttentionSlice(tokens, [where] * len(specs)) for tokens, where in stored]
        self.positions = torch.cat([_compute_positions(where.at) for _, where in stored])
        self.logit_index = torch.arange(len(self.positions), device=self.positions.device)

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the keys and values of a layer and compute its attention, one slice of the tokens after the other."""
        out, spec = q.new_zeros(q.shape), self._specs[layer_idx]
        for tokens, locations, *_ in self.slices:
            location = locations[layer_idx]
            assert location is not None
            store, at, window = location
            self._ops.write_kv(store, layer_idx, k[tokens], v[tokens], at)
            self._ops.attend(out[tokens], q[tokens], store, layer_idx, at, spec, window=window)
        return out


def _compute_positions(at: Slots) -> Tensor:
    """Return the positions [N] int64 of a step's tokens in their sequences, if none was dropped; 0 for padding."""
    rows = zip(by_head(at.start)[:, 0].tolist(), at.q_start.diff().tolist(), strict=True)
    each = [torch.arange(start, start + n) if start >= 0 else torch.zeros(n) for start, n in rows]
    return torch.cat(each).to(torch.int64).to(at.start.device)
