"""Limits of control groups as Docker, Kubernetes and systemd write them, and the group of this very process."""

from __future__ import annotations

import math
import os
import random
from pathlib import Path

import pytest

from server.processes.cgroups import MemoryLimit, count_processors, read_memory_limit

MIB = 1 << 20
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
V2 = "35 24 0:30 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1 = """32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime shared:7 master:2 - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw"""
NO_LIMIT = 9223372036854771712  # as version 1 writes it


class Machine:
    """The files of a machine's control groups."""

    def __init__(self, root: Path, mounts: str, own: str) -> None:
        self.root = root
        for name, text in (("cgroup", own), ("mountinfo", f"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n{mounts}\n")):
            self._write(f"proc/self/{name}", text)

    def _write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def limit(self, group: str, **files: object) -> None:
        """Write the files of a group; `memory_max` is memory.max."""
        for name, text in files.items():
            self._write(f"sys/fs/cgroup/{group}/{name.replace('_', '.', 1)}", text)


@pytest.fixture
def service(tmp_path: Path) -> Machine:
    """A service of systemd, without a namespace of its own."""
    return Machine(tmp_path, V2, "0::/system.slice/kvmux.service")


def test_without_limits(service: Machine) -> None:
    assert read_memory_limit(service.root) is None
    service.limit("system.slice/kvmux.service", memory_max="max", memory_current=5, cpu_max="max 100000")
    assert read_memory_limit(service.root) is None
    assert count_processors(service.root) == CORES
    assert count_processors(service.root / "nowhere") == CORES


@pytest.mark.parametrize("group", ["system.slice/kvmux.service", "system.slice", "."])
def test_a_limit_of_the_own_group_or_of_one_above(service: Machine, group: str) -> None:
    service.limit("system.slice/kvmux.service", memory_max="max", memory_current=90 * MIB)
    service.limit(group, memory_max=1500 * MIB, memory_current=100 * MIB, cpu_max="100000 100000")
    service.limit("system.slice/another.service", memory_max=MIB, memory_current=MIB, cpu_max="1000 100000")
    assert read_memory_limit(service.root) == MemoryLimit(1500 * MIB, 100 * MIB)
    assert count_processors(service.root) == 1


def test_the_group_that_leaves_the_least_counts(service: Machine) -> None:
    service.limit("system.slice/kvmux.service", memory_max=900 * MIB, memory_current=100 * MIB)
    service.limit("system.slice", memory_max=4000 * MIB, memory_current=3900 * MIB)
    found = read_memory_limit(service.root)
    assert found == MemoryLimit(4000 * MIB, 3900 * MIB)
    assert found.free == 100 * MIB


def test_a_group_that_is_slowed_down_beyond_a_limit(service: Machine) -> None:
    service.limit("system.slice/kvmux.service", memory_max=900 * MIB, memory_high=800 * MIB, memory_current=850 * MIB)
    found = read_memory_limit(service.root)
    assert found is not None
    assert found.free == 0


def test_pages_of_files_that_were_not_used_lately_count_as_free(service: Machine) -> None:
    service.limit(
        "system.slice/kvmux.service",
        memory_max=1500 * MIB,
        memory_current=1400 * MIB,
        memory_stat=f"anon {100 * MIB}\nfile {1300 * MIB}\nactive_file {50 * MIB}\ninactive_file {1250 * MIB}",
    )
    found = read_memory_limit(service.root)
    assert found is not None
    assert found.free == 1350 * MIB


@pytest.mark.parametrize(
    ("root", "own"),
    [
        ("/", "/docker/c0ffee"),  # the host's own view
        ("/docker/c0ffee", "/docker/c0ffee"),  # a container without a namespace of control groups
        ("/", "/"),  # one with a namespace
        ("/docker/c0ffee", "/docker/c0ffee/child"),
        ("/", "/../../elsewhere"),  # a process that was moved out of its namespace
    ],
)
def test_version_1(tmp_path: Path, root: str, own: str) -> None:
    lines = f"11:memory:{own}\n4:cpu,cpuacct:{own}\n1:name=systemd:/a:b\n0::/"
    machine = Machine(tmp_path, V1.format(root=root), lines)
    group = own.removeprefix(root).strip("/") if ".." not in own and root == "/" else ""
    machine.limit("memory", memory_limit_in_bytes=NO_LIMIT, memory_usage_in_bytes=2000 * MIB)
    machine.limit(
        f"memory/{group}",
        memory_limit_in_bytes=1500 * MIB,
        memory_usage_in_bytes=1200 * MIB,
        memory_stat=f"inactive_file {MIB}\ntotal_cache {900 * MIB}\ntotal_inactive_file {700 * MIB}",
    )
    machine.limit(f"cpu,cpuacct/{group}", cpu_cfs_quota_us=50_000, cpu_cfs_period_us=100_000)
    assert read_memory_limit(tmp_path) == MemoryLimit(1500 * MIB, 500 * MIB)
    assert count_processors(tmp_path) == 1


def test_version_1_without_a_quota(tmp_path: Path) -> None:
    machine = Machine(tmp_path, V1.format(root="/"), "11:memory:/\n4:cpu,cpuacct:/")
    machine.limit("cpu,cpuacct", cpu_cfs_quota_us=-1, cpu_cfs_period_us=100_000)
    assert count_processors(tmp_path) == CORES


def test_any_quota_is_rounded_up(service: Machine, rng: random.Random) -> None:
    period = rng.randrange(1_000, 1_000_000)
    quota = rng.randrange(1_000, 2 * CORES * period)
    service.limit("system.slice", cpu_max=f"{quota} {period}")
    assert count_processors(service.root) == min(CORES, math.ceil(quota / period))


def test_a_sandbox_that_lists_neither_groups_nor_mounts(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "", "")
    machine.limit(".", memory_max=700 * MIB, memory_current=200 * MIB, cpu_max="150000 100000")
    assert read_memory_limit(tmp_path) == MemoryLimit(700 * MIB, 200 * MIB)
    assert count_processors(tmp_path) == min(2, CORES)


@pytest.mark.parametrize("text", ["", "nonsense", "max", "0 0", "1:2"])
def test_files_that_say_something_else_are_no_limit(service: Machine, text: str) -> None:
    service.limit("system.slice", memory_max=text, memory_stat=text, cpu_max=text)
    service.limit("system.slice/kvmux.service", memory_max=MIB, memory_stat=text, cpu_max=text)
    assert read_memory_limit(service.root) == MemoryLimit(MIB, 0)
    assert count_processors(service.root) == CORES


def test_this_process() -> None:
    limit = read_memory_limit()
    assert limit is None or limit.total > 0
    assert 1 <= count_processors() <= CORES
