"""What an API process counts for the engine's metrics, until it is sent there. Knows neither HTTP nor any metric."""

from __future__ import annotations

from collections import Counter

from server.engine.ipc.messages import Observed
from server.records import ConstraintName, ConstraintRefusal


class ObservedCounts:
    """The counts that were not sent yet."""

    def __init__(self) -> None:
        self.responses: Counter[int] = Counter()  # by HTTP status
        self.constraints: Counter[ConstraintName] = Counter()  # requests whose texts are constrained
        self.refusals: Counter[ConstraintRefusal] = Counter()  # requests that their constraints ended

    def add(self, observed: Observed) -> None:
        """Add the counts of a message."""
        self.responses.update(observed.responses)
        self.constraints.update(observed.constraints)
        self.refusals.update(observed.refusals)

    def make_message(self, memory_bytes: int) -> Observed:
        """Return the counts, and this process's memory, as a message."""
        return Observed(dict(self.responses), memory_bytes, dict(self.constraints), dict(self.refusals))

    def clear(self) -> None:
        """Forget the counts, as they were sent."""
        for counts in (self.responses, self.constraints, self.refusals):
            counts.clear()
