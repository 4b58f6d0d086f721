"""The latest queries of each sequence, which some scorers look at: kept in a region of their own while they are needed.

A boundary's scorer sees the last `num_queries` queries before it. So queries are stored only while a text comes near to
its next boundary, and freed with the compaction there. A block holds those of one sequence, by token and layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cache_strategies.base import Rows
from cache_strategies.compressed.memory import CompressedLayout
from cache_strategies.compressed.options import make_scorer
from cache_strategies.compressed.state import CompressedState, TappedQueries
from cache_strategies.memory import InstanceMemory
from config.errors import SettingsError
from kernels.ops import QueryTap


class QueryShape(NamedTuple):
    """The queries that are stored of a sequence: how many, of which layers, of how many heads and dimensions."""

    num_queries: int
    layers: Sequence[int]
    heads: int
    dim: int

    @property
    def width(self) -> int:
        """The numbers of a query in one layer."""
        return self.heads * self.dim

    def count_bytes(self, dtype: torch.dtype) -> int:
        return self.num_queries * len(self.layers) * self.width * dtype.itemsize


def find_query_shape(layout: CompressedLayout, num_queries: int | None) -> QueryShape | None:
    """Return what is stored for a scorer that looks at `num_queries` queries, or at all since a boundary (None).

    None if it looks at none, or if no text comes to a boundary. Raises SettingsError if layers have different query
    heads.
    """
    options, geometry = layout.options, layout.geometry
    layers = [i for i, window in enumerate(layout.windows) if window is None]
    if num_queries == 0 or not layers or options.every > geometry.max_seq_len:
        return None
    shapes = {(geometry.layers[i].num_q_heads, geometry.layers[i].head_dim) for i in layers}
    if len(shapes) > 1:
        raise SettingsError(
            "scorer: it looks at queries, and the model's layers have different query heads; choose a scorer that "
            "looks at keys alone, such as keydiff"
        )
    return QueryShape(options.every if num_queries is None else num_queries, layers, *shapes.pop())


def compute_query_bytes(layout: CompressedLayout) -> int:
    """Return the bytes of a sequence's queries; 0 if none are stored."""
    shape = find_query_shape(layout, make_scorer(None, layout.options, ()).num_queries)
    return 0 if shape is None else shape.count_bytes(layout.geometry.kv_dtype)


class QueryBuffer:
    """Stores the latest queries of sequences, in blocks that it views as [blocks, queries, layers, Hq * D]."""

    def __init__(self, shape: QueryShape, layout: CompressedLayout, memory: InstanceMemory) -> None:
        """Store queries before each boundary, in a new region."""
        self.shape = shape
        self._every, self._num_layers = layout.options.every, len(layout.geometry.layers)
        self._dtype = dtype = layout.geometry.kv_dtype
        self.region = memory.region(shape.count_bytes(dtype), "latest queries")
        region, width = self.region, shape.width
        stride, run = region.page_bytes // dtype.itemsize, region.size // region.page_bytes
        self._view = region.memory.view(dtype).as_strided(
            (region.pages - run + 1, shape.num_queries, len(shape.layers), width),
            (stride, len(shape.layers) * width, width, 1),
        )

    # ---------------------------------------------------------------- blocks
    def allocate(self, sequence: CompressedState) -> bool:
        """Give a sequence the block for its queries; return False if there is not enough memory."""
        blocks = self.region.allocate()
        sequence.query_block = None if blocks is None else blocks[0]
        return blocks is not None

    def release(self, sequence: CompressedState) -> None:
        """Free the block of a sequence's queries, if it has one."""
        if sequence.query_block is not None:
            self.region.release([sequence.query_block])
            sequence.query_block = None

    def copy(self, sequence: CompressedState, child: CompressedState) -> bool:
        """Copy the queries of a sequence, if it has some, for its fork; return False if there is not enough memory."""
        if sequence.query_block is None:
            return True
        if not self.allocate(child):
            return False
        self._view[child.query_block] = self._view[sequence.query_block]
        return True

    # ---------------------------------------------------------------- queries
    def first_stored(self, boundary: int) -> int:
        """Return the position of the first query that is stored for a boundary."""
        return max(0, boundary - self.shape.num_queries)

    def make_tap(self, rows: Rows[CompressedState]) -> QueryTap | None:
        """Return a tap for the queries that the rows' next boundaries need; None for none. Each row notes its own."""
        tokens: list[int] = []
        tapped: list[tuple[CompressedState, int, int]] = []
        begin = 0
        for each, num_tokens in zip(rows.sequences, rows.counts, strict=True):
            each.tapped = None
            end = each.length + num_tokens
            boundary = (each.length // self._every + 1) * self._every
            first = max(each.length, self.first_stored(boundary))
            if each.query_block is not None and first < end:
                tapped.append((each, first, len(tokens)))
                tokens += range(begin + first - each.length, begin + num_tokens)
            begin += num_tokens
        if not tapped:
            return None
        device, layers, shape = self._view.device, self.shape.layers, (self.shape.heads, self.shape.dim)
        scratch = torch.empty(len(layers), len(tokens), *shape, dtype=self._dtype, device=device)
        by_layer: list[Tensor | None] = [None] * self._num_layers
        for layer, queries in zip(layers, scratch, strict=True):
            by_layer[layer] = queries
        for each, first, index in tapped:
            each.tapped = TappedQueries(first, scratch[:, index:])
        return QueryTap(torch.tensor(tokens, device=device), by_layer)

    def store(self, sequence: CompressedState, tapped: TappedQueries) -> None:
        """Store the queries of a row's committed tokens, which were tapped."""
        first, scratch = tapped
        count = sequence.length - first
        if count <= 0:
            return
        assert sequence.query_block is not None
        begin = first - self.first_stored(-(-sequence.length // self._every) * self._every)
        queries = scratch[:, :count].transpose(0, 1).flatten(2)
        self._view[sequence.query_block, begin : begin + count] = queries

    def read(self, sequence: CompressedState) -> Tensor:
        """Return the latest queries [layers, T, Hq, D] of a sequence at a boundary."""
        assert sequence.query_block is not None
        count = sequence.length - self.first_stored(sequence.length)
        queries: Tensor = self._view[sequence.query_block, :count].unflatten(2, (self.shape.heads, self.shape.dim))
        return queries.transpose(0, 1)
