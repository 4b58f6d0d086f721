"""The shares of the KV memory while the engine runs: floors, limits, memory that the system provides, evictions.

Knows the memory, and of requests how much they may need; cache_strategies/memory.py keeps the books.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from cache_strategies.memory import Bounds, Memory
from server.engine.instance import Instance
from server.engine.scheduling.request import RequestError
from server.engine.scheduling.scheduler import Scheduler


class KVMemory:
    """Changes the shares of the instances, between steps."""

    def __init__(self, memory: Memory, instances: Mapping[str, Instance], scheduler: Scheduler) -> None:
        self._memory = memory
        self._instances = instances
        self._scheduler = scheduler
        self._total_bytes = memory.total_bytes  # as the scheduler knows it
        self._evicted = Counter[str]()  # bytes evicted from each instance until the last step

    def set_share(self, name: str, *, floor: int, limit: int) -> None:
        """Change an instance's floor and limit, in bytes.

        Raises RequestError if the floor exceeds the limit, or if the longest sequence of any instance would not fit.

        Idle memory beyond the limit is freed now. Running requests go on; no other request of the instance starts until
        they need no more than the limit.
        """
        if floor > limit:
            raise RequestError(400, f"the floor is {floor} bytes, more than the limit, {limit}", param="floor")
        if (why_not := self._memory.explain_refusal(name, bounds=Bounds(floor, limit))) is not None:
            raise RequestError(409, f"this floor and limit cannot be set: {why_not}", code="no_room")
        self._memory.set_share(name, floor=floor, limit=limit)
        self._drain(name)
        self._scheduler.mark_room_changed()

    def update(self) -> None:
        """Lower what instances may hold beyond their limits, as their requests end; called before each step.

        If the system has less memory than was planned, or has it again, the scheduler and all instances learn of it.
        """
        self._memory.recover()
        if self._memory.total_bytes != self._total_bytes:
            self._total_bytes = self._memory.total_bytes
            self._scheduler.set_kv_bytes(self._total_bytes)
            for name in self._instances:
                self._drain(name)
        for name, instance in self._instances.items():
            if instance.draining:
                self._drain(name)
                if not instance.draining:
                    self._scheduler.mark_room_changed()

    def _drain(self, name: str) -> None:
        """Let an instance hold more than its limit only while its running requests and pins need that."""
        needed = sum(r.peak_bytes for r in self._scheduler.running if r.instance.name == name)
        self._memory.drain(name, needed + self._instances[name].count_pinned_bytes())

    def collect_evicted_bytes(self) -> dict[str, int]:
        """Return the bytes of idle memory that were evicted since the last call, by instance."""
        evicted: dict[str, int] = {}
        for name in self._instances:
            if num_bytes := self._memory.get_evicted_bytes(name) - self._evicted[name]:
                evicted[name] = num_bytes
                self._evicted[name] += num_bytes
        return evicted
