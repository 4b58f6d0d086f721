"""The shares of the KV memory while the engine runs: floors, limits, memory that the system provides, evictions.

Knows the arena, and of requests how much memory they may need; cache_strategies/arena.py divides the pages.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

from cache_strategies.arena import Arena
from server.engine.instance import Instance
from server.engine.scheduling.request import RequestError
from server.engine.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)


class KVMemory:
    """Changes the shares of the instances, between steps."""

    def __init__(self, arena: Arena, instances: Mapping[str, Instance], scheduler: Scheduler) -> None:
        self._arena = arena
        self._instances = instances
        self._scheduler = scheduler
        self._evicted_pages: Counter[str] = Counter()  # pages evicted from each instance until the last step

    def set_share(self, name: str, *, floor: int, limit: int) -> None:
        """Change an instance's floor and limit, in pages.

        Raises RequestError if the floor exceeds the limit, or if the longest sequence of any instance would not fit.

        Idle memory beyond the limit is freed now. Running requests go on; no other request of the instance starts until
        they need no more than the limit.
        """
        page = self._arena.page_bytes
        if floor > limit:
            raise RequestError(
                400, f"the floor is {floor * page} bytes, more than the limit, {limit * page}", param="floor"
            )
        if (why_not := self._arena.explain_refusal(name, floor=floor, limit=limit)) is not None:
            raise RequestError(409, f"this floor and limit cannot be set: {why_not}", code="no_room")
        self._arena.set_share(name, floor=floor, limit=limit)
        self._drain(name)
        self._scheduler.mark_room_changed()

    def drain(self) -> None:
        """Lower what instances may hold beyond their limits, as their requests end; called before each step."""
        for name, instance in self._instances.items():
            if instance.draining:
                self._drain(name)
                if not instance.draining:
                    self._scheduler.mark_room_changed()

    def _drain(self, name: str) -> None:
        """Let an instance hold more than its limit only while its running requests and pins need that."""
        needed = sum(r.peak_bytes for r in self._scheduler.running if r.instance.name == name)
        pinned = len(self._instances[name].pinned_pages())
        self._arena.drain(name, -(-needed // self._arena.page_bytes) + pinned)

    def add_touched_pages(self) -> None:
        """Let caches use the memory that the system provided since the last step; lower all shares if it ran out."""
        arena, total = self._arena, self._arena.total_pages
        if not arena.add_touched_pages():
            return
        if arena.total_pages < total:
            log.warning(
                "memory has run out: of %d bytes of KV memory planned, %d are available; floors and limits are lowered "
                "in proportion",
                total * arena.page_bytes,
                arena.total_pages * arena.page_bytes,
            )
            for name in self._instances:
                self._drain(name)
        self._scheduler.set_kv_bytes(arena.num_usable_pages * arena.page_bytes)

    def collect_evicted_bytes(self) -> dict[str, int]:
        """Return the bytes of idle memory that were evicted since the last call, by instance."""
        evicted: dict[str, int] = {}
        for name in self._instances:
            if pages := self._arena.num_reclaimed_pages(name) - self._evicted_pages[name]:
                evicted[name] = pages * self._arena.page_bytes
                self._evicted_pages[name] += pages
        return evicted
