"""The interface of an observer of the calls of strategies' methods: the supervisor's means to find one that hangs."""

from __future__ import annotations

from typing import Any, Protocol


class CallObserver(Protocol):
    """Records each call of a strategy's method, so that one that never returns can be named."""

    def encode(self, instance: str, method: str) -> int:
        """Return the number of a method of an instance."""
        ...

    def enter(self, call: int) -> Any:
        """Record that the call of a method begins; return what to pass to leave()."""
        ...

    def leave(self, outer: Any) -> None:
        """Record that the call has ended."""
        ...


class NoObserver:
    """Implements CallObserver by doing nothing."""

    def encode(self, instance: str, method: str) -> int:
        return 0

    def enter(self, call: int) -> None:
        pass

    def leave(self, outer: None) -> None:
        pass
