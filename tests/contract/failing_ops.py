"""Operations that raise when a test sets them to."""

from __future__ import annotations

from typing import Any

from tests.contract import harness


class FailingOps:
    """A backend's operations, whose attend() raises once after `calls` calls, when the layer's keys are written."""

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
