"""What an engine looks like between two steps, and the server's processes: what /metrics shows as gauges."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from cache_strategies.base import Blocks, Usage
from server.engine.core import Core
from server.engine.device import DeviceMemory, device_memory
from server.engine.report import Role, Wait


@dataclass(frozen=True)
class State:
    """Bytes and counts, by instance where nothing else is said."""

    running: Mapping[str, int]  # requests
    waiting: Mapping[tuple[str, Wait], int]  # requests, by instance and what for
    usage: Mapping[str, Usage]
    blocks: Mapping[str, Blocks]
    floors: Mapping[str, int]
    pool_free: int  # KV memory that no instance holds,
    pool_held: int  # that one does,
    pool_untouched: int  # and that the system has not given yet
    device: DeviceMemory
    processes: Mapping[Role, int]  # resident memory


class Processes:
    """The server's processes, and their resident memory in bytes."""

    def __init__(self) -> None:
        self._workers: dict[int, int] = {}  # as each reported last
        self._engine = psutil.Process()
        self._supervisor = self._engine.parent() if multiprocessing.parent_process() else None

    def told(self, worker: int, memory: int) -> None:
        self._workers[worker] = memory

    def gone(self, worker: int) -> None:
        self._workers.pop(worker, None)

    def resident(self) -> dict[Role, int]:
        supervisor = self._supervisor.memory_info().rss if self._supervisor else 0
        return {
            "engine": self._engine.memory_info().rss,
            "api": sum(self._workers.values()),
            "supervisor": supervisor,
        }


def state_of(core: Core, processes: Mapping[Role, int]) -> State:
    """Return the engine's state for metrics. Takes time proportional to the open sequences and blocks."""
    arena, scheduler = core.arena, core.scheduler
    return State(
        running=Counter(request.cache.name for request in scheduler.running),
        waiting=scheduler.waits(),
        usage={name: cache.usage() for name, cache in core.caches.items()},
        blocks={name: cache.blocks() for name, cache in core.caches.items()},
        floors={name: arena.share(name)[0] * arena.page_bytes for name in core.caches},
        pool_free=arena.free * arena.page_bytes,
        pool_held=(arena.usable - arena.free) * arena.page_bytes,
        pool_untouched=arena.untouched * arena.page_bytes,
        device=device_memory(core.model.device),
        processes=processes,
    )
