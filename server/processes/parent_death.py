"""Has the Linux kernel kill a process when its parent dies, since a process stopped by SIGSTOP cannot end itself."""

from __future__ import annotations

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with_parent() -> None:
    """Have Linux send this process SIGKILL when the thread that started it ends; do nothing on another system."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
