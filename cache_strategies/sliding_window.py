"""sliding_window: a ring of fixed size a sequence, which keeps the first few tokens (sinks) and the latest `window`.

Memory does not grow with the text, and what leaves the window is forgotten: exact only where the model itself sees no
further. Attention sinks are from Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023), here
without re-rotation: keys keep the absolute positions they were computed at.

A row's tokens are written before any is read, and its first query still needs window - 1 tokens before it. So the ring
has window + max_row - 1 slots, and the scheduler never sends more than max_row tokens in one row:

    slots   | sinks | ring: window + max_row - 1                  |
    token p   p < sinks: p;  otherwise: sinks + (p - sinks) % ring
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from cache_strategies.base import CacheSetup, Contract, Geometry
from cache_strategies.block_table import TableOptions, TableSeat
from cache_strategies.single_block import SingleBlockCache

INT32_MAX = 2**31 - 1  # positions are int32 on the device


class WindowOptions(TableOptions):
    """Options of a sliding window."""

    window: int = Field(512, ge=1, le=INT32_MAX, description="latest tokens a query sees, itself included")
    sinks: int = Field(4, ge=0, le=INT32_MAX, description="first tokens of the sequence that stay visible")
    max_row: int | None = Field(
        None, ge=1, le=INT32_MAX, description="tokens a step may enter per sequence; default: as the window"
    )


class SlidingWindowCache(SingleBlockCache[TableSeat]):
    """One ring a seat."""

    options_type = WindowOptions

    def __init__(self, setup: CacheSetup, options: WindowOptions) -> None:
        geometry = setup.geometry
        max_row = _compute_max_row(options, geometry)
        self.sinks = options.sinks
        self.ring = _compute_ring_size(options, geometry)
        self.window = options.window
        super().__init__(setup, options)
        wraps = self.sinks + self.ring < geometry.max_seq_len
        sees_all = all(spec.window is not None and spec.window <= options.window for spec in geometry.layers)
        self.contract = Contract(
            exact=not self.is_quantized and (sees_all or options.sinks + options.window >= geometry.max_seq_len),
            shareable=False,
            forkable=True,
            rewind=0 if wraps else None,  # what a wrapped ring has overwritten does not come back
            replayable=True,
            chunk_invariant=True,
            max_row=max_row,
        )

    @classmethod
    def block_layout(cls, options: Any, geometry: Geometry) -> tuple[int, int]:
        return options.sinks + _compute_ring_size(options, geometry), 1


def _compute_max_row(options: WindowOptions, geometry: Geometry) -> int:
    return min(options.max_row or options.window, geometry.max_num_batched_tokens)


def _compute_ring_size(options: WindowOptions, geometry: Geometry) -> int:
    """Return the number of slots of the ring; never more than the longest sequence needs."""
    return max(1, min(options.window + _compute_max_row(options, geometry) - 1, geometry.max_seq_len - options.sinks))
