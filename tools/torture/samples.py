"""Samples memory, descriptors and threads of the server's processes over time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from time import monotonic

import psutil

from tools.torture.server_process import Roles, ServerProcess
from tools.torture.trends import Point

MIB = 2**20
RESIDENT, PRIVATE, PROPORTIONAL = MEMORY = "resident MiB", "private MiB", "proportional MiB"  # Linux reports all three
NOT_JUDGED = (PROPORTIONAL,)  # it also changes with other processes that map the same libraries
DESCRIPTORS, THREADS = "descriptors", "threads"


class Samples:
    """Time series of the server's processes, by process name and figure."""

    def __init__(self, server: ServerProcess) -> None:
        self.series: defaultdict[tuple[str, str], list[Point]] = defaultdict(list)
        self._server = server
        self._began = monotonic()

    def take(self) -> None:
        """Add one point to every series, except those of a process that has just ended."""
        now = monotonic() - self._began
        for role, process in name_processes(self._server.find_processes()[0], self._server.find_roles()).items():
            with suppress(psutil.NoSuchProcess):
                for what, value in measure_process(process).items():
                    self.series[role, what].append((now, value))


def name_processes(supervisor: psutil.Process, roles: Roles) -> dict[str, psutil.Process]:
    """Return the processes by name; names stay the same as long as no process is replaced."""
    by_name = {"supervisor": supervisor} | ({"engine": roles.engine} if roles.engine else {})
    for name, processes in (("worker", roles.workers), ("helper", roles.helpers)):
        for number, process in enumerate(sorted(processes, key=lambda each: each.pid)):
            by_name[f"{name}-{number}"] = process
    return by_name


def measure_process(process: psutil.Process) -> Mapping[str, float]:
    """Return a process's memory in MiB, descriptors and threads; some systems do not report proportional memory."""
    with process.oneshot():
        memory = process.memory_full_info()
        figures = {RESIDENT: memory.rss / MIB, PRIVATE: memory.uss / MIB}
        figures |= {PROPORTIONAL: memory.pss / MIB} if hasattr(memory, "pss") else {}
        return figures | {DESCRIPTORS: process.num_fds(), THREADS: process.num_threads()}
