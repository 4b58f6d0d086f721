"""Memory for tests of large offsets: tens of gigabytes of address space, in which only touched pages exist."""

from __future__ import annotations

import mmap
import sys

import pytest
import torch
from torch import Tensor

NORESERVE = 0x4000 if sys.platform == "linux" else 0  # Python 3.11 has no name for it; elsewhere all memory is such


def sparse_memory(size: int) -> Tensor:
    """Return [size] uint8, all 0. Skip the test if a process may not have that much address space."""
    try:
        return torch.frombuffer(
            mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE), dtype=torch.uint8
        )
    except OSError as error:
        pytest.skip(f"{size} bytes cannot be mapped: {error}")
