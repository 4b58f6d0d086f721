"""Stands between the operations and who calls them, for as long as it is asked to. At other times nothing does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from kernels.ops import Ops
from kernels.table import OPS, Op


class Watched:
    """`with` it, every call of `ops` goes through `call`; those that an operation makes itself do not."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._before: dict[str, Any] = {}  # what the object had of its own
        self._busy = False

    def call(self, op: Op, run: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Runs one; whoever inherits this does more."""
        return run(*args, **kwargs)

    def __enter__(self) -> Self:
        own = vars(self._ops)
        watched = {op.name: self._through(op, getattr(self._ops, op.name)) for op in OPS}
        self._before = {name: own[name] for name in watched if name in own}
        own.update(watched)
        return self

    def __exit__(self, *_: object) -> None:
        own = vars(self._ops)
        for op in OPS:
            del own[op.name]
        own.update(self._before)

    def _through(self, op: Op, run: Callable[..., object]) -> Callable[..., object]:
        def called(*args: Any, **kwargs: Any) -> object:
            if self._busy:
                return run(*args, **kwargs)
            self._busy = True
            try:
                return self.call(op, run, args, kwargs)
            finally:
                self._busy = False

        return called
