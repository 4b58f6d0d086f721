"""How fast this machine reads its memory and multiplies: what every figure of a kernel is held against."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.library import find_memory_reader
from kernels.memory import allocate

PASSES = 3  # the best counts
ROWS, WIDTH, OUT = 512, 896, 9728  # of a large product: gate and up of Qwen2.5-0.5B


def measure_fastest(run: Callable[[], object]) -> float:
    """Of the fastest of some passes, after one that nobody counts."""
    run()
    best = float("inf")
    for _ in range(PASSES):
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return best


def measure_read_bandwidth(memory: Tensor) -> float:
    """Bytes a second that all threads read together from `memory`, which is of floats.

    By plain loads; without C++ by the sum of squares, the reduction with which torch comes nearest to them.
    """
    read = find_memory_reader() or torch.linalg.vector_norm
    return memory.nbytes / measure_fastest(lambda: read(memory))


def measure_bandwidth(size: int, threads: int) -> float:
    """Return the bytes a second read from `size` bytes in `threads` threads: the bound of a step that reads as much."""
    with use_threads(threads):
        return measure_read_bandwidth(allocate(size // 4 * 4).view(torch.float32))


def measure_matmul_flops(dtype: torch.dtype, threads: int) -> float:
    """Floating-point operations a second of torch's large products in `dtype`, in so many threads."""
    x, weight = torch.ones(ROWS, WIDTH, dtype=dtype), torch.ones(OUT, WIDTH, dtype=dtype)
    with use_threads(threads):
        return 2 * ROWS * WIDTH * OUT / measure_fastest(lambda: F.linear(x, weight))


@contextmanager
def use_threads(threads: int) -> Iterator[None]:
    """torch's, for the time being."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
