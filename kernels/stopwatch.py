"""Times operations where they are called, while it is asked to. At other times nothing stands in between."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from kernels.ops import Ops
from kernels.table import OPS


class Stopwatch:
    """`with` it, calls of `ops` are timed; one that another makes counts as part of the other."""

    def __init__(self, ops: Ops, device: torch.device | str = "cpu") -> None:
        """The device is waited for before and after each call, where it does not compute at once."""
        self.seconds = {op.name: 0.0 for op in OPS}
        self._ops = ops
        self._wait = WAITS.get(torch.device(device).type)
        self._before: dict[str, Any] = {}  # what the object had of its own
        self._busy = False

    def __enter__(self) -> Stopwatch:
        """Begins with nothing."""
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        own = vars(self._ops)
        timed = {name: self._timing(name, getattr(self._ops, name)) for name in self.seconds}
        self._before = {name: own[name] for name in timed if name in own}
        own.update(timed)
        return self

    def __exit__(self, *_: object) -> None:
        own = vars(self._ops)
        for name in self.seconds:
            del own[name]
        own.update(self._before)

    def _timing(self, name: str, run: Callable[..., object]) -> Callable[..., object]:
        def timed(*args: Any, **kwargs: Any) -> object:
            if self._busy:
                return run(*args, **kwargs)
            if self._wait:
                self._wait()
            self._busy, began = True, perf_counter()
            try:
                result = run(*args, **kwargs)
                if self._wait:
                    self._wait()
                return result
            finally:
                self.seconds[name] += perf_counter() - began
                self._busy = False

        return timed


WAITS: dict[str, Callable[[], None]] = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}
