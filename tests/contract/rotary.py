"""What `streaming` sees by its definition: which tokens, and at which positions within the cache.

The q and k of a text are those of its own positions. Where a strategy has others, they are rotated by the difference.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cache_strategies.base import KVCache
from kernels.types import LayerSpec
from plugin_kit.driver.texts import rotate


class Streaming(NamedTuple):
    """The definition of `streaming`, by the numbers of its options alone."""

    sinks: int
    window: int
    every: int

    @classmethod
    def of(cls, cache: KVCache) -> Streaming:
        options: Any = cache.options
        return cls(options.sinks, options.budget - options.sinks, options.every)

    def count_dropped(self, query: Tensor) -> Tensor:
        """Return how many tokens are dropped when a query's token enters: those between sinks and window."""
        return (query // self.every * self.every - self.sinks - self.window).clamp_min(0)

    def list_positions(self, query: Tensor, end: int) -> Tensor:
        """Return the positions [n, end] of a text's tokens within the cache as queries [n] find them; -1: dropped."""
        tokens, dropped = torch.arange(end), self.count_dropped(query)[:, None]
        found = torch.where(tokens < self.sinks, tokens, tokens - dropped)
        return found.masked_fill((tokens >= self.sinks) & (tokens < self.sinks + dropped), -1)

    def visible_keys(self, spec: LayerSpec, start: int, end: int) -> Tensor:
        """Return the mask [n, end] of the keys that the queries from `start` to end - 1 see."""
        query = torch.arange(start, end)
        positions = self.list_positions(query, end)
        distance = (query - self.count_dropped(query))[:, None] - positions
        return (positions >= 0) & (torch.arange(end) <= query[:, None]) & (distance < (spec.window or end))

    def place(self, q: Tensor, k: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Return queries and keys in float64, rotated to the positions at which the queries' row sees them.

        q [n,Hq,D] are those from position `start` of a text on, all before the next boundary; k [end,H,D] are those of
        its tokens. Dropped keys stay as they are.
        """
        query, end = torch.arange(start, start + len(q)), len(k)
        positions = self.list_positions(query[-1:], end)[0]
        shift = torch.where(positions < 0, 0, positions - torch.arange(end))
        return rotate(q.double(), -self.count_dropped(query)), rotate(k.double(), shift)

    def count_rotations(self) -> int:
        """Return how often a key is rotated, and rounded, at most; the model's own rotation included."""
        return 2 + self.window // self.every


def find_streaming(cache: KVCache, kind: str) -> Streaming | None:
    """Return the definition of an instance if its kind counts positions within the cache, else None."""
    return Streaming.of(cache) if kind == "streaming" else None
