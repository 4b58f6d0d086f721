"""The model's files as the supervisor sees them: read ahead for the engine, and checked after SIGBUS has killed it.

The engine maps the weights (mmap). When a mapped file is truncated, the next read beyond its end kills the process
with SIGBUS, which leaves no time to log the reason. So the supervisor records the files before the engine starts, and
compares them afterwards. Renaming another file over one of them is harmless: the mapping keeps the old file.

Pages of a mapping are read one by one as they are needed, which is slow if the file is not in the page cache. While a
starting engine imports its modules, for a second or two, the system can read them ahead. Imports no torch.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil

MAPPED_SUFFIXES = (".safetensors", ".gguf")
READ_AHEAD_BYTES = 1 << 20  # bytes that one call asks to read ahead; the system reads no more per call
ADVICE = "files must not change while they are served: write a new file and rename it over the old one"


class ServedFiles:
    """The weight files of a directory, with the size and time of change that each had when this object was made."""

    def __init__(self, directory: Path) -> None:
        self._files = {file: now for file in _list_mapped_files(directory) if (now := _stat(file))}

    def read_ahead(self) -> None:
        """Have the system read the files in the background, so that reading their mappings need not wait.

        Do nothing if they would fill more than half of the free memory: they might evict each other.
        """
        if not hasattr(os, "posix_fadvise"):
            return
        size = sum(now.st_size for now in self._files.values())
        if size > psutil.virtual_memory().available // 2:
            return
        for file, now in self._files.items():
            with suppress(OSError), file.open("rb") as opened:  # ignored: the engine will report the error
                for start in range(0, now.st_size, READ_AHEAD_BYTES):
                    os.posix_fadvise(opened.fileno(), start, READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)

    def explain(self, exitcode: int | None) -> str | None:
        """Return why a process that had mapped the files died; None if SIGBUS was not the cause."""
        if exitcode != -signal.SIGBUS:
            return None
        changes = [change for file, then in self._files.items() if (change := _describe_change(file, then))]
        if not changes:
            return "SIGBUS means that a mapped file could not be read; look for a failing disk in the system's log"
        return f"SIGBUS came from a model file that changed: {'; '.join(changes)}; put the whole file back; {ADVICE}"


def _list_mapped_files(directory: Path) -> list[Path]:
    try:
        return sorted(file for file in directory.iterdir() if file.suffix in MAPPED_SUFFIXES)
    except OSError:  # ignored: the engine will report the error when it loads the model
        return []


def _stat(file: Path) -> os.stat_result | None:
    try:
        return file.stat()
    except OSError:
        return None


def _describe_change(file: Path, then: os.stat_result) -> str | None:
    """Return how a mapped file has changed since `then`; None if it has not, or if another file has its name now."""
    now = _stat(file)
    if now is None or (now.st_dev, now.st_ino) != (then.st_dev, then.st_ino):
        return None
    if now.st_size != then.st_size:
        return f"{file.resolve()} had {then.st_size} bytes when it was loaded and has {now.st_size} now"
    return f"{file.resolve()} was written to" if now.st_mtime_ns != then.st_mtime_ns else None
