"""A stand-in for the n-gram proposer, which knows the expected text and is wrong as often as a test needs."""

from __future__ import annotations

import random
from collections.abc import Sequence


class FakeProposer:
    """Proposes draft tokens from the expected text; each is right with probability `right`."""

    def __init__(self, whole: Sequence[int], *, count: int, right: float = 0.8, seed: int = 0) -> None:
        self._whole, self._count, self._right = list(whole), count, right
        self._random = random.Random(seed)
        self.learned: list[int] = []

    def propose(self, text: Sequence[int], most: int) -> list[int]:
        assert list(text) == self._whole[: len(text)], "the text is not what it should be"
        assert most > 0
        ahead = self._whole[len(text) :][: min(most, self._count)]
        # A wrong draft is another token of the vocabulary, too: the model computes it
        return [token if self._random.random() < self._right else abs(token - 1) for token in ahead]

    def update_draft_length(self, accepted: int) -> None:
        self.learned.append(accepted)
