"""Tests of gradual memory: only what was touched is allocated by the system, and a process' limit ends touching."""

from __future__ import annotations

import ctypes
import mmap
import signal
import subprocess
import sys
import threading

import pytest

from cache_strategies import reserved_memory
from cache_strategies.arena import Arena
from cache_strategies.reserved_memory import PIECE_BYTES, ReservedMemory

MIB = 1 << 20
PLENTY = 1 << 62

linux = pytest.mark.skipif(sys.platform != "linux", reason="the system tells which pages are in memory")


def resident(address: int) -> int:
    """Return how many of the 64 pieces' bytes from an address on are in memory, as mincore(2) counts their pages."""
    pages = 64 * PIECE_BYTES // mmap.PAGESIZE
    found = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(64 * PIECE_BYTES), found) == 0
    return mmap.PAGESIZE * sum(page & 1 for page in found)


@linux
def test_only_what_is_touched_is_in_memory() -> None:
    memory = ReservedMemory(64 * PIECE_BYTES)
    address = memory.memory.data_ptr()
    assert resident(address) == 0
    memory.touch(below=3 * PIECE_BYTES - 1, above=PIECE_BYTES + 1)
    assert (memory.low_end, memory.high_start) == (3 * PIECE_BYTES, 62 * PIECE_BYTES)
    assert resident(address) == 5 * PIECE_BYTES
    before = resident(address)
    memory.memory[: memory.low_end] = 1
    memory.memory[memory.high_start :] = 1
    assert resident(address) == before, "writing took memory"
    assert not memory.memory[memory.low_end : memory.high_start].any(), "what has not come is zeros"


def test_touched_memory_is_zero_and_can_be_written() -> None:
    memory = ReservedMemory(2 * PIECE_BYTES + 5)
    memory.touch(below=PIECE_BYTES, above=1)
    assert (memory.low_end, memory.high_start) == (PIECE_BYTES, 2 * PIECE_BYTES)
    for part in (memory.memory[:PIECE_BYTES], memory.memory[2 * PIECE_BYTES :]):
        assert not part.any()
        part.fill_(7)
    memory.touch(below=2 * PIECE_BYTES + 5)
    assert memory.is_finished
    assert memory.memory.count_nonzero() == PIECE_BYTES + 5


@linux
def test_who_writes_where_no_memory_is_yet_ends() -> None:
    """A write to untouched memory kills the process, so a running server has never made one."""
    code = (
        "from cache_strategies.reserved_memory import *; m = ReservedMemory(4 * PIECE_BYTES); m.touch(below=1); "
        "m.memory[PIECE_BYTES] = 1"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False)
    assert ended.returncode == -signal.SIGSEGV


def test_the_rest_comes_in_the_background() -> None:
    memory = ReservedMemory(8 * PIECE_BYTES)
    memory.touch(below=1, above=1)
    memory.touch_rest(lambda: PLENTY)
    assert memory._thread is not None
    memory._thread.join()
    assert memory.is_finished
    assert memory.low_end == memory.high_start
    memory.memory.fill_(1)


@pytest.mark.parametrize(("below", "above"), [(1, 0), (0, 1)])
def test_it_comes_at_the_end_where_it_began(below: int, above: int) -> None:
    memory = ReservedMemory(8 * PIECE_BYTES)
    memory.touch(below=below, above=above)
    left = [PLENTY, 0]
    memory.touch_rest(lambda: left.pop(0) // (1 << 62) * (reserved_memory.MIN_FREE_BYTES + 2 * PIECE_BYTES))
    assert memory._thread is not None
    memory._thread.join()
    assert memory.is_finished
    assert (memory.low_end, 8 * PIECE_BYTES - memory.high_start) == (3 * PIECE_BYTES * below, 3 * PIECE_BYTES * above)


def test_it_stops_when_little_memory_is_free() -> None:
    memory = ReservedMemory(8 * PIECE_BYTES)
    memory.touch_rest(lambda: reserved_memory.MIN_FREE_BYTES)
    assert memory._thread is not None
    memory._thread.join()
    assert memory.is_finished
    assert memory.low_end == 0


def test_it_stops_when_the_arena_goes() -> None:
    go_on = threading.Event()

    def room() -> int:
        assert go_on.wait(60)
        return PLENTY

    arena = Arena(8, PIECE_BYTES, gradual=True)
    memory = arena._reserved
    assert memory is not None
    arena.touch_rest(room)
    del arena
    go_on.set()
    assert memory._thread is not None
    memory._thread.join()
    assert memory.low_end < 8 * PIECE_BYTES


LIMITED = f"""
import re, resource, time
from cache_strategies.arena import Arena
data = 1024 * int(re.search(r"VmData:\\s+(\\d+)", open("/proc/self/status").read())[1])
resource.setrlimit(resource.RLIMIT_DATA, (data + {100 * MIB}, resource.RLIM_INFINITY))
arena = Arena(64, {4 * MIB}, gradual=True)
class Owner:
    idle_pages = lambda self: 0
    reclaim = lambda self, pages: 0
    pinned_pages = lambda self: ()
arena.register_owner("a", Owner())
arena.set_longest_sequence("a", 2, 1)
arena.touch(2)
arena.touch_rest(lambda: 1 << 62)
while arena.total_pages == 64:
    arena.add_touched_pages()
    time.sleep(0.01)
assert 10 < arena.total_pages < 26, arena.total_pages
pages = [arena.allocate("a") for _ in range(arena.total_pages)]
assert arena.allocate("a") is None
for page in pages:
    arena.memory[page * {4 * MIB}:][:{4 * MIB}] = 1
print(arena.get_share("a") == (0, arena.total_pages))
"""


@linux
def test_a_process_that_may_have_no_more_goes_on_with_what_it_has() -> None:
    ended = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("True\n", "")
