"""residual: a paged KV cache in quantized formats, whose queries read the latest and the first tokens in full.

Quantized keys and values lose most where attention looks most: at the latest tokens, and at the first (KIVI: Liu et al.
2024, arXiv:2402.02750; the QuantizedCache of transformers, from which `residual_length` has its name). So all tokens
are in the blocks of a `PagedCache`, in the formats of its options, where they are shared, found, pinned and evicted;
and each open sequence has a block of its own with its latest `residual_length` tokens and its first `sinks` as they
were computed (recent.py). A query at position p reads

    positions | 0 .. sinks - 1 | sinks .. p - residual_length | p - residual_length + 1 .. p |
              | as computed    | from the quantized blocks    | as computed                  |

It attends to both parts alone, and the results are merged (merging.py). In layers whose own window is no wider than
`residual_length` there is the first part only. Sequences that find a prefix in the cache find its sinks as they were
computed (shared_sinks.py), and all else as it is quantized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cache_strategies.base import CacheSetup, Locations, Rows
from cache_strategies.block_hashes import BlockHash
from cache_strategies.memory import Region
from cache_strategies.paged.cache import PagedCache
from cache_strategies.paged.state import PagedState
from cache_strategies.residual.merging import add_center, merge_attention
from cache_strategies.residual.options import ResidualOptions
from cache_strategies.residual.recent import RecentTokens, RingSequence, compute_ring_bytes
from cache_strategies.residual.shared_sinks import SharedSinks, compute_sinks_bytes
from cache_strategies.types import EVERYTHING, BlockInfo, BlockState, CacheUsage, Geometry, SaltScope, Sizes
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

    def commit(self, ids: Sequence[int]) -> None:
        before = self.length
        super().commit(ids)
        if before < self.cache.sinks_end <= self.length:
            self.cache.publish_sinks(self)

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
        self._shared = SharedSinks(setup, options, self._is_cached) if options.shares_sinks else None
        self.sinks_end = options.count_tokens_with_sinks(self.block_size)
        # What is found in the cache is less precise than what a sequence has computed itself
        self.contract = self.contract._replace(chunk_invariant=False)
        self._older: Mapping[tuple[int, int | None], Slots] = {}  # by number of the store and window of the layer

    @classmethod
    def sizes(cls, options: Any, geometry: Geometry) -> Sizes:
        paged = super().sizes(options, geometry)
        sizes = [*paged.block_bytes, compute_ring_bytes(options, geometry)]
        if not options.shares_sinks:
            return Sizes(sizes, lambda num_tokens: [*paged.count_blocks(num_tokens), 1])
        end = options.count_tokens_with_sinks(cls.block_layout(options, geometry)[0])
        sizes.append(compute_sinks_bytes(options, geometry))
        return Sizes(sizes, lambda num_tokens: [*paged.count_blocks(num_tokens), 1, int(num_tokens >= end)])

    # ---------------------------------------------------------------- steps
    def locate(self, rows: Rows[PagedState]) -> Locations:
        self.copies.run(self.setup.ops)
        slots = self.table.make_slots_by_store(rows)
        located = [KVLocation(store, at, None) for store, at in zip(self.stores, slots, strict=False)]
        self._located = whole = [located[number] for number in self.store_by_layer]
        self.recent.locate(rows, whole, self._restore_sinks)
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

    # ---------------------------------------------------------------- sinks of cached prefixes
    def publish_sinks(self, sequence: ResidualSequence) -> None:
        """Keep the sinks of a sequence for others, if it has computed them and its prefix can be found."""
        prefix = self._find_sinks_prefix(sequence)
        if self._shared is not None and prefix is not None and not sequence.computed_sinks_from:
            assert sequence.ring is not None
            self._shared.publish(prefix, self.recent.store, sequence.ring)

    def _restore_sinks(self, sequence: RingSequence) -> bool:
        """Copy the sinks of a found prefix into a sequence's block; return False if they are not there."""
        prefix = self._find_sinks_prefix(sequence)
        if self._shared is None or prefix is None:
            return False
        assert sequence.ring is not None
        return self._shared.restore(prefix, self.recent.store, sequence.ring)

    def _find_sinks_prefix(self, sequence: RingSequence) -> BlockHash | None:
        """Return the hash of the block that has the last of a sequence's sinks, if it is full and can be found."""
        if self._shared is None or sequence.length < self.sinks_end:
            return None
        prefix = sequence.get_block_hash(self.sinks_end // self.block_size - 1, self.hasher)
        return prefix if prefix is not None and self._is_cached(prefix) else None

    @property
    def idle_bytes(self) -> int:
        return super().idle_bytes + (self._shared.idle_bytes if self._shared else 0)

    def evict(self, num_bytes: int) -> int:
        freed = self._drop_unused_sinks()
        freed += super().evict(num_bytes - freed)
        return freed + (self._shared.evict(num_bytes - freed) if self._shared else 0)

    def clear(self, scope: SaltScope = EVERYTHING) -> int:
        return super().clear(scope) + self._drop_unused_sinks()

    def drop_prefix(self, prefix_id: str) -> int | None:
        freed = super().drop_prefix(prefix_id)
        return None if freed is None else freed + self._drop_unused_sinks()

    def unpublish_spoiled(self, sequence: PagedState) -> None:
        super().unpublish_spoiled(sequence)
        self._drop_unused_sinks()

    def _drop_unused_sinks(self) -> int:
        """Free the sinks of prefixes that cannot be found any more; return the bytes freed."""
        return self._shared.drop_unused() if self._shared else 0

    # ---------------------------------------------------------------- reports
    def usage(self) -> CacheUsage:
        usage, used = super().usage(), self.recent.count_used_bytes(self.sequences)
        idle = self._shared.idle_bytes if self._shared else 0
        return usage._replace(used=usage.used + used, idle=usage.idle + idle, wasted=usage.wasted - used - idle)

    def mark_blocks(self, region: Region, states: Tensor) -> None:
        if self._shared is not None and region is self._shared.region:
            states[self._shared.list_blocks()] = BlockState.IDLE
        else:
            super().mark_blocks(region, states)

    def describe_block(self, region: Region, block: int) -> BlockInfo | None:
        if self._shared is not None and region is self._shared.region:
            return BlockInfo(0, self.recent.sinks, 0, 0) if block in self._shared.list_blocks() else None
        if region is not self.recent.region:
            return super().describe_block(region, block)
        found = next((each for each in self.sequences if each.ring == block), None)
        return None if found is None else BlockInfo(None, min(found.length, self.recent.slots), 1, 0)

    def check_integrity(self) -> None:
        super().check_integrity()
        self.recent.check_integrity(self.sequences)
        if self._shared is not None:
            self._shared.check_integrity()


def _see_from_window_start(spec: LayerSpec) -> LayerSpec:
    """Return a layer whose queries see keys from `Slots.window_start` on, and whose sink logits count elsewhere."""
    return spec._replace(window=spec.window or torch.iinfo(torch.int32).max, sink_logits=None)
