"""Operations that raise when a check sets them to."""

from __future__ import annotations

from typing import Any

from kernels.ops import Ops


class InjectedError(RuntimeError):
    """Raised by an operation that was set to fail."""


class FailingOps:
    """A backend's operations, which raise once after `calls` calls: attend(), or what a hook calls instead.

    That is copying into a mirror, or gathering. By then the keys of the layer are written, or some of them. In the same
    way `copies` counts what a strategy calls to move or copy tokens.
    """

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.calls: int | None = None
        self.copies: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def attend(self, *args: Any, **kwargs: Any) -> None:
        """Count the call, then compute."""
        self._count()
        self._ops.attend(*args, **kwargs)

    def gather(self, *args: Any) -> Any:
        """Count the call, then gather."""
        self._count()
        return self._ops.gather(*args)

    def repeat_kv_heads_step(self, *args: Any) -> None:
        """Copy, then count the call."""
        self._ops.repeat_kv_heads_step(*args)
        self._count()

    def copy_tokens(self, *args: Any) -> None:
        """Count the copy, then copy."""
        self._count_copy()
        self._ops.copy_tokens(*args)

    def copy_blocks(self, *args: Any) -> None:
        """Count the copy, then copy."""
        self._count_copy()
        self._ops.copy_blocks(*args)

    def _count(self) -> None:
        if self.calls is not None:
            self.calls -= 1
            if self.calls < 0:
                self.calls = None
                raise InjectedError("injected")

    def _count_copy(self) -> None:
        if self.copies is not None:
            self.copies -= 1
            if self.copies < 0:
                self.copies = None
                raise InjectedError("injected")
