"""Memory that comes piece by piece: only what was asked for is taken from the system, and a process' limit ends it."""

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
from cache_strategies.reserved_memory import PIECE, Reserved

MIB = 1 << 20
PLENTY = 1 << 62

linux = pytest.mark.skipif(sys.platform != "linux", reason="the system tells which pages are in memory")


def resident(address: int) -> int:
    """Return how many of the 64 pieces' bytes from an address on are in memory, as mincore(2) counts their pages."""
    pages = 64 * PIECE // mmap.PAGESIZE
    found = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(64 * PIECE), found) == 0
    return mmap.PAGESIZE * sum(page & 1 for page in found)


@linux
def test_only_what_is_touched_is_in_memory() -> None:
    memory = Reserved(64 * PIECE)
    address = memory.memory.data_ptr()
    assert resident(address) == 0
    memory.touch(below=3 * PIECE - 1, above=PIECE + 1)
    assert (memory.below, memory.above) == (3 * PIECE, 62 * PIECE)
    assert resident(address) == 5 * PIECE
    before = resident(address)
    memory.memory[: memory.below] = 1
    memory.memory[memory.above :] = 1
    assert resident(address) == before, "writing took memory"
    assert not memory.memory[memory.below : memory.above].any(), "what has not come is zeros"


def test_touched_memory_is_zero_and_can_be_written() -> None:
    memory = Reserved(2 * PIECE + 5)
    memory.touch(below=PIECE, above=1)
    assert (memory.below, memory.above) == (PIECE, 2 * PIECE)
    for part in (memory.memory[:PIECE], memory.memory[2 * PIECE :]):
        assert not part.any()
        part.fill_(7)
    memory.touch(below=2 * PIECE + 5)
    assert memory.ended
    assert memory.memory.count_nonzero() == PIECE + 5


@linux
def test_who_writes_where_no_memory_is_yet_ends() -> None:
    """So a server that answers requests while its memory comes has written into no other."""
    code = (
        "from cache_strategies.reserved_memory import *; m = Reserved(4 * PIECE); m.touch(below=1); m.memory[PIECE] = 1"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False)
    assert ended.returncode == -signal.SIGSEGV


def test_the_rest_comes_in_the_background() -> None:
    memory = Reserved(8 * PIECE)
    memory.touch(below=1, above=1)
    memory.touch_rest(lambda: PLENTY)
    assert memory._thread is not None
    memory._thread.join()
    assert memory.ended
    assert memory.below == memory.above
    memory.memory.fill_(1)


@pytest.mark.parametrize(("below", "above"), [(1, 0), (0, 1)])
def test_it_comes_at_the_end_where_it_began(below: int, above: int) -> None:
    memory = Reserved(8 * PIECE)
    memory.touch(below=below, above=above)
    left = [PLENTY, 0]
    memory.touch_rest(lambda: left.pop(0) // (1 << 62) * (reserved_memory.KEPT_FREE + 2 * PIECE))
    assert memory._thread is not None
    memory._thread.join()
    assert memory.ended
    assert (memory.below, 8 * PIECE - memory.above) == (3 * PIECE * below, 3 * PIECE * above)


def test_it_stops_when_little_memory_is_free() -> None:
    memory = Reserved(8 * PIECE)
    memory.touch_rest(lambda: reserved_memory.KEPT_FREE)
    assert memory._thread is not None
    memory._thread.join()
    assert memory.ended
    assert memory.below == 0


def test_it_stops_when_the_arena_goes() -> None:
    go_on = threading.Event()

    def room() -> int:
        assert go_on.wait(60)
        return PLENTY

    arena = Arena(8, PIECE, gradual=True)
    memory = arena._reserved
    assert memory is not None
    arena.touch_rest(room)
    del arena
    go_on.set()
    assert memory._thread is not None
    memory._thread.join()
    assert memory.below < 8 * PIECE


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
arena.join("a", Owner())
arena.expect("a", 2, 1)
arena.touch(2)
arena.touch_rest(lambda: 1 << 62)
while arena.total == 64:
    arena.advance()
    time.sleep(0.01)
assert 10 < arena.total < 26, arena.total
pages = [arena.take("a") for _ in range(arena.total)]
assert arena.take("a") is None
for page in pages:
    arena.memory[page * {4 * MIB}:][:{4 * MIB}] = 1
print(arena.share("a") == (0, arena.total))
"""


@linux
def test_a_process_that_may_have_no_more_goes_on_with_what_it_has() -> None:
    ended = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("True\n", "")
