"""Operations that raise when a test sets them to."""

from __future__ import annotations

from typing import Any

from tests.contract import harness


class FailingOps:
    """A backend's operations, which raise once after `calls` calls: attend(), or what a hook calls instead.

    That is copying into a mirror, or gathering. By then the keys of the layer are written, or some of them.
    """

    def __init__(self) -> None:
        self._ops = harness.make_ops()
        self.calls: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def attend(self, *args: Any, **kwargs: Any) -> None:
        self._count()
        self._ops.attend(*args, **kwargs)

    def gather(self, *args: Any) -> Any:
        self._count()
        return self._ops.gather(*args)

    def repeat_kv_heads_step(self, *args: Any) -> None:
        self._ops.repeat_kv_heads_step(*args)
        self._count()

    def _count(self) -> None:
        if self.calls is not None:
            self.calls -= 1
            if self.calls < 0:
                self.calls = None
                raise RuntimeError("injected")
