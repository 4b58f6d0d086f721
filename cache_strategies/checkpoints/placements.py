"""The built-in checkpoint policies: each keeps more checkpoints than the one before it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from cache_strategies.checkpoints.base import CheckpointPolicy, OpenedText


class Branches(CheckpointPolicy):
    """Keeps the end of each prompt, and where a text differs from an earlier one: two checkpoints a text at most.

    (Pan et al. 2024, "Marconi: Prefix caching for the era of hybrid LLMs", arXiv:2411.19379.)
    """

    def place(self, text: OpenedText, first: int, end: int) -> Iterable[int]:
        return [each for each in {text.num_reusable, text.num_shared} if first <= each < end]


class Interval(Branches):
    """Keeps every `interval` tokens as well, so that so many tokens are computed again at most."""

    def place(self, text: OpenedText, first: int, end: int) -> Iterable[int]:
        regular = range(-(-first // self.interval) * self.interval, end, self.interval)
        return [*super().place(text, first, end), *regular]


class Messages(Interval):
    """Keeps the ends of the prompt's messages as well, where edited conversations differ."""

    def place(self, text: OpenedText, first: int, end: int) -> Iterable[int]:
        ends = text.message_ends
        own = ends[bisect_left(ends, first) : bisect_left(ends, end)]
        return [*super().place(text, first, end), *own]
