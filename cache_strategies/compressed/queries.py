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
from cache_strategies.compressed.seat import CompressedSeat
from config.errors import SettingsError
from kernels.ops import QueryTap
from kernels.store import KVStore
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
        store: KVStore,
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
        self.num_blocks = -(-num_queries * len(layers) // self._vectors_per_block)

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
