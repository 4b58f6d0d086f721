"""Who else used the processors while something was measured: on two cores one busy neighbour halves every figure."""

from __future__ import annotations

import os
from collections.abc import Callable
from time import monotonic

import psutil

BUSY = 0.05  # of all processors; more, and a figure is not of what was measured alone
IDLE = ("idle", "iowait", "guest", "guest_nice")  # guests are counted as users, too


class Neighbours:
    """Counts from when it is made. `own`: CPU seconds so far of processes to be left out, beside this one's."""

    def __init__(self, own: Callable[[], float] = lambda: 0.0) -> None:
        self._own = own
        self._before = self._now()

    def share(self) -> float:
        """Of all processors, since then: what neither this process nor its ended children nor `own` used."""
        wall, busy, ours = (now - before for now, before in zip(self._now(), self._before, strict=True))
        return max(0.0, busy - ours) / (wall * (os.cpu_count() or 1))

    def _now(self) -> tuple[float, float, float]:
        """Seconds on the clock, of all processes on all processors, of ours."""
        times = psutil.cpu_times()._asdict()
        busy = sum(seconds for name, seconds in times.items() if name not in IDLE)
        return monotonic(), busy, sum(psutil.Process().cpu_times()[:4]) + self._own()


def told(share: float) -> str:
    """For a reader of figures; empty if nobody was there."""
    return f"other processes used {share:.0%} of the machine meanwhile: measure again" if share > BUSY else ""
