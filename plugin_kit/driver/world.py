"""Caches over one arena that is filled with NaN, as an engine would build them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from cache_strategies import registry
from cache_strategies.arena import Arena
from cache_strategies.base import KVCache
from cache_strategies.types import Geometry
from config.settings import StrategySettings
from kernels.ops import Ops
from kernels.types import LayerSpec
from plugin_kit.driver.steps import Reading
from plugin_kit.driver.texts import MODEL, Text

POISON = 0xFF  # every byte 0xFF: NaN in float32, float16 and bfloat16


class World:
    """Caches by name over one arena whose memory is filled with NaN."""

    def __init__(
        self,
        strategies: Mapping[str, StrategySettings],
        ops: Ops,
        *,
        layers: Sequence[LayerSpec] = MODEL,
        dtype: torch.dtype = torch.float32,
        max_seats: int = 8,
        max_seq_len: int = 160,
        max_num_batched_tokens: int = 160,
        pages: int | None = None,
        fill: int = POISON,
    ) -> None:
        """Make the caches. By default the arena fits `max_seats` sequences of max_seq_len per instance."""
        self.layers, self.dtype = layers, dtype
        instances = registry.resolve_instances(strategies)
        geometry = Geometry(layers, dtype, max_seats, max_seq_len, max_num_batched_tokens)
        page = registry.page_bytes(instances, geometry)
        if pages is None:
            pages = max_seats * sum(1 + 2 * _sequence_bytes(i, geometry) // page for i in instances)
        self.arena = Arena(pages, page)
        self.arena.memory.fill_(fill)
        self.caches: dict[str, KVCache] = registry.build_caches(instances, geometry, self.arena, ops)

    def open(self, name: str, text: Text, *, max_cached: int | None = None) -> Reading:
        """Open a seat for a whole text."""
        seat = self.caches[name].open(text.ids, max_cached=max_cached)
        assert seat is not None, "open() returned None although there is memory"
        return Reading(self.caches[name], text, seat)

    def check_integrity(self) -> None:
        """Assert that the bookkeeping of the arena and of all caches is consistent."""
        self.arena.check_integrity()
        for cache in self.caches.values():
            cache.check_integrity()


def _sequence_bytes(instance: registry.DeclaredInstance, geometry: Geometry) -> int:
    """Return the memory of the longest sequence in pages of its own block size; at most half of what others need."""
    return registry.compute_min_pages([instance], geometry) * registry.page_bytes([instance], geometry)
