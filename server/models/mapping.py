"""A stretch of a file as a tensor: mapped, so that it costs no copy, and let go with the tensor. Knows no format."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor

from server.models.errors import ModelError


def mapped_bytes(file: Path, start: int, size: int) -> Tensor:
    """[size] uint8 from byte `start` on, in a mapping of their own.

    Pages of a mapping that were read are the process's memory as long as it is there; one of the whole file would keep
    all of it beside the packed weights. Whoever writes into the tensor changes no file. Raises ModelError.
    """
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    within = start % mmap.ALLOCATIONGRANULARITY
    try:
        with file.open("rb") as opened:
            memory = mmap.mmap(opened.fileno(), within + size, access=mmap.ACCESS_COPY, offset=start - within)
    except (OSError, ValueError) as error:  # the latter if the file has become too short
        raise ModelError(f"cannot read {file}: {error}") from None
    return torch.frombuffer(memory, dtype=torch.uint8, offset=within)
