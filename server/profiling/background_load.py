"""Who else used the processors while something was measured: on two cores one busy neighbour halves every figure."""

from __future__ import annotations

import os
from time import monotonic

import psutil

BUSY_THRESHOLD = 0.05  # of all processors; more, and a figure is not of what was measured alone
IDLE_STATES = ("idle", "iowait", "guest", "guest_nice")  # guests are counted as users, too


class Neighbours:
    """Counts from when it is made."""

    def __init__(self) -> None:
        self._start_times = _read_cpu_times()

    def compute_share(self, own: float = 0.0) -> float:
        """Of all processors, since then: what neither this process nor its ended children used.

        `own`: CPU seconds of others that are to be left out, such as children that go on.
        """
        wall, busy, ours = (now - before for now, before in zip(_read_cpu_times(), self._start_times, strict=True))
        return max(0.0, busy - ours - own) / (wall * (os.cpu_count() or 1))


def _read_cpu_times() -> tuple[float, float, float]:
    """Seconds on the clock, of all processes on all processors, of ours."""
    times = psutil.cpu_times()._asdict()
    busy = sum(seconds for name, seconds in times.items() if name not in IDLE_STATES)
    return monotonic(), busy, sum(psutil.Process().cpu_times()[:4])


def format_warning(share: float) -> str:
    """For a reader of figures; empty if nobody was there."""
    return f"other processes used {share:.0%} of the machine meanwhile: measure again" if share > BUSY_THRESHOLD else ""
