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

from typing import Any

from torch import Tensor

from cache_strategies.base import CacheSetup, Rows
from cache_strategies.compressed.cache import CompressedCache, CompressedSequence
from cache_strategies.compressed.memory import CompressedLayout
from cache_strategies.scorers.base import Scorer
from cache_strategies.streaming.compaction import StreamingCompactor
from cache_strategies.streaming.options import KeptSizes, StreamingOptions, check_rotation
from cache_strategies.types import Geometry
from cache_strategies.visible import count_unseen_tokens


class StreamingSequence(CompressedSequence):
    """A sequence in which a token's position is its number among the tokens that are kept."""

    cache: StreamingCache

    def compact(self) -> bool:
        has_dropped = super().compact()
        self.shift = self.boundary - self.cache.place_after(self.boundary)
        return has_dropped


class StreamingCache(CompressedCache):
    """A cache that keeps the first tokens of a sequence and its latest ones, without gaps between their positions."""

    options_type = StreamingOptions
    sequence_type = StreamingSequence

    def __init__(self, setup: CacheSetup, options: StreamingOptions) -> None:
        sizes = KeptSizes.resolve(options, setup.geometry.max_seq_len)
        sizes.check(setup.name, setup.geometry.max_seq_len)
        check_rotation(setup.name, setup.geometry.layers)
        self._max_kept = sizes.kept
        super().__init__(setup, options)
        self.contract = self.contract._replace(exact=False, unbounded=True)

    @classmethod
    def make_layout(cls, options: Any, geometry: Geometry) -> CompressedLayout:
        """Return how layers are divided: by their own window only if it ends within the latest `window` tokens.

        These layers keep what their own window needs. The others keep sinks and window, and see of them what lies
        within their own window by positions within the cache.
        """
        sizes = KeptSizes.resolve(options, geometry.max_seq_len)
        windows = [
            spec.window if spec.window is not None and spec.window - 1 <= sizes.window else None
            for spec in geometry.layers
        ]
        return CompressedLayout(sizes.make_options(options), geometry, windows)

    def make_compactor(self, scorer: Scorer) -> StreamingCompactor:
        return StreamingCompactor(
            self.setup, self.options, self.memory, self.layout.budgets, scorer, self.queries, self._max_kept
        )

    def place_after(self, boundary: int) -> int:
        """Return the position within the cache of the next token after a boundary of a text."""
        return min(boundary, self._max_kept)

    def gather(self, layer: int, rows: Rows[CompressedSequence], row: int) -> tuple[Tensor, Tensor, Tensor]:
        k, v, positions = super().gather(layer, rows, row)
        window = self.setup.geometry.layers[layer].window
        latest = slice(None if window is None else -window, None)
        return k[latest], v[latest], positions[latest]

    def count_visible(self, layer: int, length: int) -> int | None:
        boundary = length - length % self.options.every
        return self._count_visible_of(layer, length, self.place_after(boundary) + length - boundary)

    def _count_visible_of(self, layer: int, length: int, held: int) -> int:
        """Return how many of `length` tokens, of which `held` are there, the next one sees in a layer."""
        window, sinks = self.setup.geometry.layers[layer].window, self.options.sinks
        used, visible = (tokens if window is None else min(tokens, window - 1) for tokens in (length, held))
        if held == length:
            return used
        latest = min(visible, held - sinks, used)
        used_sinks = max(0, sinks - (length - used))
        return latest + min(used_sinks, max(0, visible - (held - sinks)))

    def budget(self, length: int) -> int | None:
        held, layers = self.place_after(length), self.setup.geometry.layers
        return length - count_unseen_tokens(layers, length, lambda layer: self._count_visible_of(layer, length, held))
