"""One sequence on its own in a KVCache: for `forward_step`, benchmarks and tests. Requests go through `core.py`."""

from __future__ import annotations

import torch

from cache_strategies.base import KVCache, Row
from kernels.ops import Attention
from server.engine.batch import Batch, Work

_UNNAMED = -1  # an embedding need not be a token: kept by the cache, shared with nobody


class CachedSequence:
    """Implements `server.models.decoder.SequenceCache` over a seat."""

    def __init__(self, cache: KVCache, device: torch.device | str = "cpu") -> None:
        """Opens a seat. Raises MemoryError if there is no room."""
        seat = cache.open([_UNNAMED])
        if seat is None:
            raise MemoryError(f"no room in {cache.name!r}: give it more memory or close other sequences")
        self._cache, self._seat, self._device = cache, seat, device
        self._batch: Batch | None = None

    @property
    def length(self) -> int:
        return self._seat.length

    def begin(self, num_tokens: int) -> Attention:
        """Raises MemoryError if there is no room for that many more."""
        if not self._cache.grow(self._seat, num_tokens):
            raise MemoryError(f"no room in {self._cache.name!r} for {num_tokens} more tokens")
        row = Row(self._seat, num_tokens)
        self._batch = Batch([Work(self._cache, row, [_UNNAMED] * num_tokens, logits=1)], self._device)
        return self._batch

    def commit(self) -> None:
        assert self._batch is not None, "begin() comes first"
        self._batch.commit()
        self._batch = None

    def close(self) -> None:
        self._cache.close(self._seat)
