"""Reads the model's files ahead for the engine, which maps them (mmap). Imports no torch.

Pages of a mapping are read one by one as they are needed, which is slow if the file is not in the page cache. While a
starting engine imports its modules, for a second or two, the system can read them ahead.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import psutil

MAPPED_SUFFIXES = (".safetensors", ".gguf")
READ_AHEAD_BYTES = 1 << 20  # bytes that one call asks to read ahead; the system reads no more per call


def read_ahead(directory: Path) -> None:
    """Have the system read a model's weights in the background, so that reading their mappings need not wait.

    Do nothing on other systems than Linux, or if they would fill more than half of the free memory: they might evict
    each other.
    """
    if sys.platform != "linux":
        return
    with suppress(OSError):  # ignored: the engine will report the error
        sizes = {file: file.stat().st_size for file in directory.iterdir() if file.suffix in MAPPED_SUFFIXES}
        if sum(sizes.values()) > psutil.virtual_memory().available // 2:
            return
        for file, size in sizes.items():
            with file.open("rb") as opened:
                for start in range(0, size, READ_AHEAD_BYTES):
                    os.posix_fadvise(opened.fileno(), start, READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
