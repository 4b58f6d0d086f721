"""The latest queries of each sequence, which some scorers look at: kept in blocks of the arena while they are needed.

A boundary's scorer sees the last `num_queries` queries before it. So queries are stored only while a text comes near to
its next boundary, and freed with the compaction there. A block holds a number of query vectors; the vectors of a token
follow each other by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cache_strategies.base import Row
from cache_strategies.compressed.addresses import AddressGroup
from cache_strategies.compressed.memory import CompressedMemory
from cache_strategies.compressed.options import CompressedOptions, make_scorer
from cache_strategies.compressed.seat import CompressedSeat
from cache_strategies.types import Geometry
from config.errors import SettingsError
from kernels.ops import QueryTap
from kernels.types import LayerSpec


class TappedRow(NamedTuple):
    """Tokens of a row whose queries are tapped: those at positions [first, first + num_tokens)."""

    seat: CompressedSeat
    first: int
    num_tokens: int
    tap_index: int  # of the first of them among the tapped tokens of the step


class QueryBuffer:
    """Stores the latest queries of some layers in blocks that it views as [blocks, vectors, Hq * D]."""

    def __init__(
        self,
        name: str,
        specs: Sequence[LayerSpec],
        layers: Sequence[int],
        num_queries: int,
        every: int,
        memory: CompressedMemory,
        dtype: torch.dtype,
    ) -> None:
        """Store queries in `dtype` of these layers, of `num_queries` tokens before each boundary.

        Raises SettingsError if the layers have different query heads, or a block is too small for one query.
        """
        shapes = {(specs[i].num_q_heads, specs[i].head_dim) for i in layers}
        if len(shapes) > 1:
            raise SettingsError(
                f"strategies.{name}: its scorer looks at queries, and the model's layers have different query heads; "
                "choose a scorer that looks at keys alone, such as keydiff"
            )
        self.group = memory.group_by_layer[layers[0]]  # the number of the group whose blocks hold the queries
        self._memory = memory
        store = memory.stores[self.group]
        self.layers, self.num_queries, self._every, self._dtype = layers, num_queries, every, dtype
        self._num_layers = len(specs)
        self._heads, self._dim = shapes.pop()
        width = self._heads * self._dim
        block_bytes = store.pages_per_block * store.page_bytes
        self._vectors_per_block = block_bytes // (width * dtype.itemsize)
        if not self._vectors_per_block:
            raise SettingsError(
                f"strategies.{name}: a block of {block_bytes} bytes has no room for a query of {width} numbers: raise "
                "block_size"
            )
        self._view = store.memory.view(dtype).as_strided(
            (store.num_blocks, self._vectors_per_block, width), (store.page_bytes // dtype.itemsize, width, 1)
        )
        self.num_blocks = count_query_blocks(num_queries * len(layers), width * dtype.itemsize, block_bytes)

    # ---------------------------------------------------------------- blocks
    def allocate(self, seat: CompressedSeat) -> bool:
        """Give a seat the blocks for its queries; return False if there is not enough memory."""
        blocks = self._memory.allocate(self.group, self.num_blocks)
        seat.query_blocks = blocks or []
        return blocks is not None

    def release(self, seat: CompressedSeat) -> None:
        """Free the blocks of a seat's queries, if it has some."""
        self._memory.release(self.group, seat.query_blocks)
        seat.query_blocks = []

    def copy(self, seat: CompressedSeat, child: CompressedSeat) -> bool:
        """Copy the queries of a seat, if it has some, for its fork; return False if there is not enough memory."""
        if not seat.query_blocks:
            return True
        if not self.allocate(child):
            return False
        self._memory.copy_blocks(self.group, seat.query_blocks, child.query_blocks)
        return True

    # ---------------------------------------------------------------- queries
    def first_stored(self, boundary: int) -> int:
        """Return the position of the first query that is stored for a boundary."""
        return max(0, boundary - self.num_queries)

    def make_tap(self, rows: Sequence[Row[CompressedSeat]]) -> tuple[QueryTap, list[TappedRow], Tensor] | None:
        """Return a tap for the queries that the rows' next boundaries need, its rows and its memory; None for none."""
        tapped: list[TappedRow] = []
        tokens: list[int] = []
        begin = 0
        for seat, num_tokens in rows:
            end = seat.length + num_tokens
            boundary = (seat.length // self._every + 1) * self._every
            first = max(seat.length, self.first_stored(boundary))
            if seat.query_blocks and first < end:
                tapped.append(TappedRow(seat, first, end - first, len(tokens)))
                tokens += range(begin + first - seat.length, begin + num_tokens)
            begin += num_tokens
        if not tapped:
            return None
        device = self._view.device
        scratch = torch.empty(len(self.layers), len(tokens), self._heads, self._dim, dtype=self._dtype, device=device)
        by_layer: list[Tensor | None] = [None] * self._num_layers
        for layer, queries in zip(self.layers, scratch, strict=True):
            by_layer[layer] = queries
        return QueryTap(torch.tensor(tokens, device=device), by_layer), tapped, scratch

    def store(self, row: TappedRow, scratch: Tensor) -> None:
        """Store the queries of a row's committed tokens, which were tapped into scratch [layers, tokens, Hq, D]."""
        seat, first, count, index = row
        count = min(count, seat.length - first)
        if count <= 0:
            return
        boundary = -(-seat.length // self._every) * self._every
        layers = len(self.layers)
        begin = (first - self.first_stored(boundary)) * layers
        vector = torch.arange(begin, begin + count * layers, device=scratch.device)
        block = torch.tensor(seat.query_blocks, device=scratch.device)[vector // self._vectors_per_block]
        queries = scratch[:, index : index + count].transpose(0, 1).reshape(count * layers, -1)
        self._view[block, vector % self._vectors_per_block] = queries

    def read(self, seat: CompressedSeat) -> Tensor:
        """Return the latest queries [layers, T, Hq, D] of a seat at a boundary."""
        count = seat.length - self.first_stored(seat.length)
        blocks = torch.tensor(seat.query_blocks, device=self._view.device)
        vectors = self._view[blocks].flatten(0, 1)[: count * len(self.layers)]
        return vectors.view(count, len(self.layers), self._heads, self._dim).transpose(0, 1)


# -------------------------------------------------------------------- sizes
def count_query_blocks(num_vectors: int, vector_bytes: int, block_bytes: int) -> int:
    """Return how many blocks hold these query vectors; a block has room for at least one."""
    return -(-num_vectors // max(1, block_bytes // vector_bytes))


def count_peak_query_blocks(
    options: CompressedOptions, geometry: Geometry, groups: Sequence[AddressGroup], sizes: Sequence[int]
) -> int:
    """Return the most blocks that a sequence's latest queries take, in blocks of the smallest group.

    `sizes` are the bytes of a block of each group. Queries lie in blocks of the first layer without a window.
    """
    num_queries = make_scorer(None, options, ()).num_queries
    full = [i for i, spec in enumerate(geometry.layers) if spec.window is None]
    if num_queries == 0 or not full or options.every > geometry.max_seq_len:  # then no text comes to a boundary
        return 0
    widths = (geometry.layers[i].num_q_heads * geometry.layers[i].head_dim for i in full)
    num_vectors = (options.every if num_queries is None else num_queries) * len(full)
    size = next(size for group, size in zip(groups, sizes, strict=True) if full[0] in group.layers)
    num_blocks = count_query_blocks(num_vectors, max(widths) * geometry.kv_dtype.itemsize, size)
    return num_blocks * -(-size // min(sizes))
