"""Counts what happens to grammars in the engine: times, lookups, failures. Knows no grammar and no metric."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.records import GrammarEvents


@dataclass
class GrammarMeter:
    """The counts since the last report. The engine's thread alone uses them."""

    step_seconds: float = 0.0
    compile_seconds: list[float] = field(default_factory=list)
    lookups: int = 0
    hits: int = 0
    failures: int = 0

    def collect(self) -> GrammarEvents | None:
        """Return the events since the last call, and reset the counts; None if there were none."""
        if not (self.step_seconds or self.compile_seconds or self.lookups or self.failures):
            return None
        events = GrammarEvents(self.step_seconds, self.compile_seconds, self.lookups, self.hits, self.failures)
        self.step_seconds, self.compile_seconds = 0.0, []
        self.lookups = self.hits = self.failures = 0
        return events
