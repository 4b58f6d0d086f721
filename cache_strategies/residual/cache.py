"""residual: a paged KV cache in quantized formats, whose queries read the latest and the first tokens in full.

Quantized keys and values lose most where attention looks most: at the latest tokens, and at the first (KIVI: Liu et al.
2024, arXiv:2402.02750; the QuantizedCache of transformers, from which `residual_length` has its name). So all tokens
are in the blocks of a `PagedCache`, in the formats of its options, where they are shared, found, pinned and evicted;
and each open sequence has a block of its own with its latest `residual_length` tokens and its first `sinks` as they
were computed (recent.py). A query at position p reads

    positions | 0 .. sinks - 1 | sinks .. p - residual_length | p - residual_length + 1 .. p |
              | as computed    | from the quantized blocks    | as computed                  |

It attends to both parts alone, and the results are merged (merging.py). In layers whose own window is no wider than
`residual_length` there is the first part only. Tokens that were found in the cache are known as they are quantized,
until a sequence has computed as many itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cache_strategies.base import CacheSetup, Locations, Rows
from cache_strategies.memory import Region
from cache_strategies.paged.cache import PagedCache
from cache_strategies.paged.state import PagedState
from cache_strategies.residual.merging import add_center, merge_attention
from cache_strategies.residual.options import ResidualOptions
from cache_strategies.residual.recent import RecentTokens, RingSequence, compute_ring_bytes
from cache_strategies.types import BlockInfo, CacheUsage, Geometry, Sizes
from kernels.ops import KVLocation
from kernels.types import LayerSpec, Slots

PADDING = -1  # as the index of a row's first token


class ResidualSequence(RingSequence):
    """A paged sequence that holds a block with its first and latest tokens from open() to close()."""

    cache: ResidualCache

    @property
    def stop(self) -> int:  # type: ignore[override]  # it follows from `length`, which also falls if others close
        return self.cache.recent.find_stop(self.length)

    def ready(self) -> bool:
        """Return whether all found tokens have been computed before this step, as their keys are copied."""
        pending = self.cache.pending
        found = self.blocks[: self.length // self.cache.block_size]
        return not pending or all(block not in pending or pending.owner(block) is self for block in found)

    def allocate_blocks(self, num_tokens: int, windowed: int = 0) -> bool:
        recent = self.cache.recent
        if self.ring is not None:
            return super().allocate_blocks(num_tokens, windowed)
        return super().allocate_blocks(num_tokens, windowed + recent.region.size) and recent.allocate(self)

    def fork(self) -> ResidualSequence | None:
        child = super().fork()
        if child is None:
            return None
        assert isinstance(child, ResidualSequence)
        if not self.cache.recent.fork(self, child):
            child.close()
            return None
        return child

    def close(self) -> None:
        super().close()
        self.cache.recent.release(self)


class ResidualCache(PagedCache):
    """A paged cache whose sequences also have their latest and first tokens as they were computed."""

    options: ResidualOptions
    options_type = ResidualOptions
    sequence_type = ResidualSequence
    sequences: set[ResidualSequence]  # type: ignore[assignment]
    test_options = ({"residual_length": 8, "sinks": 2, "block_size": 4},)

    def __init__(self, setup: CacheSetup, options: ResidualOptions) -> None:
        super().__init__(setup, options)
        self.recent = RecentTokens(setup, options)
        self.stores = [*self.stores, self.recent.store]
        # What is found in the cache is less precise than what a sequence has computed itself
        self.contract = self.contract._replace(chunk_invariant=False)
        self._older: Mapping[tuple[int, int | None], Slots] = {}  # by number of the store and window of the layer

    @classmethod
    def sizes(cls, options: Any, geometry: Geometry) -> Sizes:
        paged = super().sizes(options, geometry)
        return Sizes(
            [*paged.block_bytes, compute_ring_bytes(options, geometry)],
            lambda num_tokens: [*paged.count_blocks(num_tokens), 1],
        )

    # ---------------------------------------------------------------- steps
    def locate(self, rows: Rows[PagedState]) -> Locations:
        self.copies.run(self.setup.ops)
        slots = self.table.make_slots_by_store(rows)
        located = [KVLocation(store, at, None) for store, at in zip(self.stores, slots, strict=False)]
        self._located = whole = [located[number] for number in self.store_by_layer]
        self.recent.locate(rows, whole)
        self._older = self._find_older(rows, slots)
        return Locations([None] * len(whole))

    def _find_older(self, rows: Rows[PagedState], slots: Sequence[Slots]) -> Mapping[tuple[int, int | None], Slots]:
        """Return the addresses of what queries read from quantized blocks, in layers and rows in which there is any.

        The last key that the query at position p reads of them is at p - residual_length, so that is its index; and
        the first is where its window begins.
        """
        first, length = self.recent.sinks, self.recent.length
        if all(each.length < first + length for each in rows.sequences):
            return {}
        ranges = [torch.arange(each.length, rows.end(row)) for row, each in enumerate(rows.sequences)]
        positions = torch.cat(ranges).to(self.store.device, torch.int32)
        start = (slots[0].start - length).where(slots[0].start >= first + length, PADDING)
        older: dict[tuple[int, int | None], Slots] = {}
        for number, spec in zip(self.store_by_layer, self.setup.geometry.layers, strict=True):
            if (number, spec.window) not in older and (spec.window is None or spec.window > length):
                begin = positions if spec.window is None else positions - spec.window + 1
                at = slots[number]
                older[number, spec.window] = replace(
                    at,
                    start=start,
                    max_kv=at.max_kv - length,
                    window_start=torch.full_like(begin, first) if spec.window is None else begin.clamp_min(first),
                )
        return older

    def attend(self, layer: int, rows: Rows[PagedState], q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        ops, spec, recent, whole = self.setup.ops, self.setup.geometry.layers[layer], self.recent, self._located[layer]
        assert whole is not None
        ops.write_kv(whole.store, layer, k, v, whole.at)
        ops.write_kv(recent.store, layer, k, v, recent.at)
        older = self._older.get((self.store_by_layer[layer], spec.window))
        if older is None:
            ops.attend(out, q, recent.store, layer, recent.at, spec, window=recent.length)
            return
        lse = q.new_full((2, *out.shape[:2]), -torch.inf, dtype=torch.float32)
        ops.attend(out, q, recent.store, layer, recent.at, spec, window=recent.length, lse=lse[0])
        other = torch.zeros_like(out, memory_format=torch.contiguous_format)  # padding is not written
        ops.attend(other, q, whole.store, layer, older, _see_from_window_start(spec), lse=lse[1])
        if (center := whole.store.k_center(layer)) is not None:
            add_center(lse[1], q, center, spec)
        merge_attention(out, lse[0], other, lse[1])

    def gather(self, layer: int, rows: Rows[PagedState], row: int) -> tuple[Tensor, Tensor, Tensor]:
        whole, spec, end = self._located[layer], self.setup.geometry.layers[layer], rows.end(row)
        assert whole is not None
        positions = self.list_visible_positions(end, spec)
        is_sink, is_latest = positions < self.recent.sinks, positions > end - 1 - self.recent.length
        older = ~is_sink & ~is_latest
        parts = [
            self.recent.gather(layer, row, positions[is_sink & ~is_latest]),
            self.setup.ops.gather(whole.store, layer, whole.at, row, positions[older]),
            self.recent.gather(layer, row, positions[is_latest]),
        ]
        k, v = (torch.cat(each) for each in zip(*parts, strict=True))
        return k, v, positions

    # ---------------------------------------------------------------- reports
    def usage(self) -> CacheUsage:
        usage, used = super().usage(), self.recent.count_used_bytes(self.sequences)
        return usage._replace(used=usage.used + used, wasted=usage.wasted - used)

    def describe_block(self, region: Region, block: int) -> BlockInfo | None:
        if region is not self.recent.region:
            return super().describe_block(region, block)
        found = next((each for each in self.sequences if each.ring == block), None)
        return None if found is None else BlockInfo(None, min(found.length, self.recent.slots), 1, 0)

    def check_integrity(self) -> None:
        super().check_integrity()
        self.recent.check_integrity(self.sequences)


def _see_from_window_start(spec: LayerSpec) -> LayerSpec:
    """Return a layer whose queries see keys from `Slots.window_start` on, and whose sink logits count elsewhere."""
    return spec._replace(window=spec.window or torch.iinfo(torch.int32).max, sink_logits=None)
