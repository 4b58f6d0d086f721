"""The results of suites (`SuiteReport`), and their form as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from config.tables import format_table
from server.evaluation.suites.paired import CONFIDENCE, PairedComparison, SuiteVerdict, compare_pairs
from server.evaluation.suites.runner import TaskScores


@dataclass(frozen=True)
class SuiteReport:
    """The scores of tasks under strategies, of which the first is exact, and how they were measured."""

    strategies: Sequence[str]
    tasks: Sequence[TaskScores]  # those with samples
    length: int  # most tokens of a prompt and its answer
    margin: float  # share within which a strategy counts as the same
    query_aware: bool
    seed: str
    seconds: float
    samples: int  # that were asked for; after Ctrl-C there are fewer

    @property
    def is_interrupted(self) -> bool:
        return not self.tasks or any(each.count < self.samples for each in self.tasks)

    @cached_property
    def comparisons(self) -> Mapping[str, Mapping[str, PairedComparison]]:
        """Return the comparison of each strategy but the first with it, by task and strategy."""
        exact, *others = self.strategies
        return {
            each.task.name: {
                name: compare_pairs(each.by_strategy[exact], each.by_strategy[name], self.margin) for name in others
            }
            for each in self.tasks
        }


def format_suites(report: SuiteReport) -> str:
    """Return the results as a table in GitHub's Markdown, with a line that explains it and one for each strategy."""
    exact, *others = report.strategies
    rows = [
        [
            each.task.name,
            *(f"{number:,}" for number in (each.count, max(each.tokens))),
            f"{fmean(each.by_strategy[exact]):.0%}",
            *(_format_cell(fmean(each.by_strategy[name]), report.comparisons[each.task.name][name]) for name in others),
        ]
        for each in report.tasks
    ]
    table = format_table(["task"], ["samples", "tokens", exact, *others], rows)
    seen = "before" if report.query_aware else "after"
    explained = (
        f"Mean scores; in brackets the interval of {CONFIDENCE:.0%} of the difference to {exact}, in points. The same: "
        f"worse by at most {100 * report.margin:g} points. Questions come {seen} the place where keys are dropped. "
        f"Seed {report.seed}, {report.seconds / 60:.1f} minutes."
    )
    return "\n".join([table, "", explained, *(_summarize(report, name) for name in others)])


def _format_cell(score: float, comparison: PairedComparison) -> str:
    if comparison.verdict is SuiteVerdict.TOO_HARD:
        return f"{score:.0%} {comparison.verdict}"
    low, high = (100 * end for end in (comparison.difference.low, comparison.difference.high))
    needed = f" before about {comparison.samples_needed:,} samples" if comparison.samples_needed else ""
    return f"{score:.0%} [{low:+.0f} to {high:+.0f}] {comparison.verdict}{needed}"


def _summarize(report: SuiteReport, name: str) -> str:
    """Return how many tasks have each verdict for a strategy."""
    counts = Counter(by_name[name].verdict for by_name in report.comparisons.values())
    listed = ", ".join(f"{counts[verdict]} {verdict}" for verdict in SuiteVerdict if counts[verdict])
    return f"{name}, tasks: {listed}"


def suites_to_json(report: SuiteReport) -> dict[str, Any]:
    """Return the results for JSON, with the score of each sample."""
    return {
        "strategies": list(report.strategies),
        "length": report.length,
        "margin": report.margin,
        "confidence": CONFIDENCE,
        "query_aware": report.query_aware,
        "seed": report.seed,
        "seconds": report.seconds,
        "samples": report.samples,
        "tasks": [
            {
                "name": each.task.name,
                "asking": each.task.asking,
                "tokens": each.tokens,
                "scores": dict(each.by_strategy),
                "comparisons": {
                    name: {
                        "verdict": comparison.verdict,
                        "difference": comparison.difference.describe(),
                        "samples_needed": comparison.samples_needed,
                    }
                    for name, comparison in report.comparisons[each.task.name].items()
                },
            }
            for each in report.tasks
        ],
    }
