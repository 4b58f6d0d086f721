"""CPU memory whose addresses are reserved at once and that is touched piece by piece, while a part is already in use.

Only touched memory may be used: a range at the beginning and one at the end, which a background thread extends until
they meet. The bytes between them read as zeros and, on Linux, must not be written: that would kill the process. Knows
neither the arena's pages nor their owners.

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
PAUSE_FACTOR = 3  # pause after each piece, as a multiple of the time to touch it: at most a quarter of a core is used
SMALLEST_PAGE = 4096  # bytes of the smallest virtual-memory page; writing one byte touches a whole page
CHECK_INTERVAL_BYTES = 64 << 20  # bytes that are touched between two checks of the free memory
STOP_TIMEOUT = 5.0  # seconds that stop() waits for the background thread
MIN_FREE_BYTES = 64 << 20  # bytes of the machine's free memory that are left to other programs
LINUX = sys.platform == "linux"
_libc = ctypes.CDLL(None, use_errno=True)


class ReservedMemory:
    """A zeroed uint8 tensor [size], of which the bytes [0, low_end) and [high_start, size) are backed by memory."""

    def __init__(self, size: int) -> None:
        """Reserve an address range of `size` bytes without memory. Raises OSError if the system refuses."""
        self.memory = _reserve_addresses(size)
        self._size = size
        self._piece = PIECE_BYTES
        self._pieces = -(-size // PIECE_BYTES)
        self._low, self._high = 0, self._pieces  # pieces [low, high) are untouched
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def low_end(self) -> int:
        """The number of usable (touched) bytes at the beginning of the tensor."""
        return min(self._low * self._piece, self._size)

    @property
    def high_start(self) -> int:
        """The index of the first byte of the usable range at the end."""
        return min(self._high * self._piece, self._size)

    @property
    def is_finished(self) -> bool:
        """Whether no more bytes will be touched: all have been, or the background thread has ended."""
        return self._low == self._high or (self._thread is not None and not self._thread.is_alive())

    def touch(self, *, below: int = 0, above: int = 0) -> None:
        """Make at least `below` bytes at the beginning of the tensor and `above` bytes at its end usable.

        Raises MemoryError if the operating system has not enough memory.
        """
        while self.low_end < min(below, self._size) and self._low < self._high:
            self._touch_piece(from_below=True)
        while self._size - self.high_start < min(above, self._size) and self._low < self._high:
            self._touch_piece(from_below=False)

    def touch_rest(self, get_free_memory: Callable[[], int]) -> None:
        """Start a thread that touches the remaining bytes, alternately at the beginning and at the end.

        The thread ends when all bytes are touched, when the machine's free bytes, which `get_free_memory` returns, run
        out, or after stop().
        """
        ends = [end for end, some in ((True, self._low), (False, self._pieces - self._high)) if some] or [True]
        self._thread = threading.Thread(
            target=self._touch_pieces, args=(ends, get_free_memory), name="kv-memory", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Make the background thread end after its current piece, and wait for that; do nothing if there is none.

        The interpreter must not end while the thread writes memory, as that would abort the process.
        """
        self._stop.set()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT)

    def _touch_pieces(self, ends: list[bool], get_free_memory: Callable[[], int]) -> None:
        allowed = 0  # number of bytes to touch until the next check of the free memory
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
        """Touch the next piece at the beginning or at the end. Raises MemoryError if there is not enough memory."""
        piece = self._low if from_below else self._high - 1
        _touch(self.memory[piece * self._piece :][: self._piece])
        if from_below:
            self._low += 1
        else:
            self._high -= 1


def _reserve_addresses(size: int) -> Tensor:
    """Return a zeroed uint8 tensor [size] that takes no memory yet. Raises OSError if the system refuses."""
    if not LINUX:
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    with suppress(OSError):  # kernels without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # _touch makes it writable
        return torch.frombuffer(memory, dtype=torch.uint8)


def _touch(piece: Tensor) -> None:
    """Make the operating system provide memory, zeroed and writable, for a uint8 tensor [n].

    Raises MemoryError if there is not enough.
    """
    if LINUX:
        address, size = ctypes.c_void_p(piece.data_ptr()), ctypes.c_size_t(len(piece))
        if _libc.mprotect(address, size, mmap.PROT_READ | mmap.PROT_WRITE):
            raise MemoryError(os.strerror(ctypes.get_errno()))
        piece = piece[::SMALLEST_PAGE]  # only one byte per page is written: the others are zero already
    piece.zero_()  # releases the GIL
