"""Finds sequences that a strategy never lets go on, and memory that it never frees, without any call failing.

Counts steps and seconds: a sequence may wait for memory or for another sequence's prefix, but not for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from cache_strategies.errors import StrategyError
from server.engine.instance import Instance
from server.engine.scheduling.request import Request
from server.engine.scheduling.step import RequestFailure

MIN_STEPS = 200  # steps without progress, beside the seconds, after which a strategy is at fault
LEAK_CHECK_INTERVAL = 64  # steps between two checks for memory that no sequence uses


class _Wait(NamedTuple):
    """How long a request has waited although no row of its instance was computed."""

    steps: int
    since: float


class ProgressWatchdog:
    """Watches the requests of all instances, step by step."""

    def __init__(
        self, instances: Mapping[str, Instance], timeout: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Watch the requests of `instances`; `timeout`: seconds that a request may wait for nothing."""
        self._instances = instances
        self._timeout = timeout
        self._clock = clock
        self._waits: dict[tuple[Request, Instance], _Wait] = {}  # a fallback's wait begins anew
        self._leaks: dict[str, float] = {}  # by instance: since when it holds memory that no sequence uses
        self._steps = 0

    def find_stalled(self, candidates: Sequence[Request], computed: Collection[Request]) -> list[RequestFailure]:
        """Return the requests that have waited too long for their strategy; called once per step, when it is scheduled.

        `candidates` are the requests that only their strategies hold up, `computed` those with a row in the step, or
        without one for lack of budget. A request does not count as waiting while a row of its instance is computed, as
        it may wait for that.
        """
        busy = {request.instance for request in computed}
        idle = [request for request in candidates if request.instance not in busy]
        if not idle:
            self._waits.clear()
            return []
        now = self._clock()
        before, self._waits = self._waits, {}
        stalled = []
        for request in idle:
            steps, since = before.get((request, request.instance), _Wait(0, now))
            self._waits[request, request.instance] = _Wait(steps + 1, since)
            has_waited = steps >= MIN_STEPS and now - since >= self._timeout
            if has_waited and (error := self._explain(request)) is not None:
                stalled.append(RequestFailure.from_fault(request, error))
        return stalled

    def _explain(self, request: Request) -> StrategyError | None:
        """Return the strategy's fault; None if the request was refused nothing, or memory that there was not."""
        instance = request.instance
        if request.sequence is not None and not request.has_committed:
            try:
                with instance.guard["schedule"]:
                    if not request.sequence.ready():
                        return instance.make_fault("ready", f"a sequence was not ready for {self._timeout:g} seconds")
            except StrategyError as error:
                return error
        if request.refusal is None or (request.refusal == "memory" and request.peak_bytes):
            return None
        opens = request.sequence is None and not request.num_preemptions
        method, what = ("open", "returned no sequence") if opens else ("reserve", "returned False")
        return instance.make_fault(
            method, f"it {what} for {self._timeout:g} seconds, and no sequence of it was computed"
        )

    def find_leaks(self) -> list[StrategyError]:
        """Return an error for each instance that holds memory after all its sequences have ended; called once per step.

        Idle and pinned blocks do not count.
        """
        self._steps += 1
        if self._steps % LEAK_CHECK_INTERVAL:
            return []
        now, errors = self._clock(), []
        for name, instance in self._instances.items():
            size = 0 if instance.num_open else instance.count_unused_bytes()
            if not size:
                self._leaks.pop(name, None)
            elif now - self._leaks.setdefault(name, now) >= self._timeout:
                errors.append(instance.make_fault("close", f"{size} bytes stay in use after all sequences have ended"))
        return errors
