"""Maps a byte range of a file as a tensor. A mapping copies nothing, and is released with the tensor."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor

from server.models.errors import ModelError


def map_bytes(file: Path, start: int, size: int) -> Tensor:
    """Return `size` bytes from `start` on as [size] uint8, in a mapping of their own. Raises ModelError if that fails.

    Pages that were read stay in memory as long as their mapping exists: with a single mapping of the file, all weights
    would stay in memory beside their packed copies. Writing into the tensor does not change the file.
    """
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    within = start % mmap.ALLOCATIONGRANULARITY
    try:
        with file.open("rb") as opened:
            memory = mmap.mmap(opened.fileno(), within + size, access=mmap.ACCESS_COPY, offset=start - within)
    except (OSError, ValueError) as error:  # mmap raises ValueError if the file has become too short
        raise ModelError(f"cannot read {file}: {error}") from None
    return torch.frombuffer(memory, dtype=torch.uint8, offset=within)
