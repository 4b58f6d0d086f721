"""Which strategy instances get no requests after repeated faults, and when they are tried again (a circuit breaker).

Counts faults and successes by instance; knows neither caches nor requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

FAULTS = 3  # number of faults without a computed step in between, after which an instance is in quarantine
FIRST_SECONDS = 30.0  # length of the first quarantine; each that follows at once is twice as long
MAX_SECONDS = 600.0


@dataclass
class _FaultRecord:
    """The faults of one instance."""

    faults: int = 0  # since the last computed step
    quarantines: int = 0  # since the last request that ended well
    until: float = 0.0  # when the quarantine ends; 0: there is none
    probing: bool = False  # whether one request is trying the instance after a quarantine


_SOUND = _FaultRecord()


class Quarantine:
    """Counts faults, and decides whether an instance may get requests."""

    def __init__(self, instances: Collection[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._records = {name: _FaultRecord() for name in instances}
        self._clock = clock

    def record_fault(self, instance: str) -> bool:
        """Count a fault; return whether the instance is put in quarantine by it."""
        record = self._records[instance]
        record.faults += 1
        if record.until and not record.probing:
            return False  # calls that free what is left
        if record.faults < FAULTS and not record.probing:
            return False
        self.begin(instance)
        return True

    def begin(self, instance: str) -> None:
        """Put an instance in quarantine."""
        record = self._records[instance]
        record.until = self._clock() + min(FIRST_SECONDS * 2**record.quarantines, MAX_SECONDS)
        record.quarantines += 1
        record.probing = False

    def record_step(self, instance: str) -> None:
        """Note that rows of the instance were computed, and committed."""
        record = self._records[instance]
        if not record.until:
            record.faults = 0

    def record_success(self, instance: str) -> None:
        """Note that a request of the instance has ended well; of quarantines, that ends the trial after one only."""
        record = self._records[instance]
        if record != _SOUND and (record.probing or not record.until):
            self.end(instance)

    def end(self, instance: str) -> None:
        """End a quarantine, and forget the faults."""
        self._records[instance] = _FaultRecord()

    def seconds_left(self, instance: str) -> float | None:
        """Return for how many seconds an instance gets no requests; 0 if the next one tries it; None: it is sound."""
        record = self._records[instance]
        if not record.until:
            return None
        left = record.until - self._clock()
        # While one request tries the instance, the others wait for its outcome
        return max(left, 1.0) if left > 0 or record.probing else 0.0

    def begin_probe(self, instance: str) -> None:
        """Note that a request tries the instance again, whose quarantine is over."""
        self._records[instance].probing = True

    def end_probe(self, instance: str) -> None:
        """Note that the request which tried the instance has ended, neither well nor by a fault: another may try it."""
        self._records[instance].probing = False

    def list_quarantined(self) -> list[str]:
        """Return the instances that get no requests, or only one that tries them."""
        return [name for name, record in self._records.items() if record.until]
