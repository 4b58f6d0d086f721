"""Times operations where they are called, while it is asked to."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Self

import torch

from kernels.ops import Ops
from kernels.table import LAYERS, OPS, Op
from kernels.watched import Watched


class Stopwatch(Watched):
    """`with` it, calls of `ops` are timed; one that another makes counts as part of the other."""

    counts = False

    def __init__(self, ops: Ops, device: torch.device | str = "cpu") -> None:
        """The device is waited for before and after each call, where it does not compute at once."""
        super().__init__(ops)
        self.seconds = {op.name: 0.0 for op in OPS if op.name != LAYERS}
        self._wait = WAITS.get(torch.device(device).type)

    def __enter__(self) -> Self:
        """Begins with nothing."""
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        return super().__enter__()

    def took(self, name: str, seconds: float) -> None:
        self.seconds[name] += seconds

    def call(self, op: Op, run: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        if self._wait:
            self._wait()
        began = perf_counter()
        try:
            result = run(*args, **kwargs)
            if self._wait:
                self._wait()
            return result
        finally:
            self.seconds[op.name] += perf_counter() - began


WAITS: dict[str, Callable[[], None]] = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}
