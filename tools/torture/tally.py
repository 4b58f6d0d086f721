"""Counts events by name, and keeps the first examples of each problem."""

from __future__ import annotations

from collections import Counter, defaultdict

MAX_EXAMPLES = 5  # examples that are kept of each problem
MAX_EXAMPLE_CHARS = 2000


class Tally:
    """The counts of one run. A problem is something that must not happen; everything else is a plain count."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: Counter[str] = Counter()
        self.examples: defaultdict[str, list[str]] = defaultdict(list)

    def count(self, name: str, number: int = 1) -> None:
        self.counts[name] += number

    def add_problem(self, name: str, example: str) -> None:
        """Count a problem and keep its example if there are few of its kind."""
        self.problems[name] += 1
        if len(self.examples[name]) < MAX_EXAMPLES:
            self.examples[name].append(example[:MAX_EXAMPLE_CHARS])
