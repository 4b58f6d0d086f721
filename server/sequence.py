"""One sequence on its own in a KVCache: for `forward_step` and what is built on it. Requests go through `core.py`."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from cache_strategies.base import KVCache, Row
from server.engine.batch import Batch, RowInput

_NO_TOKEN_ID = -1  # an embedding need not be a token: kept by the cache, not shared
POLL_INTERVAL = 0.001  # seconds between two looks at a seat that is not ready


class CachedSequence:
    """Implements `server.models.base.SequenceCache` over a seat."""

    def __init__(self, cache: KVCache, device: torch.device | str = "cpu", token_ids: Sequence[int] = ()) -> None:
        """Open a seat. Raises MemoryError if there is no room.

        `token_ids`: ids of the tokens that will enter, which its owner may append to. A strategy that shares finds its
        beginning and keeps it for others; `length` tokens need not enter then. Without it nothing is shared.
        """
        cache.poll()
        seat = cache.open(token_ids or [_NO_TOKEN_ID])
        if seat is None:
            raise MemoryError(f"no room in {cache.name!r}: give it more memory or close other sequences")
        self._cache, self._seat, self._device, self._token_ids = cache, seat, device, token_ids
        self._batch: Batch | None = None

    @property
    def length(self) -> int:
        return self._seat.length

    def begin(self, num_tokens: int) -> Batch:
        """Make room for the next tokens and return their attention.

        Raises MemoryError if there is no room for them, StrategyError if the strategy fails.
        """
        self._cache.poll()
        while not self._cache.ready(self._seat):
            time.sleep(POLL_INTERVAL)
            self._cache.poll()
        if not self._cache.grow(self._seat, num_tokens):
            raise MemoryError(f"no room in {self._cache.name!r} for {num_tokens} more tokens")
        named = self._token_ids[self.length : self.length + num_tokens]
        ids = [*named, *[_NO_TOKEN_ID] * (num_tokens - len(named))]
        self._batch = Batch([RowInput(self._cache, Row(self._seat, num_tokens), ids, num_logits=1)], self._device)
        return self._batch

    def commit(self) -> None:
        assert self._batch is not None, "begin() comes first"
        self._batch.commit()
        self._batch = None

    def discard(self) -> None:
        """Share nothing of it that is not finite; close() follows."""
        self._cache.discard(self._seat)

    def close(self) -> None:
        self._cache.close(self._seat)
