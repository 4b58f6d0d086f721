"""Reads what control groups allow this process: the memory and the processors of its container or service.

Linux only. A process is limited by its own group and by all groups above it, in cgroups of version 1 or 2
(https://docs.kernel.org/admin-guide/cgroup-v2.html, .../cgroup-v1/memory.html); machines may mount both.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")
MOUNT = "sys/fs/cgroup"  # where version 2 is mounted by convention, in sandboxes that do not list their mounts, too
UNLIMITED = 1 << 60  # bytes; version 1 writes no limit as the greatest number of whole pages


class MemoryLimit(NamedTuple):
    """The memory of the group that leaves the least of it, in bytes."""

    total: int
    used: int  # without file pages that were not used lately: the kernel takes them back before it refuses memory

    @property
    def free(self) -> int:
        """The bytes that may still be allocated."""
        return max(0, self.total - self.used)


class _MemoryFiles(NamedTuple):
    """The names of a group's files about memory."""

    limits: tuple[str, ...]
    usage: str
    inactive: str  # the line of memory.stat with the file pages that were not used lately, of groups below, too


MEMORY_FILES = {  # by version
    1: _MemoryFiles(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    2: _MemoryFiles(("memory.max", "memory.high"), "memory.current", "inactive_file"),
}


class _Mount(NamedTuple):
    """A mounted hierarchy of groups."""

    version: int
    controllers: list[str]  # of version 1
    root: str  # the group that is visible at `path`
    path: Path


def read_memory_limit(root: Path = ROOT) -> MemoryLimit | None:
    """Return the tightest memory limit of this process; None if it has none. `root`: the root of the file system."""
    limits = [
        MemoryLimit(total, _read_used_memory(group, MEMORY_FILES[version]))
        for group, version in _list_groups("memory", root)
        for name in MEMORY_FILES[version].limits
        if (total := _read_number(group / name)) is not None and total < UNLIMITED
    ]
    return min(limits, key=lambda limit: limit.total - limit.used, default=None)


def count_processors(root: Path = ROOT) -> int:
    """Return the number of processors that this process may use: of its affinity, and within its time quota."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(usable, _read_cpu_quota(root))))


def _read_cpu_quota(root: Path) -> float:
    """Return the processors' time that this process may use in a second, in seconds."""
    quotas = [math.inf]
    for group, version in _list_groups("cpu", root):
        with suppress(OSError, ValueError, ZeroDivisionError):  # also "max"
            if version == 1:
                quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            else:
                quota, period = (group / "cpu.max").read_text().split()
            quotas += [int(quota) / int(period)] if int(quota) > 0 else []
    return min(quotas)


def _read_used_memory(group: Path, files: _MemoryFiles) -> int:
    used = _read_number(group / files.usage) or 0
    with suppress(OSError, ValueError):
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used -= int(statistics.get(files.inactive, 0))
    return max(0, used)


def _read_number(file: Path) -> int | None:
    with suppress(OSError, ValueError):  # there is no such file, or it contains "max"
        return int(file.read_text())
    return None


def _list_groups(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """Return (folder, version) of the groups of a controller that this process is in, from its own upwards."""
    groups: dict[str, str] = {}  # by controller; that of version 2 has no name
    for line in _read_lines(root / "proc/self/cgroup"):  # "4:memory:/system.slice", "3:cpu,cpuacct:/", "0::/user.slice"
        names, _, own_path = line.partition(":")[2].partition(":")
        groups |= dict.fromkeys(names.split(","), own_path)
    for mount in _list_mounts(root):
        if mount.version == 1 and controller not in mount.controllers:
            continue
        own = Path(groups.get(controller if mount.version == 1 else "", "/"))
        # A container may see a part of the hierarchy only, at whose root its own group is
        inside = own.relative_to(mount.root) if own.is_relative_to(mount.root) and ".." not in own.parts else Path()
        for group in (inside, *inside.parents):
            yield mount.path / group, mount.version


def _list_mounts(root: Path) -> Iterator[_Mount]:
    # "36 31 0:28 / /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpu", with any number of fields before the dash
    for line in _read_lines(root / "proc/self/mountinfo"):
        fields, filesystem = (part.split() for part in line.partition(" - ")[::2])
        if filesystem[:1] in (["cgroup"], ["cgroup2"]) and len(fields) > 4:
            version = 2 if filesystem[0] == "cgroup2" else 1
            yield _Mount(version, filesystem[-1].split(","), fields[3], root / fields[4].lstrip("/"))
    yield _Mount(2, [], "/", root / MOUNT)


def _read_lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
