"""What only Linux lets a process do: have a name in lists, end with its parent, return what malloc keeps.

The processes that read texts import it, too, and little else.
"""

from __future__ import annotations

import ctypes
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15  # <linux/prctl.h>


def die_with_parent() -> None:
    """Have Linux send this process SIGKILL when the thread that started it ends; do nothing on another system.

    A process stopped by SIGSTOP could not end itself.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)


def set_process_name(name: str) -> None:
    """Set the name that `top` and `ps -o comm` show, of which Linux keeps 15 bytes; do nothing on another system."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, ctypes.c_char_p(name.encode()), 0, 0, 0)


def return_freed_memory() -> None:
    """Return freed memory to the system, which glibc's malloc keeps; do nothing without glibc.

    To be called once what was read is in its final form: a vocabulary and its merges leave 100 MB and more.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
