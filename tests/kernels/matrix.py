"""What the kernel matrix is made of: backends, layouts of memory, layers, and rows written by hand into `Slots`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.arena import Arena
from kernels.load import load_ops
from kernels.ops import LayerSpec, Ops, Slots
from kernels.reference import ReferenceOps
from kernels.store import KVStore, block_bytes

BACKENDS: Mapping[str, Callable[[], Ops]] = {  # what means, and what this machine would serve with if that is another
    ReferenceOps.__name__: ReferenceOps,
    type(load_ops(torch.device("cpu"))).__name__: lambda: load_ops(torch.device("cpu")),
}

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


class Layout(NamedTuple):
    """How the keys of a row lie in blocks."""

    block_size: int
    sinks: int = 0
    ring: int = 0

    @property
    def kind(self) -> str:
        return f"blocks of {self.block_size}" + (f", {self.sinks} sinks and a ring of {self.ring}" if self.ring else "")


LAYOUTS = (Layout(300), Layout(16), Layout(5), Layout(1), Layout(54, sinks=4, ring=50), Layout(16, sinks=3, ring=61))

SPECS = {
    "one head": LayerSpec(1, 1, 16, 16, scale=0.25),
    "as many KV heads as query heads": LayerSpec(3, 3, 8, 8, scale=0.4),
    "groups of 4": LayerSpec(2, 8, 16, 16, scale=0.25),
    "groups of 7": LayerSpec(2, 14, 8, 8, scale=0.35),
    "values wider than keys": LayerSpec(2, 4, 8, 24, scale=0.35),
    "values narrower than keys": LayerSpec(2, 6, 24, 8, scale=0.2),
    "no scale": LayerSpec(1, 2, 4, 4),
    "softcap": LayerSpec(2, 4, 8, 8, scale=0.5, softcap=2.0),
    "the model's window": LayerSpec(2, 4, 8, 8, scale=0.35, window=17),
    "a window wider than a strategy's": LayerSpec(1, 2, 8, 8, scale=0.35, window=180),
    "a window of one": LayerSpec(1, 2, 8, 8, scale=0.35, window=1),
    "sink logits": LayerSpec(2, 6, 8, 8, scale=0.35, sink_logits=torch.tensor([-3.0, 0.0, 1.0, 2.5, -1.0, 4.0])),
    "all at once": LayerSpec(
        2, 6, 8, 12, window=40, scale=0.5, softcap=5.0, sink_logits=torch.tensor([0.0, 1.0, -2.0, 3.0, 0.5, 9.0])
    ),
}


class RowOf(NamedTuple):
    """`tokens` tokens enter after `past`; past < 0: padding."""

    past: int
    tokens: int


ROWS = (
    RowOf(0, 1),
    RowOf(200, 1),
    RowOf(-1, 1),
    RowOf(127, 1),
    RowOf(128, 1),
    RowOf(0, 9),
    RowOf(120, 11),
    RowOf(175, 6),
    RowOf(-1, 4),
)


class Scene:
    """Rows of one layer: their texts, the store that holds what was before, and the step's slots."""

    def __init__(self, ops: Ops, layout: Layout, spec: LayerSpec, rows: Sequence[RowOf], dtype: torch.dtype) -> None:
        """The past is written through the operations themselves; everything else in memory is NaN."""
        self.ops, self.layout, self.spec, self.rows = ops, layout, spec, rows
        self.generator = torch.Generator().manual_seed(0)
        width = -(-(layout.sinks + layout.ring or 300) // layout.block_size)
        page = block_bytes([spec], layout.block_size, dtype)
        self.arena = Arena(width * len(rows) + 3, page)
        self.arena.memory.fill_(0xFF)
        self.store = KVStore(self.arena, [spec], layout.block_size, dtype)
        order = torch.randperm(width * len(rows), generator=self.generator).int() + 3  # nobody's blocks come first
        self.table = order.view(len(rows), width)
        lengths = [max(0, row.past) + row.tokens for row in rows]
        self.q = [self._draw(n, spec.num_q_heads, spec.head_dim, dtype) for n in lengths]
        self.k = [self._draw(n, spec.num_kv_heads, spec.head_dim, dtype) for n in lengths]
        self.v = [self._draw(n, spec.num_kv_heads, spec.v_head_dim, dtype) for n in lengths]
        for i, row in enumerate(rows):
            self._write_past(i, row.past)
        self.at = self.slots([(i, row.past, row.tokens) for i, row in enumerate(rows)])

    def _draw(self, n: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(n, heads, dim, generator=self.generator).to(dtype)

    def _write_past(self, row: int, past: int) -> None:
        """In pieces that do not overtake themselves in a ring."""
        piece = self.layout.ring or 300
        for start in range(0, past, piece):
            end = min(past, start + piece)
            at = self.slots([(row, start, end - start)])
            self.ops.write_kv(self.store, 0, self.k[row][start:end], self.v[row][start:end], at)

    def slots(self, rows: Sequence[tuple[int, int, int]]) -> Slots:
        """rows of (seat, start, tokens), decode rows first."""
        seats, starts, sizes = (list(column) for column in zip(*rows, strict=True))
        decode = next((i for i, n in enumerate(sizes) if n != 1), len(sizes))
        limit = self.layout.sinks + self.layout.ring if self.layout.ring else 300
        return Slots(
            table=self.table,
            block_size=self.store.block_size,
            row_seat=torch.tensor(seats, dtype=torch.int32),
            q_start=torch.tensor([0, *sizes]).cumsum(0).int(),
            start=torch.tensor(starts, dtype=torch.int32),
            kept=torch.tensor(starts, dtype=torch.int32).clamp(0, limit),
            num_decode=decode,
            max_q=max(sizes),
            max_kv=max(start + n for _, start, n in rows),
            sinks=self.layout.sinks,
            ring=self.layout.ring,
        )

    def entering(self, part: Sequence[Tensor]) -> Tensor:
        """The step's q, k or v [N, heads, dim]; what padding brings is NaN."""
        pieces = [
            x[max(0, row.past) :] if row.past >= 0 else torch.full_like(x, torch.nan)
            for x, row in zip(part, self.rows, strict=True)
        ]
        return torch.cat(pieces)

    def attend(self, *, window: int | None = None) -> list[Tensor]:
        """Writes, then reads: the output of each row; it was 7 before."""
        self.ops.write_kv(self.store, 0, self.entering(self.k), self.entering(self.v), self.at)
        q = self.entering(self.q)
        out = torch.full((len(q), self.spec.num_q_heads, self.spec.v_head_dim), 7.0, dtype=q.dtype)
        self.ops.attend(out, q, self.store, 0, self.at, self.spec, window=window)
        return list(out.split([row.tokens for row in self.rows]))
