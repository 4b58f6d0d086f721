"""Counts operations where they are called, and the bytes that they must move, while it is asked to. Knows no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Self

from kernels.ops import Ops
from kernels.selfcheck.op_info import Op
from kernels.watched import Watched


class Recorder(Watched):
    """`with` it, calls of `ops` are counted by name; one that another makes counts as part of the other."""

    def __init__(self, ops: Ops) -> None:
        super().__init__(ops)
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()  # as the table has them, of these calls

    def __enter__(self) -> Self:
        """Begins with nothing."""
        self.calls, self.bytes = Counter(), Counter()
        return super().__enter__()

    def call(self, op: Op, run: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        self.calls[op.name] += 1
        self.bytes[op.name] += op.bytes(*args, **kwargs)
        return run(*args, **kwargs)
