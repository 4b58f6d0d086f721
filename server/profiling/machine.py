"""Measures how fast this machine reads memory and multiplies matrices, which bounds the speed of every kernel."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.library import find_memory_reader
from kernels.memory import allocate

PASSES = 3  # number of timed calls, of which the fastest counts
ROWS, WIDTH, OUT = 512, 896, 9728  # a large matrix product: 512 tokens, gate and up projection of Qwen2.5-0.5B


def measure_fastest(run: Callable[[], object]) -> float:
    """Return the seconds of the fastest of PASSES calls, after a first call that is not timed."""
    run()
    best = float("inf")
    for _ in range(PASSES):
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return best


def measure_read_bandwidth(memory: Tensor) -> float:
    """Return the bytes per second that all threads together read from `memory`, a tensor of floats.

    Reads with plain loads in C++; if the C++ library is missing, with torch's vector norm, the closest that torch has.
    """
    read = find_memory_reader() or torch.linalg.vector_norm
    return memory.nbytes / measure_fastest(lambda: read(memory))


def measure_bandwidth(size: int, threads: int) -> float:
    """Return the bytes per second at which `threads` threads read `size` bytes: a limit of steps that read as many."""
    with use_threads(threads):
        return measure_read_bandwidth(allocate(size // 4 * 4).view(torch.float32))


def measure_matmul_flops(dtype: torch.dtype, threads: int) -> float:
    """Return the floating-point operations per second of torch in a large matrix product, with `threads` threads.

    The numbers are of `dtype` or, if that is faster, float32: processors without instructions for bfloat16 multiply it
    as float32, and torch then takes many times as long for it.
    """
    seconds = []
    with use_threads(threads):
        for each in {dtype, torch.float32}:
            x, weight = torch.ones(ROWS, WIDTH, dtype=each), torch.ones(OUT, WIDTH, dtype=each)
            seconds.append(measure_fastest(partial(F.linear, x, weight)))
    return 2 * ROWS * WIDTH * OUT / min(seconds)


@contextmanager
def use_threads(threads: int) -> Iterator[None]:
    """Set torch's number of threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def read_processor_name() -> str:
    """Return the processor's name, or its architecture if the system does not report the name."""
    if platform.system() == "Darwin":
        return subprocess.run(
            ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
        ).stdout.strip()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
