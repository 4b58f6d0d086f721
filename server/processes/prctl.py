"""Settings of a process that only Linux has: its name in lists of processes, and that it ends with its parent.

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
