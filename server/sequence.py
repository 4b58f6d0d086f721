"""One sequence in a KVCache, without a scheduler: for `forward_step`. The server's requests go through `core.py`."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from server.engine.batch import Batch, RowInput
from server.engine.instance import Instance
from server.engine.scheduling.scheduler import has_room

_NO_TOKEN_ID = -1  # stands for the id of a token of which only the embedding is given: its block is not shared
POLL_INTERVAL = 0.001  # seconds between two polls of a sequence that is not ready


class CachedSequence:
    """Implements `server.models.base.SequenceCache` with a sequence of a KVCache."""

    def __init__(self, instance: Instance, device: torch.device | str = "cpu", token_ids: Sequence[int] = ()) -> None:
        """Open a new sequence in an instance. Raises MemoryError if there is no room.

        `token_ids`: the ids of the tokens to come; the caller may append to the list later. A strategy with a prefix
        cache finds their longest cached prefix (`length` tokens, which must not be computed again) and caches the
        rest. Without ids nothing is shared.
        """
        instance.poll()
        opened = instance.open(token_ids or [_NO_TOKEN_ID])
        if opened is None:
            raise MemoryError(f"no room in {instance.name!r}: give it more memory or close other sequences")
        self._instance, self._sequence, self._device, self._token_ids = instance, opened, device, token_ids
        self._batch: Batch | None = None
        self._num_located = 0  # tokens of the batch
        self.length = opened.length  # number of committed tokens

    @property
    def position(self) -> int:
        """The position of the next token, for RoPE."""
        with self._instance.guard["locate"]:
            return self.length - self._sequence.shift

    def begin(self, num_tokens: int) -> Batch:
        """Allocate memory for the next tokens and return their batch, which is their `Attention`.

        Raises MemoryError if there is no room, StrategyError if the strategy fails.
        """
        instance = self._instance
        instance.poll()
        with instance.guard["schedule"]:
            while not self._sequence.ready():
                time.sleep(POLL_INTERVAL)
                instance.poll()
            is_reserved = has_room(self._sequence, self.length, num_tokens)
        if not is_reserved:
            raise MemoryError(f"no room in {instance.name!r} for {num_tokens} more tokens")
        named = self._token_ids[self.length : self.length + num_tokens]
        ids = [*named, *[_NO_TOKEN_ID] * (num_tokens - len(named))]
        self._num_located = num_tokens
        row = RowInput(instance, self._sequence, self.length, ids, num_logits=1)
        self._batch = Batch([row], self._device)
        return self._batch

    def commit(self) -> None:
        """Add the tokens of the last `begin`, once they are computed. Raises StrategyError if the strategy fails."""
        assert self._batch is not None, "begin() comes first"
        batch, self._batch = self._batch, None
        for error in batch.commit().values():
            raise error
        self.length += self._num_located

    def close(self) -> None:
        self._instance.close(self._sequence)
