"""Puts together the results of a comparison: summaries over the rounds, fidelity and advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tools.comparison.advice import Advice, Candidate, advise
from tools.comparison.fidelity import StrategyFidelity, read_fidelity
from tools.comparison.figures import BY_NAME, Summary, summarize
from tools.comparison.plan import Load, Plan
from tools.comparison.record import CellResult, Record


@dataclass(frozen=True)
class Comparison:
    """The results of a comparison, and how they were measured."""

    plan: Plan
    record: Record
    date: datetime
    max_kl: float  # bound of advice, nats per token
    facts: Sequence[tuple[str, str]]  # model, machine, versions and others, to be shown
    commands: Sequence[str]
    options: Mapping[str, Mapping[str, Any]]  # of each strategy

    def find_cells(self, load: Load, strategy: str) -> list[CellResult]:
        """Return the rounds of a strategy under a load."""
        results = self.record.results.items()
        return [each for cell, each in results if cell.load == load and cell.strategy == strategy]

    def summarize(self, figure: str, load: Load, strategy: str) -> Summary | None:
        """Return a figure of a strategy under a load; None if it was not measured."""
        return summarize(BY_NAME[figure], [each.figures[figure] for each in self.find_cells(load, strategy)])

    def count_errors(self, load: Load, strategy: str) -> dict[str, int]:
        """Return the numbers of failed requests by message."""
        found: dict[str, int] = {}
        for each in self.find_cells(load, strategy):
            for message, number in each.errors.items():
                found[message] = found.get(message, 0) + number
        return found

    def fidelity(self, length: int) -> dict[str, StrategyFidelity]:
        """Return the fidelity of strategies at a prompt length, by name."""
        return read_fidelity(self.record.fidelity, length)

    @property
    def has_fidelity(self) -> bool:
        """Whether the fidelity was measured at any prompt length."""
        return any(self.fidelity(length) for length in self.plan.prompt_lengths)

    def candidates(self, load: Load) -> list[Candidate]:
        """Return all strategies with what advice on a load depends on."""
        fidelity = self.fidelity(load.prompt_tokens)
        return [
            Candidate(
                name,
                self.record.exact.get(name, False),
                self.summarize("tokens_per_second", load, name),
                self.summarize("kv_memory", load, name),
                fidelity.get(name),
                sum(self.count_errors(load, name).values()),
            )
            for name in self.plan.strategies
        ]

    def advice(self) -> list[Advice]:
        """Return the advice on each load."""
        return [advise(load, self.candidates(load), self.max_kl) for load in self.plan.loads]
