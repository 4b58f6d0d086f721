"""The interface of an observer of the calls of strategies' methods: the supervisor's means to find one that hangs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class CallObserver(Protocol):
    """Records each call of a strategy's method, so that one that never returns can be named."""

    def encode_methods(self, instance: str) -> Mapping[str, int]:
        """Return a code for each method of an instance; 0 stands for others."""
        ...

    def enter(self, code: int) -> int:
        """Record that the call of a method begins; return what to pass to leave()."""
        ...

    def leave(self, outer: int) -> None:
        """Record that the call has ended."""
        ...


class NoObserver:
    """Implements CallObserver by doing nothing."""

    def encode_methods(self, instance: str) -> Mapping[str, int]:
        return {}

    def enter(self, code: int) -> int:
        return 0

    def leave(self, outer: int) -> None:
        pass
