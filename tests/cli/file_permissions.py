"""File permissions that apply to root, too, so that tests of "Permission denied" run as any user."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

VERSION = 0x20080522  # of the kernel's capability interface: two words of 32 bits
DAC_OVERRIDE, DAC_READ_SEARCH = 1, 2


@contextmanager
def enforced_permissions() -> Iterator[None]:
    """Drop root's capability to ignore file permissions in this thread until the block ends."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(VERSION, 0)
    words = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice
    assert libc.capget(header, words) == 0, os.strerror(ctypes.get_errno())
    fewer = (ctypes.c_uint32 * 6)(*words)
    fewer[0] &= ~(1 << DAC_OVERRIDE | 1 << DAC_READ_SEARCH)
    assert libc.capset(header, fewer) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        assert libc.capset(header, words) == 0, os.strerror(ctypes.get_errno())
