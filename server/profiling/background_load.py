"""Measures how much other processes used the processors during a benchmark: a busy one can halve all figures."""

from __future__ import annotations

import os
from time import monotonic

import psutil

BUSY_THRESHOLD = 0.05  # share of all processors; if other processes use more, figures are not reliable
# CPU times that do not count as use; guest time is contained in user time.
IDLE_STATES = ("idle", "iowait", "guest", "guest_nice")


class Neighbours:
    """Measures the CPU time that other processes use from the creation of this object on."""

    def __init__(self) -> None:
        self._start_times = _read_cpu_times()

    def compute_share(self, own: float = 0.0) -> float:
        """Return the share of the CPU time of all processors, since this object was made, that other processes used.

        This process and its ended children do not count, nor do `own` CPU seconds, such as of children that still run.
        """
        wall, busy, ours = (now - before for now, before in zip(_read_cpu_times(), self._start_times, strict=True))
        return max(0.0, busy - ours - own) / (wall * (os.cpu_count() or 1))


def _read_cpu_times() -> tuple[float, float, float]:
    """Return (wall-clock seconds, CPU seconds of all processes, those of this process and its ended children)."""
    times = psutil.cpu_times()._asdict()
    busy = sum(seconds for name, seconds in times.items() if name not in IDLE_STATES)
    return monotonic(), busy, sum(psutil.Process().cpu_times()[:4])


def format_warning(share: float) -> str:
    """Return a warning to print with the figures; empty if other processes used at most BUSY_THRESHOLD."""
    return f"other processes used {share:.0%} of the machine meanwhile: measure again" if share > BUSY_THRESHOLD else ""
