"""Prefixes that stay in memory until a time, whoever uses them. Knows blocks by number; not what is in them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cache_strategies.base import Pin, covers


@dataclass
class Pins:
    """Which pin refers to which blocks."""

    clock: Callable[[], float]
    _held: dict[str, tuple[Pin, list[int]]] = field(default_factory=dict)
    _blocks: Counter[int] = field(default_factory=Counter)  # how many pins refer to each
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def add(self, blocks: Sequence[int], num_tokens: int, num_bytes: int, salt: str, ttl: float) -> Pin:
        pin = Pin(f"pin-{next(self._numbers)}", num_tokens, num_bytes, salt, self.clock() + ttl)
        self._held[pin.id] = pin, list(blocks)
        self._blocks.update(blocks)
        return pin

    def remove(self, pin_id: str) -> list[int]:
        """The blocks it referred to; none if there is no such pin."""
        _, blocks = self._held.pop(pin_id, (None, []))
        self._blocks.subtract(blocks)
        self._blocks += Counter()  # without those at 0
        return blocks

    def over(self) -> list[str]:
        """Pins whose time is over."""
        now = self.clock()
        return [pin.id for pin, _ in self._held.values() if pin.expires <= now]

    def under(self, salt: str | None) -> list[str]:
        """Pins under a salt, or all."""
        return [pin.id for pin, _ in self._held.values() if covers(salt, pin.salt)]

    def all(self) -> list[Pin]:
        return [pin for pin, _ in self._held.values()]

    @property
    def blocks(self) -> Counter[int]:
        return self._blocks
