"""A CPU's memory that comes from the system piece by piece, while what has come is in use already.

Usable are bytes from the beginning and bytes before the end; a thread that mostly pauses makes them more until they
meet. What is between can be read, as zeros, and on Linux not written: a write there would end the process. Knows no
pages of an arena and no owners.

The thread has no lower priority than others: where other programs want the processors, it could be kept from them while
it holds the interpreter's lock, or one of the system's, and all threads would wait for it.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

log = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20  # bytes that are asked for at once
PAUSE_FACTOR = 3  # times as long as a piece took: a quarter of a core is used, less where others want it, too
SMALLEST_PAGE = 4096  # bytes that the system gives at once, or more
CHECK_INTERVAL_BYTES = 64 << 20  # bytes between two looks at how much memory is free,
MIN_FREE_BYTES = 64 << 20  # and what of it is left alone
LINUX = sys.platform == "linux"
_libc = ctypes.CDLL(None, use_errno=True)


class ReservedMemory:
    """[size] uint8, zero; the bytes [0, low_end) and [high_start, size) are usable, and none of them can fail later."""

    def __init__(self, size: int) -> None:
        """Reserve addresses without memory. Raises OSError."""
        self.memory = _reserve_addresses(size)
        self._size = size
        self._piece = PIECE_BYTES
        self._pieces = -(-size // PIECE_BYTES)
        self._low, self._high = 0, self._pieces  # pieces between them have not come
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def low_end(self) -> int:
        """Bytes from the beginning that are usable."""
        return min(self._low * self._piece, self._size)

    @property
    def high_start(self) -> int:
        """The byte from which on all are usable, up to the end."""
        return min(self._high * self._piece, self._size)

    @property
    def is_finished(self) -> bool:
        """Whether no more will come: all is there, or memory has run out."""
        return self._low == self._high or (self._thread is not None and not self._thread.is_alive())

    def touch(self, *, below: int = 0, above: int = 0) -> None:
        """Make at least `below` bytes at the beginning and `above` at the end usable. Raises MemoryError."""
        while self.low_end < min(below, self._size) and self._low < self._high:
            self._touch_piece(from_below=True)
        while self._size - self.high_start < min(above, self._size) and self._low < self._high:
            self._touch_piece(from_below=False)

    def touch_rest(self, get_free_memory: Callable[[], int]) -> None:
        """Touch the rest in a thread, by turns at both ends; `get_free_memory` returns the free bytes.

        It ends when stop() is called, and when no memory is left.
        """
        ends = [end for end, some in ((True, self._low), (False, self._pieces - self._high)) if some] or [True]
        self._thread = threading.Thread(
            target=self._touch_pieces, args=(ends, get_free_memory), name="kv-memory", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end, if there is one."""
        self._stop.set()

    def _touch_pieces(self, ends: list[bool], get_free_memory: Callable[[], int]) -> None:
        allowed = 0  # bytes until the next look
        try:
            while self._low < self._high and not self._stop.is_set():
                if allowed < self._piece:
                    allowed = min(CHECK_INTERVAL_BYTES, get_free_memory() - MIN_FREE_BYTES)
                    if allowed < self._piece:
                        return
                start = time.monotonic()
                self._touch_piece(from_below=ends[(self._low + self._high) % len(ends)])
                allowed -= self._piece
                self._stop.wait(PAUSE_FACTOR * (time.monotonic() - start))
        except MemoryError:
            return
        except Exception:
            log.exception("the rest of the KV memory cannot be touched")

    def _touch_piece(self, *, from_below: bool) -> None:
        """Make the next piece at one end usable. Raises MemoryError."""
        piece = self._low if from_below else self._high - 1
        _touch(self.memory[piece * self._piece :][: self._piece])
        if from_below:
            self._low += 1
        else:
            self._high -= 1


def _reserve_addresses(size: int) -> Tensor:
    """Return [size] uint8 that takes no memory yet. Raises OSError."""
    if not LINUX:
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # it will be
        return torch.frombuffer(memory, dtype=torch.uint8)


def _touch(piece: Tensor) -> None:
    """Have the system give pages for [n] uint8, zero and writable. Raises MemoryError."""
    if LINUX:
        address, size = ctypes.c_void_p(piece.data_ptr()), ctypes.c_size_t(len(piece))
        if _libc.mprotect(address, size, mmap.PROT_READ | mmap.PROT_WRITE):
            raise MemoryError(os.strerror(ctypes.get_errno()))
        piece = piece[::SMALLEST_PAGE]  # the other bytes are zero; this releases the interpreter's lock
    piece.zero_()
