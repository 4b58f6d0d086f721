"""sliding_window: a KV cache that keeps a sequence's first few tokens (sinks) and its latest `window` tokens.

Each sequence has a ring buffer, so its memory does not grow. Tokens that leave the window are overwritten, so the cache
is exact only if the model's own attention window is no larger. Attention sinks are from Xiao et al., "Efficient
Streaming Language Models with Attention Sinks" (2023), here without re-rotation: keys keep the absolute positions they
were computed at.

All tokens of a row (those that enter in a step) are written before any is read, and the row's first query needs the
window - 1 tokens before it. So the ring has window + max_row - 1 slots, where max_row is the maximum length of a row:

    slots   | sinks | ring: window + max_row - 1                  |
    token p   p < sinks: p;  otherwise: sinks + (p - sinks) % ring
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from cache_strategies.base import CacheSetup
from cache_strategies.block_table import TableOptions
from cache_strategies.single_block import SingleBlockCache, SingleBlockSequence
from cache_strategies.types import Contract, Geometry

INT32_MAX = 2**31 - 1  # largest int32, the type of positions on the device; maximum of the options


class WindowOptions(TableOptions):
    """Options of a sliding-window cache, as given in the settings: which tokens it keeps, and the length of rows."""

    window: int = Field(
        512, ge=1, le=INT32_MAX, description="number of latest tokens that a query attends to, itself included"
    )
    sinks: int = Field(
        4, ge=0, le=INT32_MAX, description="number of first tokens of a sequence that all queries attend to"
    )
    max_row: int | None = Field(
        None, ge=1, le=INT32_MAX, description="maximum number of tokens of a sequence in one step; default: the window"
    )

    def compute_ring_size(self, geometry: Geometry) -> int:
        """Return the number of slots of the ring buffer."""
        return compute_ring_size(self.window, self.sinks, self.max_row, geometry)


class WindowSequence(SingleBlockSequence):
    """A sequence that nobody finds, as its first tokens are overwritten."""

    miss = "window"

    def truncate(self, length: int) -> None:
        assert length == self.length or self.cache.contract.rewind is None, "more than contract.rewind"
        super().truncate(length)


class SlidingWindowCache(SingleBlockCache[WindowSequence]):
    """A cache with one block per sequence: slots for the sinks, then a ring buffer for the window."""

    options_type = WindowOptions
    sequence_type = WindowSequence

    def __init__(self, setup: CacheSetup, options: WindowOptions) -> None:
        geometry = setup.geometry
        self.max_row = compute_max_row(options.window, options.max_row, geometry)
        self.sinks = options.sinks
        self.ring = options.compute_ring_size(geometry)
        self.window = options.window
        super().__init__(setup, options)
        wraps = self.sinks + self.ring < geometry.max_seq_len
        sees_all = all(spec.window is not None and spec.window <= options.window for spec in geometry.layers)
        self.contract = Contract(
            exact=not self.is_quantized and (sees_all or options.sinks + options.window >= geometry.max_seq_len),
            rewind=0 if wraps else None,  # the tokens that a wrapped ring has overwritten cannot be restored
        )

    @classmethod
    def block_layout(cls, options: Any, geometry: Geometry) -> tuple[int, int]:
        return options.sinks + options.compute_ring_size(geometry), 1


def compute_max_row(window: int, max_row: int | None, geometry: Geometry) -> int:
    """Return the most tokens of a row; `max_row` is the option, by default the window."""
    return min(max_row or window, geometry.max_num_batched_tokens)


def compute_ring_size(window: int, sinks: int, max_row: int | None, geometry: Geometry) -> int:
    """Return the number of slots of a ring buffer, which is no larger than the longest sequence needs."""
    slots = window + compute_max_row(window, max_row, geometry) - 1
    return max(1, min(slots, geometry.max_seq_len - sinks))
