"""Where the kernels run that are checked, and how time is measured there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kernels.cuda import runtime
from kernels.cuda.library import CudaLibrary
from kernels.metal.backend import MetalOps
from kernels.metal.library import Kernels
from tests.kernels.cuda import host_kernels

Result = dict[str, Any]  # of a part: a line of JSON


class Machine(NamedTuple):
    """Where the kernels run."""

    device: torch.device
    compile_shader: Callable[[str], CudaLibrary]
    small: bool  # whether only small sizes are tried

    def make_ops(self) -> MetalOps:
        """Return operations that use all kernels, also those for products that are torch's in the backend."""
        return MetalOps(Kernels(self.compile_shader))

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def measure(self, call: Callable[[], object], seconds: float = 0.4) -> float:
        """Return the seconds of a call: the median of ten batches of calls."""
        call()
        self.synchronize()
        begin = time.perf_counter()
        call()
        self.synchronize()
        calls = 1 if self.small else max(1, int(seconds / 10 / (time.perf_counter() - begin)))
        times = []
        for _ in range(1 if self.small else 10):
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            self.synchronize()
            times.append((time.perf_counter() - begin) / calls)
        return sorted(times)[len(times) // 2]


def find_machine(name: str) -> Machine:
    if name == "cuda":
        return Machine(torch.device("cuda"), runtime.compile_shader, small=False)
    return Machine(torch.device("cpu"), host_kernels.compile_shader, small=True)
