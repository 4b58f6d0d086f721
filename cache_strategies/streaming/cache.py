"""streaming: a KV cache of sinks and a window whose positions are counted within the cache, for texts without an end.

Xiao et al., "Efficient streaming language models with attention sinks" (ICLR 2024, arXiv:2309.17453). A text has a
boundary at every multiple of `every`, and rows end there. At a boundary the first `sinks` tokens and the latest
`window` tokens stay, and move to the first slots; the positions of the window's tokens fall by the number of tokens
that were dropped, and their keys are rotated by as much (compaction.py). So positions stay below sinks + window +
every, however long the text: only a prompt has to fit max_seq_len.

    position | sinks | window, rotated at the last boundary | tokens since: fewer than every |

Memory and addresses are those of `compressed`. Layers with a window of their own see what lies within it, by positions
within the cache; if it ends within the latest `window` tokens, the others are not kept there (options.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from cache_strategies.base import CacheSetup, Row
from cache_strategies.compressed.cache import CompressedCache, CompressedPlan
from cache_strategies.compressed.seat import CompressedSeat, KeptTokens
from cache_strategies.scorers.base import Scorer
from cache_strategies.streaming.compaction import StreamingCompactor
from cache_strategies.streaming.options import KeptSizes, StreamingOptions, check_rotation, hide_wide_windows
from cache_strategies.streaming.seat import StreamingSeat
from cache_strategies.types import Geometry, Sizes


class StreamingPlan(CompressedPlan):
    """A plan of a streaming cache, in whose layers the model's own window counts positions within the cache."""

    def gather_kv(self, layer_idx: int, row: int) -> tuple[Tensor, Tensor, Tensor]:
        k, v, positions = super().gather_kv(layer_idx, row)
        window = self._cache.setup.geometry.layers[layer_idx].window
        latest = slice(None if window is None else -window, None)
        return k[latest], v[latest], positions[latest]


class StreamingCache(CompressedCache):
    """A cache that keeps the first tokens of a sequence and its latest ones, without gaps between their positions."""

    options_type = StreamingOptions

    def __init__(self, setup: CacheSetup, options: StreamingOptions) -> None:
        geometry = setup.geometry
        sizes = KeptSizes.resolve(options, geometry.max_seq_len)
        sizes.check(setup.name, geometry.max_seq_len)
        check_rotation(setup.name, geometry.layers)
        self._max_kept = sizes.kept
        self._stored = hide_wide_windows(geometry, sizes.window)  # what the memory is divided by
        super().__init__(replace(setup, geometry=self._stored), sizes.make_options(options))
        self.setup = setup  # with the model's own windows, which kernels apply
        setup.ops.prepare(geometry.layers, geometry.kv_dtype, self.memory.dtype)
        self.contract = self.contract._replace(exact=False, unbounded=True)

    @classmethod
    def sizes(cls, options: Any, geometry: Geometry) -> Sizes:
        kept = KeptSizes.resolve(options, geometry.max_seq_len)
        return super().sizes(kept.make_options(options), hide_wide_windows(geometry, kept.window))

    def make_compactor(self, scorer: Scorer) -> StreamingCompactor:
        return StreamingCompactor(self.setup, self.options, self.memory, self.budgets, scorer, self.queries)

    def _make_seat(self, index: int, groups: list[KeptTokens]) -> StreamingSeat:
        return StreamingSeat(index, groups, self._max_kept)

    def plan(self, rows: Sequence[Row[CompressedSeat]]) -> StreamingPlan:
        return StreamingPlan(self, rows)

    def count_dropped_tokens(self, seat: CompressedSeat) -> int:
        return self._count_missing(seat.length, seat.position)

    def token_budget(self, length: int) -> int:
        return length - self._count_missing(length, min(length, self._max_kept))

    def _count_missing(self, length: int, held: int) -> int:
        """Return the result of count_dropped_tokens() for a text of `length` tokens of which `held` stayed."""
        layers = self.setup.geometry.layers
        missing = sum(spec.num_kv_heads * self._count_missing_in_layer(length, held, spec.window) for spec in layers)
        return missing // sum(spec.num_kv_heads for spec in layers)

    def _count_missing_in_layer(self, length: int, held: int, window: int | None) -> int:
        """Return how many tokens a layer with this window of its own would use for the next token, but does not see."""
        if held == length:
            return 0
        sinks = self.options.sinks
        used, visible = (tokens if window is None else min(tokens, window - 1) for tokens in (length, held))
        latest = min(visible, held - sinks, used)
        used_sinks = max(0, sinks - (length - used))
        return used - latest - min(used_sinks, max(0, visible - (held - sinks)))
