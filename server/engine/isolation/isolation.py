"""Combines guards, quarantine and watchdog: the engine's view of strategies that may be at fault.

Knows requests by what ends them only; ending them is the core's business.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from cache_strategies.base import KVCache
from server.engine.isolation.calls import CallObserver
from server.engine.isolation.errors import StrategyError
from server.engine.isolation.guard import GuardedCache
from server.engine.isolation.progress import ProgressWatchdog
from server.engine.isolation.quarantine import Quarantine
from server.engine.scheduling.request import Request, RequestError
from server.records import KVTokens, Outcome

log = logging.getLogger(__name__)

# Methods whose faults are only counted, as no request needs what they return
REPORTS = frozenset(
    {
        "usage",
        "blocks",
        "count_dropped_tokens",
        "estimate_bytes",
        "token_budget",
        "collect_block_events",
        "mark_pages",
        "describe_page",
        "list_prefixes",
    }
)
NON_FINITE = "the logits of its rows are NaN or infinite, and the model's are finite otherwise"
STRATEGY_TIMEOUT = 5.0  # default of the setting strategy_timeout, in seconds


class Ended(NamedTuple):
    """Requests that end because their strategy is at fault."""

    requests: Sequence[Request]
    message: str
    code: str


class Isolation:
    """Guards all strategies of an engine, and decides which of them get requests."""

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
        self._was_finite: dict[str, bool] = {}  # by instance: whether the logits of the last request to end were finite
        self.caches = {name: GuardedCache(cache, self._on_fault, calls) for name, cache in caches.items()}
        self._watchdog = ProgressWatchdog(self.caches, timeout, clock)

    def _on_fault(self, error: StrategyError) -> None:
        self.faults[error.instance] += 1
        if error.method not in REPORTS and self._quarantine.record_fault(error.instance):
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
        self.caches[name].rebuild(partial(self._rebuild, name))

    def end_quarantine(self, name: str) -> None:
        """Let an instance get requests again at once, built anew. Raises StrategyError if that fails."""
        self._renew(name)
        self._quarantine.end(name)

    def begin(self, request: Request) -> None:
        """Note that a request of an instance was queued."""
        name = request.cache.name
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
        name = request.cache.name
        if outcome in ("stop", "length"):
            if request.num_output_tokens:
                self._was_finite[name] = True
            if self._probes.get(name) is request:
                log.warning("cache strategy %r works again", name)
                del self._probes[name]
            self._quarantine.record_success(name)
        elif self._probes.get(name) is request:
            del self._probes[name]
            self._quarantine.end_probe(name)

    def count_tokens(self, request: Request, outcome: Outcome) -> KVTokens:
        """Return the tokens of a request that is about to end; none after an error, so that no fault causes another."""
        if request.seat is None or outcome == "error":
            return KVTokens(0, 0)
        return self.caches[request.cache.name].count_tokens([request.seat])

    # ---------------------------------------------------------------- logits that are not finite
    def suspect(self, request: Request) -> None:
        """Note NaN or infinite logits of the first token of a request that is about to be moved to a fallback.

        The instance is at fault if they are finite there. In the trial after a quarantine it is at fault at once.
        """
        name = request.cache.name
        self._was_finite[name] = False
        if self._probes.get(name) is request:
            self._count_non_finite(name)
        else:
            request.suspects += (name,)

    def confirm_suspects(self, request: Request) -> None:
        """Note that the logits of a request are finite under its present instance: they were not under `suspects`."""
        for name in request.suspects:
            self._count_non_finite(name)
        request.suspects = ()

    def record_non_finite(self, requests: Iterable[Request]) -> None:
        """Note requests that end because their logits in a step were NaN or infinite: none was moved to a fallback.

        Their instance is at fault, once, if it has a fallback and the model is sound: the request or another instance
        has had finite logits, and no fallback had others in its last request.
        """
        requests = list(requests)
        for request in requests:
            self._was_finite[request.cache.name] = False
        for name in {request.cache.name for request in requests if self._is_strategy_fault(request)}:
            self._count_non_finite(name)

    def _is_strategy_fault(self, request: Request) -> bool:
        """Return whether the strategy, and not the model, is the likely cause of a request's NaN or infinite logits."""
        name = request.cache.name
        if self._probes.get(name) is request:
            return True
        fallbacks = self.fallbacks.get(name, ())
        if not fallbacks or request.suspects or any(self._was_finite.get(name) is False for name in fallbacks):
            return False
        return request.num_output_tokens > 0 or any(self._was_finite.values())

    def _count_non_finite(self, name: str) -> None:
        error = self.caches[name].make_fault("attend", NON_FINITE)
        if self._quarantine.record_non_finite(name):
            self._new_quarantines[name] = error

    # ---------------------------------------------------------------- faults
    def find_stalled(self, candidates: Sequence[Request], computed: Sequence[Request]) -> list[Ended]:
        """Return requests that their strategies do not let go on, and note memory that is never freed."""
        ended = [
            Ended([request], error.message, "strategy_failed")
            for request, error in self._watchdog.find_stalled(candidates, computed)
        ]
        for error in self._watchdog.find_leaks():
            self._quarantine.begin(error.instance)
            self._new_quarantines[error.instance] = error
        return ended

    def take_new_quarantines(self) -> Mapping[str, StrategyError]:
        """Return the last faults of the instances that were put in quarantine since the last call, by instance."""
        new, self._new_quarantines = self._new_quarantines, {}
        return new

    def collect_quarantined(self, new: Mapping[str, StrategyError], requests: Sequence[Request]) -> list[Ended]:
        """Return those of all `requests` that end because their instances are among the `new` quarantines."""
        ended = []
        for name, error in new.items():
            served = f"; {self.fallbacks[name][0]!r} serves its requests" if self.fallbacks.get(name) else ""
            log.error("cache strategy %r is in quarantine%s; the last fault: %s", name, served, error.problem)
            self._probes.pop(name, None)
            own = [request for request in requests if request.cache is self.caches[name]]
            ended.append(Ended(own, f"{error}; the strategy is in quarantine", "strategy_quarantined"))
        return ended

    def suspend(self, names: Iterable[str]) -> None:
        """Free the memory of instances that have been put in quarantine, whose requests must have ended."""
        for name in names:
            self.caches[name].suspend()
