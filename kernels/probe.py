"""How fast this machine reads its memory: what every figure of a kernel is held against."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

PASSES = 3  # the best counts


def seconds(run: Callable[[], object]) -> float:
    """Of the fastest of some passes, after one that nobody counts."""
    run()
    best = float("inf")
    for _ in range(PASSES):
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return best


def read_bandwidth(memory: Tensor) -> float:
    """Bytes a second that all threads read together; `memory` is more than a cache holds."""
    return memory.nbytes / seconds(memory.sum)
