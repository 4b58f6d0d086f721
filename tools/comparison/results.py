"""Puts together the results of a comparison: summaries over the rounds, fidelity and advice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tools.comparison.advice import Advice, Candidate, advise
from tools.comparison.fidelity import StrategyFidelity
from tools.comparison.figures import BY_NAME, Summary, summarize
from tools.comparison.plan import Cell, Load, Plan


@dataclass(frozen=True)
class CellResult:
    """What was measured in a cell."""

    seconds: float  # from the first request to the end of the last answer
    figures: Mapping[str, float | None]  # by name, in Prometheus' units
    requests: int
    errors: Mapping[str, int]  # numbers of failed requests, by message


@dataclass
class Comparison:
    """The results of a comparison so far."""

    plan: Plan
    max_kl: float  # bound of advice, nats per token
    cells: dict[Cell, CellResult] = field(default_factory=dict)
    exact: dict[str, bool] = field(default_factory=dict)  # whether each strategy promises to change no answer
    failures: dict[str, str] = field(default_factory=dict)  # by strategy, why its server could not be measured
    fidelity: dict[int, dict[str, StrategyFidelity]] = field(default_factory=dict)  # by prompt length, then by name
    fidelity_errors: dict[int, str] = field(default_factory=dict)  # by prompt length

    def summarize(self, figure: str, load: Load, strategy: str) -> Summary | None:
        """Return a figure of a strategy under a load; None if it was not measured."""
        return summarize(BY_NAME[figure], [each.figures[figure] for each in self._find_cells(load, strategy)])

    def count_errors(self, load: Load, strategy: str) -> Counter[str]:
        """Return the numbers of failed requests by message."""
        found = Counter[str]()
        for each in self._find_cells(load, strategy):
            found.update(each.errors)
        return found

    def _find_cells(self, load: Load, strategy: str) -> list[CellResult]:
        return [each for cell, each in self.cells.items() if cell.load == load and cell.strategy == strategy]

    def advice(self) -> list[Advice]:
        """Return the advice on each load."""
        return [advise(load, self._list_candidates(load), self.max_kl) for load in self.plan.loads]

    def _list_candidates(self, load: Load) -> list[Candidate]:
        fidelity = self.fidelity.get(load.prompt_tokens, {})
        return [
            Candidate(
                name,
                self.exact.get(name, False),
                self.summarize("tokens_per_second", load, name),
                self.summarize("kv_memory", load, name),
                fidelity.get(name),
                self.count_errors(load, name).total() + (name in self.failures),
            )
            for name in self.plan.strategies
        ]

    def as_json(self) -> dict[str, Any]:
        """Return all that was measured, as an object for JSON."""
        cells = [
            {"round": cell.round, **cell.load._asdict(), "strategy": cell.strategy, **vars(each)}
            for cell, each in self.cells.items()
        ]
        fidelity = {
            length: {name: each._asdict() for name, each in by_name.items()}
            for length, by_name in self.fidelity.items()
        }
        return {
            "cells": cells,
            "exact": self.exact,
            "failures": self.failures,
            "fidelity": fidelity,
            "fidelity_errors": self.fidelity_errors,
        }
