"""Times operations where they are called, while it is asked to."""

from __future__ import annotations

from typing import Self

import torch

from kernels.ops import Ops
from kernels.selfcheck.op_info import LAYERS, OPS
from kernels.watched import Timed


class Stopwatch(Timed):
    """`with` it, calls of `ops` are timed; one that another makes counts as part of the other."""

    def __init__(self, ops: Ops, device: torch.device | str = "cpu") -> None:
        super().__init__(ops, device)
        self.seconds = {op.name: 0.0 for op in OPS if op.name != LAYERS}

    def __enter__(self) -> Self:
        """Begins with nothing."""
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        return super().__enter__()

    def took(self, name: str, seconds: float) -> None:
        self.seconds[name] += seconds
