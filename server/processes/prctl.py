"""Settings of a process that only Linux has: its name in lists of processes, and that it ends with its parent."""

from __future__ import annotations

import ctypes
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15  # <linux/prctl.h>


def die_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Have Linux send this process a signal when the thread that started it ends; do nothing on another system.

    It is SIGKILL by default: a process stopped by SIGSTOP cannot end itself.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal_number), 0, 0, 0)


def set_process_name(name: str) -> None:
    """Set the name that `top` and `ps -o comm` show, of which Linux keeps 15 bytes; do nothing on another system."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, ctypes.c_char_p(name.encode()), 0, 0, 0)
