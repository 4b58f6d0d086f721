"""Operations that fail when they are told to."""

from __future__ import annotations

from typing import Any

from tests.contract import harness


class FailingOps:
    """The tried backend's. Fails once, after `calls` more calls of attend; the layer's keys are written by then."""

    def __init__(self) -> None:
        self._ops = harness.make_ops()
        self.calls: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def attend(self, *args: Any, **kwargs: Any) -> None:
        if self.calls is not None:
            self.calls -= 1
            if self.calls < 0:
                self.calls = None
                raise RuntimeError("injected")
        self._ops.attend(*args, **kwargs)
