"""CPU memory that is reserved at once and touched piece by piece, while the touched part is already in use.

Touched, and so usable, are a range at the beginning and one at the end; a background thread extends them until they
meet. The bytes between read as zeros and, on Linux, must not be written: that would kill the process. Knows neither
arena pages nor owners.

The thread runs at normal priority. With a lower one, other programs could keep it from running while it holds the GIL
or a kernel lock, and all other threads would wait for it.
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

PIECE_BYTES = 4 << 20  # bytes that are touched at once
PAUSE_FACTOR = 3  # the pause after a piece, as a multiple of the time it took: a quarter of a core at most is used
SMALLEST_PAGE = 4096  # bytes of the smallest virtual-memory page: one write in each touches all of them
CHECK_INTERVAL_BYTES = 64 << 20  # bytes that are touched between two checks of the free memory
MIN_FREE_BYTES = 64 << 20  # free bytes of the machine that are never touched
LINUX = sys.platform == "linux"
_libc = ctypes.CDLL(None, use_errno=True)


class ReservedMemory:
    """A zeroed uint8 tensor [size], of which the bytes [0, low_end) and [high_start, size) are backed by memory."""

    def __init__(self, size: int) -> None:
        """Reserve an address range of `size` bytes without memory. Raises OSError."""
        self.memory = _reserve_addresses(size)
        self._size = size
        self._piece = PIECE_BYTES
        self._pieces = -(-size // PIECE_BYTES)
        self._low, self._high = 0, self._pieces  # pieces between them are untouched
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def low_end(self) -> int:
        """The number of usable bytes at the beginning."""
        return min(self._low * self._piece, self._size)

    @property
    def high_start(self) -> int:
        """The index of the first of the usable bytes at the end."""
        return min(self._high * self._piece, self._size)

    @property
    def is_finished(self) -> bool:
        """Whether no more bytes will be touched: all are, or memory has run out."""
        return self._low == self._high or (self._thread is not None and not self._thread.is_alive())

    def touch(self, *, below: int = 0, above: int = 0) -> None:
        """Make at least `below` bytes at the beginning and `above` at the end usable. Raises MemoryError."""
        while self.low_end < min(below, self._size) and self._low < self._high:
            self._touch_piece(from_below=True)
        while self._size - self.high_start < min(above, self._size) and self._low < self._high:
            self._touch_piece(from_below=False)

    def touch_rest(self, get_free_memory: Callable[[], int]) -> None:
        """Start a thread that touches the rest, alternating between the ends; `get_free_memory` returns free bytes.

        The thread ends when all is touched, memory runs out or stop() is called.
        """
        ends = [end for end, some in ((True, self._low), (False, self._pieces - self._high)) if some] or [True]
        self._thread = threading.Thread(
            target=self._touch_pieces, args=(ends, get_free_memory), name="kv-memory", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Tell the thread to end after its current piece; do nothing if there is none."""
        self._stop.set()

    def _touch_pieces(self, ends: list[bool], get_free_memory: Callable[[], int]) -> None:
        allowed = 0  # bytes to touch until the next check of the free memory
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
            log.exception("cannot touch the rest of the KV memory; the server goes on with the part it has")

    def _touch_piece(self, *, from_below: bool) -> None:
        """Touch the next piece at one end. Raises MemoryError."""
        piece = self._low if from_below else self._high - 1
        _touch(self.memory[piece * self._piece :][: self._piece])
        if from_below:
            self._low += 1
        else:
            self._high -= 1


def _reserve_addresses(size: int) -> Tensor:
    """Return a zeroed uint8 tensor [size] that takes no memory yet. Raises OSError."""
    if not LINUX:
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    with suppress(OSError):  # kernels without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # _touch makes it writable
        return torch.frombuffer(memory, dtype=torch.uint8)


def _touch(piece: Tensor) -> None:
    """Make the system back a uint8 tensor [n] with memory, zeroed and writable. Raises MemoryError."""
    if LINUX:
        address, size = ctypes.c_void_p(piece.data_ptr()), ctypes.c_size_t(len(piece))
        if _libc.mprotect(address, size, mmap.PROT_READ | mmap.PROT_WRITE):
            raise MemoryError(os.strerror(ctypes.get_errno()))
        piece = piece[::SMALLEST_PAGE]  # one write per page suffices: the other bytes are zero already
    piece.zero_()  # releases the GIL
