"""Combines instances, quarantine and watchdog: the engine's view of strategies that may be at fault.

Knows requests by what ends them only; ending them is the core's business.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from cache_strategies.base import KVCache
from cache_strategies.errors import StrategyError
from server.engine.calls import CallObserver
from server.engine.instance import Instance
from server.engine.instance_reports import count_tokens
from server.engine.isolation.progress import ProgressWatchdog
from server.engine.isolation.quarantine import Quarantine
from server.engine.scheduling.request import Request, RequestError
from server.engine.scheduling.step import RequestFailure
from server.records import KVTokens, Outcome

log = logging.getLogger(__name__)

STRATEGY_TIMEOUT = 5.0  # default of the setting strategy_timeout, in seconds


class Isolation:
    """Has the instances of an engine, and decides which of them get requests."""

    def __init__(
        self,
        caches: Mapping[str, KVCache],
        rebuild: Callable[[str], KVCache],
        *,
        timeout: float = STRATEGY_TIMEOUT,
        calls: CallObserver | None = None,
        disabled: Mapping[str, str] | None = None,
        fallbacks: Mapping[str, Sequence[str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Guard `caches`; `rebuild(name)` makes an instance anew, for the trial after a quarantine.

        `disabled`: instances that have no cache, with the reasons, as a call of theirs did not return. `fallbacks`: for
        each instance, those that may serve its requests in its place.
        """
        self.disabled = dict(disabled or {})
        self.faults: Counter[str] = Counter()  # number of faults by instance since they were last collected
        self.fallbacks = dict(fallbacks or {})
        self._rebuild = rebuild
        self._quarantine = Quarantine(caches, clock)
        self._new_quarantines: dict[str, StrategyError] = {}
        self._probes: dict[str, Request] = {}  # by instance: the request that tries it after a quarantine
        self.instances = {name: Instance(cache, self._on_fault, calls) for name, cache in caches.items()}
        self._watchdog = ProgressWatchdog(self.instances, timeout, clock)

    def _on_fault(self, error: StrategyError) -> None:
        self.faults[error.instance] += 1
        if not error.is_report and self._quarantine.record_fault(error.instance):
            self._new_quarantines[error.instance] = error

    def collect_faults(self) -> Mapping[str, int]:
        """Return the number of faults by instance since the last call."""
        faults = dict(self.faults)
        self.faults.clear()
        return faults

    @property
    def quarantined(self) -> Sequence[str]:
        return self._quarantine.list_quarantined()

    # ---------------------------------------------------------------- requests
    def usable(self, name: str) -> bool:
        """Return whether the next request may use an instance: it is sound, or its quarantine is over."""
        return name not in self.disabled and not self._quarantine.seconds_left(name)

    def check_admission(self, name: str) -> None:
        """Let a request use an instance. Raises RequestError if it is disabled or in quarantine.

        The first request after a quarantine finds the instance built anew.
        """
        if name in self.disabled:
            message = (
                f"cache strategy {name!r} is disabled: {self.disabled[name]}; choose another strategy until the server "
                "has been started again"
            )
            raise RequestError(503, message, code="strategy_disabled")
        seconds = self._quarantine.seconds_left(name)
        if seconds is None:
            return
        if seconds == 0.0:
            try:
                self._renew(name)
                return
            except StrategyError:
                seconds = self._quarantine.seconds_left(name) or 1.0
        message = (
            f"cache strategy {name!r} is in quarantine after repeated faults; it is tried again in {seconds:.0f} s: "
            "choose another strategy, or try later"
        )
        raise RequestError(503, message, code="strategy_quarantined", retry_after=seconds)

    def _renew(self, name: str) -> None:
        """Build an instance anew. Raises StrategyError if that fails."""
        self.instances[name].rebuild(partial(self._rebuild, name))

    def end_quarantine(self, name: str) -> None:
        """Let an instance get requests again at once, built anew. Raises StrategyError if that fails."""
        self._renew(name)
        self._quarantine.end(name)

    def begin(self, request: Request) -> None:
        """Note that a request of an instance was queued."""
        name = request.instance.name
        if self._quarantine.seconds_left(name) == 0.0:
            self._quarantine.begin_probe(name)
            self._probes[name] = request
            log.warning("cache strategy %r is tried again, with one request", name)

    def record_steps(self, names: Iterable[str]) -> None:
        """Note that rows of these instances were computed, and committed."""
        for name in names:
            self._quarantine.record_step(name)

    def end(self, request: Request, outcome: Outcome) -> None:
        """Note how a request of an instance has ended."""
        name = request.instance.name
        if outcome in ("stop", "length"):
            if self._probes.get(name) is request:
                log.warning("cache strategy %r works again", name)
                del self._probes[name]
            self._quarantine.record_success(name)
        elif self._probes.get(name) is request:
            del self._probes[name]
            self._quarantine.end_probe(name)

    def count_tokens(self, request: Request, outcome: Outcome) -> KVTokens:
        """Return the tokens of a request that is about to end; none after an error, so that no fault causes another."""
        if request.sequence is None or outcome == "error":
            return KVTokens(0, 0)
        return count_tokens(self.instances[request.instance.name], [request.num_computed_tokens])

    # ---------------------------------------------------------------- faults
    def find_stalled(self, candidates: Sequence[Request], computed: Sequence[Request]) -> list[RequestFailure]:
        """Return requests that their strategies do not let go on, and note memory that is never freed."""
        failures = self._watchdog.find_stalled(candidates, computed)
        for error in self._watchdog.find_leaks():
            self._quarantine.begin(error.instance)
            self._new_quarantines[error.instance] = error
        return failures

    def take_new_quarantines(self) -> Mapping[str, StrategyError]:
        """Return the last faults of the instances that were put in quarantine since the last call, by instance."""
        new, self._new_quarantines = self._new_quarantines, {}
        return new

    def collect_quarantined(
        self, new: Mapping[str, StrategyError], requests: Iterable[Request]
    ) -> list[RequestFailure]:
        """Return the failures of those `requests` that end because their instances are among the `new` quarantines."""
        for name, error in new.items():
            served = f"; {self.fallbacks[name][0]!r} serves its requests" if self.fallbacks.get(name) else ""
            log.error("cache strategy %r is in quarantine%s; the last fault: %s", name, served, error.problem)
            self._probes.pop(name, None)
        return [
            RequestFailure(request, f"{new[name]}; the strategy is in quarantine", "strategy_quarantined")
            for request in requests
            if (name := request.instance.name) in new
        ]

    def suspend(self, names: Iterable[str]) -> None:
        """Free the memory of instances that have been put in quarantine, whose requests must have ended."""
        for name in names:
            self.instances[name].suspend()
