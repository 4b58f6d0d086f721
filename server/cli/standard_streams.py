"""Printing to standard streams that may be closed, on a full disk, or a pipe whose reader is gone.

Text that cannot be printed is dropped: none of these is a reason for a server to end.
"""

from __future__ import annotations

import os
import sys
from typing import TextIO

STDERR = 2


def open_missing_streams() -> None:
    """Open /dev/null for each standard stream that is closed, so that no socket or file gets its descriptor number."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


def print_safely(text: str, stream: TextIO) -> None:
    """Print a text; if it cannot be written, drop it and everything that is later printed to the stream."""
    try:
        encoding = stream.encoding or "utf-8"
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream)
        stream.flush()
    except OSError:
        redirect_to_devnull(stream)


def redirect_to_devnull(stream: TextIO) -> None:
    """Redirect a stream to /dev/null: at exit Python flushes what could not be written, which would fail again."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
