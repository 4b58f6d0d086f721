"""The pins of a paged cache: prefixes that stay in memory until a time. Knows their blocks by number."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from cache_strategies.block_hashes import BlockHash, Prefix
from cache_strategies.types import Pin, SaltScope


@dataclass
class Pins:
    """The pins of an instance, each with the numbers of the blocks that it keeps in memory, and with its prefix."""

    clock: Callable[[], float]
    _pins: dict[str, tuple[Pin, list[int], Prefix]] = field(default_factory=dict)  # by id
    _blocks: Counter[int] = field(default_factory=Counter)  # number of pins that hold each block
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def add(self, blocks: Sequence[int], last: BlockHash, num_tokens: int, num_bytes: int, ttl: float) -> Pin:
        """Pin blocks, of which `last` is the hash of the last one."""
        pin = Pin(f"pin-{next(self._numbers)}", num_tokens, num_bytes, last.salt, self.clock() + ttl)
        self._pins[pin.id] = pin, list(blocks), last.prefix
        self._blocks.update(blocks)
        return pin

    def remove(self, pin_id: str) -> list[int]:
        """Remove a pin; return the blocks it held, or an empty list if there is no such pin."""
        blocks = self._pins.pop(pin_id)[1] if pin_id in self._pins else []
        self._blocks.subtract(blocks)
        self._blocks += Counter()  # removes the blocks that no pin holds any more
        return blocks

    def find_expired(self) -> list[str]:
        """Return the ids of the pins whose time to live is over."""
        now = self.clock()
        return [pin.id for pin, *_ in self._pins.values() if pin.expires <= now]

    def find_in_scope(self, scope: SaltScope) -> list[str]:
        """Return the ids of the pins whose salts are in a scope."""
        return [pin.id for pin, *_ in self._pins.values() if scope.includes(pin.salt)]

    def find_by_prefix(self, prefixes: Collection[Prefix]) -> list[str]:
        """Return the ids of the pins of any of these prefixes."""
        return [pin_id for pin_id, prefix in self.iter_prefixes() if prefix in prefixes]

    def iter_prefixes(self) -> Iterator[tuple[str, Prefix]]:
        """Yield the id and the prefix of each pin."""
        for pin, _, prefix in self._pins.values():
            yield pin.id, prefix

    def list_pins(self) -> list[Pin]:
        return [pin for pin, *_ in self._pins.values()]

    @property
    def blocks(self) -> Counter[int]:
        return self._blocks
