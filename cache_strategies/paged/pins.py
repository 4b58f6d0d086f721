"""The pins of a paged cache: prefixes that stay in memory until a time. Knows numbers of blocks; not their contents."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cache_strategies.types import Pin, Salt, SaltScope


@dataclass
class Pins:
    """The pins of an instance, each with the numbers of the blocks that it keeps in memory."""

    clock: Callable[[], float]
    _pins: dict[str, tuple[Pin, list[int]]] = field(default_factory=dict)  # by id
    _blocks: Counter[int] = field(default_factory=Counter)  # number of pins that hold each block
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def add(self, blocks: Sequence[int], num_tokens: int, num_bytes: int, salt: Salt, ttl: float) -> Pin:
        pin = Pin(f"pin-{next(self._numbers)}", num_tokens, num_bytes, salt, self.clock() + ttl)
        self._pins[pin.id] = pin, list(blocks)
        self._blocks.update(blocks)
        return pin

    def remove(self, pin_id: str) -> list[int]:
        """Remove a pin; return the blocks it held, or an empty list if there is no such pin."""
        _, blocks = self._pins.pop(pin_id, (None, []))
        self._blocks.subtract(blocks)
        self._blocks += Counter()  # removes the blocks that no pin holds any more
        return blocks

    def find_expired(self) -> list[str]:
        """Return the ids of the pins whose time to live is over."""
        now = self.clock()
        return [pin.id for pin, _ in self._pins.values() if pin.expires <= now]

    def find_in_scope(self, scope: SaltScope) -> list[str]:
        """Return the ids of the pins whose salts are in a scope."""
        return [pin.id for pin, _ in self._pins.values() if scope.includes(pin.salt)]

    def list_pins(self) -> list[Pin]:
        return [pin for pin, _ in self._pins.values()]

    @property
    def blocks(self) -> Counter[int]:
        return self._blocks
