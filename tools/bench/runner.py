"""Runs benchmark cases: variants by turns, repeated while other processes disturb them, with confidence intervals.

A case has a set-up, variants that take turns, and a function that measures one variant. What is measured is a reading
of a row, which has a unit and perhaps a goal. The runner knows neither models nor servers, and prints nothing.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

from config.errors import SettingsError
from server.profiling.background_load import BUSY_THRESHOLD, Neighbours
from tools.server_process import RunError

CASE_ERRORS = (RunError, SettingsError, OSError, httpx.HTTPError)  # end a variant or a case, not the others
ENOUGH_TURNS = 6  # for an interval of 95 %

ShowStatus = Callable[[str], None]


# ---------------------------------------------------------------- what is measured
@dataclass(frozen=True)
class Row:
    """A figure to measure: the work, and the unit of its value."""

    what: str
    unit: str = ""
    lower_is_better: bool = True
    goal: float | None = None
    digits: int = 3  # significant ones that are shown
    # Figures of other programs, measured once, the best first
    peers: Mapping[str, float] = field(default_factory=dict, hash=False)

    def meets_goal(self, value: float) -> bool | None:
        """Return whether a value meets the goal; None if there is no goal."""
        if self.goal is None:
            return None
        return value <= self.goal if self.lower_is_better else value >= self.goal

    def divide(self, one: float, other: float) -> float:
        """Return how many times as fast `one` is as `other`; of a size, how many times as small."""
        return other / one if self.lower_is_better else one / other


@dataclass(frozen=True)
class Table:
    """A table of the report, which one or several cases fill."""

    title: str
    variants_are_rows: bool = False  # instead of columns
    base: str | None = None  # the variant that is compared with each other one by the ratios of their turns
    compares_others: bool = False  # the ratios say how many times as fast the others are as the base, not the base
    note: str = ""  # printed above it


@dataclass(frozen=True)
class Reading:
    """A value of a row, or the reason why there is none."""

    row: Row
    value: float | None
    limit: float | None = None  # the best possible value on this machine, measured in the same minute
    reason: str = ""
    background_load: float | None = None  # of other processes meanwhile; None: the runner measures it
    is_by_chance: bool = False  # whether there is no value by chance: another turn may have one
    variant: str = ""  # if variants are measured together, and take no turns


@dataclass(frozen=True)
class Sample:
    """A reading of one variant in one turn."""

    table: Table
    variant: str
    turn: int
    reading: Reading


@dataclass(frozen=True)
class Failure:
    """A case, or one of its variants, that could not be measured."""

    case: str
    reason: str


Measure = Callable[[Any, str], Iterable[Reading]]  # of (what the set-up yields, variant)
SetUp = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Case:
    """Something to measure: a set-up, and variants that take turns in it."""

    name: str  # shown while it runs, and if it fails
    table: Table
    measure: Measure
    variants: Sequence[str] = ("",)
    set_up: SetUp = nullcontext  # cases one after another with the same set-up share it
    warm_ups: int = 0  # turns before the first one that counts
    max_turns: int | None = None  # of cases that a further turn tells nothing
    is_timed: bool = True  # False: other work on the machine does not change what is measured


@dataclass(frozen=True)
class Effort:
    """How often everything is measured."""

    turns: int
    attempts: int = 1  # at a measurement while other processes use the processors, at most


@dataclass(frozen=True)
class Context:
    """What a group of cases gets from the command line."""

    options: Namespace
    show_status: ShowStatus
    notes: list[str] = field(default_factory=list)  # printed below the tables


@dataclass(frozen=True)
class Group:
    """A group of cases, which `python -m tools.bench GROUP` measures."""

    description: str
    list_cases: Callable[[Context], Iterable[Case]]  # raises the errors of CASE_ERRORS, and ValueError
    add_arguments: Callable[[ArgumentParser], None] = lambda _: None
    effort: Effort = Effort(3)  # by default
    command: str = ""  # by which it is called, if that is a target of make; the mark of its section, too
    document: str | None = None  # with its section, in the folder of --docs
    goals_are_bounds: bool = False  # a missed goal is an error
    parts: Sequence[str] = ()  # options that choose a part of the cases, so that --docs refuses them
    draw: Callable[[Sequence[Sample], Path], object] | None = None  # plots the samples
    update_more: Callable[[Context], None] = lambda _: None  # of the documents in the folder of --docs
    order: Callable[[Sample], Any] = lambda _: 0  # by which the report is sorted, if not as it was measured


# ---------------------------------------------------------------- running cases
def run_cases(cases: Iterable[Case], effort: Effort, show_status: ShowStatus) -> Iterator[Sample | Failure]:
    """Yield the samples of all cases, and a failure for each case or variant that could not be measured."""
    with ExitStack() as opened:
        latest: SetUp | None = None
        subject: Any = None
        failed = ""  # why the latest set-up failed
        for case in cases:
            if case.set_up != latest:
                opened.close()
                latest, subject, failed = case.set_up, None, ""  # no reference keeps the memory of an engine
                show_status(f"{case.name}: starting")
                try:
                    subject = opened.enter_context(case.set_up())
                except CASE_ERRORS as error:
                    failed = str(error)
            if failed:
                yield Failure(case.name, failed)
                continue
            yield from _take_turns(case, subject, effort, show_status)


def _take_turns(case: Case, subject: Any, effort: Effort, show_status: ShowStatus) -> Iterator[Sample | Failure]:
    """Measure the variants in turns, in reverse order in every second one, as other work disturbs the machine.

    A variant without any value has no further turns, unless that is by chance.
    """
    turns = min(effort.turns, case.max_turns or effort.turns)
    left = list(case.variants)
    for turn in range(1 - case.warm_ups, turns + 1):
        for variant in left[:: 1 if turn % 2 else -1]:
            show_status(_describe(case, variant, f"turn {turn} of {turns}" if turn > 0 else "warm-up"))
            try:
                readings = _measure(case, subject, variant, effort.attempts if turn > 0 else 1)
            except CASE_ERRORS as error:
                yield Failure(_describe(case, variant), str(error))
                left.remove(variant)
                continue
            if turn > 0:
                yield from (Sample(case.table, each.variant or variant, turn, each) for each in readings)
            if readings and all(each.value is None and not each.is_by_chance for each in readings):
                left.remove(variant)


def _describe(case: Case, variant: str, *more: str) -> str:
    return ", ".join(filter(None, (case.name, variant, *more)))


def _measure(case: Case, subject: Any, variant: str, attempts: int) -> list[Reading]:
    """Measure until other processes use little CPU time; return the attempt with the least background load."""
    tried: list[tuple[float, list[Reading]]] = []
    while len(tried) < (attempts if case.is_timed else 1) and (not tried or tried[-1][0] > BUSY_THRESHOLD):
        background, before = Neighbours(), _count_children_seconds()
        readings = list(case.measure(subject, variant))
        tried.append((background.compute_share(_count_children_seconds() - before), readings))
    load, readings = min(tried, key=lambda each: each[0])
    load = load if case.is_timed else 0.0
    return [replace(each, background_load=load) if each.background_load is None else each for each in readings]


def _count_children_seconds() -> float:
    """Return the CPU seconds of all processes that this one has started and that still run."""
    seconds = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            seconds += sum(process.cpu_times()[:4])
    return seconds


# ---------------------------------------------------------------- intervals
@dataclass(frozen=True)
class Interval:
    """A median, with the bounds between which the true one lies with the probability `coverage`."""

    median: float
    low: float
    high: float
    coverage: float


def estimate_median(values: Sequence[float]) -> Interval:
    """Return the median and the order statistics between which the true one lies with at least 95 % probability.

    It holds for any distribution (a sign test). Of fewer than ENOUGH_TURNS values it is the range, and covers less.
    """
    ordered, count = sorted(values), len(values)
    rank = max((rank for rank in range(count // 2) if _compute_tail(count, rank) <= 0.025), default=0)
    return Interval(median(ordered), ordered[rank], ordered[-1 - rank], 1 - 2 * _compute_tail(count, rank))


def _compute_tail(count: int, rank: int) -> float:
    """Return the probability that at most `rank` of `count` values lie below the median: the next one is above it."""
    return sum(math.comb(count, below) for below in range(rank + 1)) / (1 << count)


def compare_by_turns(samples: Iterable[Sample], one: str, other: str) -> Interval | None:
    """Return how many times as fast `one` is as `other` in the row of these samples; None without a common turn.

    Values of the same turn are paired, so that a machine whose speed drifts affects both of a pair. Several values of a
    row in a turn are paired in their order.
    """
    values: dict[str, dict[Hashable, float]] = {one: {}, other: {}}
    counts: defaultdict[Hashable, int] = defaultdict(int)
    row = Row("")
    for each in samples:
        place = each.variant, each.turn
        if each.variant in values and each.reading.value:
            values[each.variant][each.turn, counts[place]] = each.reading.value
            row = each.reading.row
        counts[place] += 1
    common = [key for key in values[one] if key in values[other]]
    return estimate_median([row.divide(values[one][key], values[other][key]) for key in common]) if common else None
