"""Counts what a strategy has dropped, from what it lets tokens see. Knows no strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cache_strategies.base import KVCache
from kernels.types import LayerSpec


def count_dropped_tokens(cache: KVCache[Any], length: int) -> int:
    """Return how many of the first `length` tokens the next one would use, but cannot see.

    A token counts in a layer if the layer's own attention would use its key for the next token, and the strategy does
    not let the next token see that key, or has dropped it. Keys outside of a layer's own window do not count. The
    result is the mean over the KV heads of all layers, rounded down: from 0, as in all exact instances, to `length`.
    """
    return count_unseen_tokens(cache.setup.geometry.layers, length, lambda layer: cache.count_visible(layer, length))


def count_unseen_tokens(layers: Sequence[LayerSpec], length: int, count_visible: Callable[[int], int | None]) -> int:
    """Return how many of `length` tokens the next one would use, but cannot see, as a mean over all KV heads.

    `count_visible` returns for each layer how many it sees there; None: all that it would use.
    """
    dropped = heads = 0
    for layer, spec in enumerate(layers):
        heads += spec.num_kv_heads
        if (visible := count_visible(layer)) is not None:
            used = length if spec.window is None else min(length, spec.window - 1)
            dropped += spec.num_kv_heads * (used - visible)
    return dropped // heads
