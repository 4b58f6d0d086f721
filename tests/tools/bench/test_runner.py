"""Variants take turns in their set-up, a failing case says which it is, and intervals are those of the sign test."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest

from config.errors import SettingsError
from tools.bench import runner
from tools.bench.runner import (
    Case,
    Effort,
    Failure,
    Reading,
    Row,
    Sample,
    Table,
    compare_by_turns,
    estimate_median,
    run_cases,
)
from tools.server_process import RunError

TABLE = Table("t", base="a")
STEP, SPEED = Row("step", "ms"), Row("speed", "tokens/s", lower_is_better=False)


def run(*cases: Case, turns: int = 1, attempts: int = 1) -> list[Sample | Failure]:
    return list(run_cases(cases, Effort(turns, attempts), lambda _: None))


def value(result: float | None) -> Callable[[Any, str], list[Reading]]:
    return lambda subject, variant: [Reading(STEP, result)]


def make_set_up(log: list[str], name: str = "it") -> Callable[[], Any]:
    @contextmanager
    def set_up() -> Iterator[str]:
        log.append(f"open {name}")
        try:
            yield name
        finally:
            log.append(f"close {name}")

    return set_up


# ---------------------------------------------------------------- turns and set-ups
def test_variants_take_turns_in_reverse_order_every_second_time_after_the_warm_up() -> None:
    log: list[str] = []

    def measure(subject: None, variant: str) -> list[Reading]:
        log.append(variant)
        return [Reading(STEP, len(log))]

    found = run(Case("it", TABLE, measure, "abc", warm_ups=1), turns=2)
    assert "".join(log) == "cbaabccba"
    assert [(each.variant, each.turn, each.reading.value) for each in found if isinstance(each, Sample)] == [
        ("a", 1, 4),
        ("b", 1, 5),
        ("c", 1, 6),
        ("c", 2, 7),
        ("b", 2, 8),
        ("a", 2, 9),
    ]
    assert len(run(Case("it", TABLE, measure, "abc", max_turns=1), turns=5)) == 3


def test_cases_one_after_another_share_a_set_up_which_is_closed_before_the_next() -> None:
    log: list[str] = []
    first, second = make_set_up(log, "first"), make_set_up(log, "second")

    def measure(subject: str, variant: str) -> list[Reading]:
        log.append(f"use {subject}")
        return []

    run(*(Case("it", TABLE, measure, set_up=set_up) for set_up in (first, first, second)))
    assert log == ["open first", "use first", "use first", "close first", "open second", "use second", "close second"]


def test_an_interruption_closes_what_is_open_and_leaves_what_was_measured() -> None:
    log: list[str] = []

    def measure(subject: str, variant: str) -> list[Reading]:
        if variant == "b":
            raise KeyboardInterrupt
        return [Reading(STEP, 1.0)]

    found: list[Sample | Failure] = []
    with pytest.raises(KeyboardInterrupt):
        found.extend(run_cases([Case("it", TABLE, measure, "abc", make_set_up(log))], Effort(1), lambda _: None))
    assert [each.variant for each in found if isinstance(each, Sample)] == ["a"]
    assert log == ["open it", "close it"]


# ---------------------------------------------------------------- failures
def test_a_failing_variant_is_named_and_the_others_go_on() -> None:
    def measure(subject: None, variant: str) -> list[Reading]:
        if variant == "b":
            raise RunError("no answer")
        return [Reading(STEP, 1.0)]

    failure, *samples = sorted(run(Case("it", TABLE, measure, "abc"), turns=2), key=lambda each: type(each).__name__)
    assert failure == Failure("it, b", "no answer")
    assert len(samples) == 4


def test_a_failing_set_up_is_tried_once_and_each_of_its_cases_is_named() -> None:
    tried: list[int] = []

    @contextmanager
    def fail() -> Iterator[None]:
        tried.append(1)
        raise SettingsError("no such model")
        yield

    names = {"one": fail, "two": fail, "three": nullcontext}
    found = run(*(Case(name, TABLE, value(1), set_up=set_up) for name, set_up in names.items()))
    assert found[:2] == [Failure("one", "no such model"), Failure("two", "no such model")]
    assert isinstance(found[2], Sample)
    assert len(tried) == 1


def test_a_variant_without_values_has_no_further_turns() -> None:
    found = run(Case("it", TABLE, lambda _, name: [Reading(STEP, None if name == "b" else 1.0)], "ab"), turns=3)
    assert [each.variant for each in found if isinstance(each, Sample)] == ["a", "b", "a", "a"]


# ---------------------------------------------------------------- background load
def test_a_value_that_is_missing_by_chance_is_measured_in_the_next_turn() -> None:
    found = run(Case("it", TABLE, lambda *_: [Reading(STEP, None, is_by_chance=True)], "a"), turns=3)
    assert len(found) == 3


def test_a_disturbed_measurement_is_repeated_and_the_quietest_attempt_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure_with_loads(*loads: float, **more: Any) -> tuple[float | None, float | None]:
        left = iter(loads)
        monkeypatch.setattr(runner.Neighbours, "compute_share", lambda self, own: next(left))
        values = itertools.count(1)
        case = Case("it", TABLE, lambda subject, variant: [Reading(STEP, next(values))], **more)
        (sample,) = run(case, attempts=3)
        assert isinstance(sample, Sample)
        return sample.reading.value, sample.reading.background_load

    assert measure_with_loads(0.3, 0.01) == (2, 0.01)
    assert measure_with_loads(0.3, 0.2, 0.4) == (2, 0.2)
    assert measure_with_loads(0.3, is_timed=False) == (1, 0.0)


# ---------------------------------------------------------------- intervals
def count_orders(count: int, low: int, high: int) -> float:
    """Return the probability that the median lies between these order statistics, by counting all outcomes."""
    within = sum(low < sum(below) <= high for below in itertools.product((0, 1), repeat=count))
    return within / 2**count


@pytest.mark.parametrize("count", range(1, 15))
def test_an_interval_is_the_narrowest_with_its_probability(count: int) -> None:
    found = estimate_median([*range(count)])
    low, high = int(found.low), int(found.high)
    assert low + high == count - 1
    assert found.coverage == pytest.approx(count_orders(count, low, high))
    if count < runner.ENOUGH_TURNS:
        assert (low, high) == (0, count - 1)
        assert found.coverage < 0.95
    else:
        assert found.coverage >= 0.95
        assert count_orders(count, low + 1, high - 1) < 0.95


def test_the_true_median_is_in_the_interval_as_often_as_it_should(rng: random.Random) -> None:
    count, trials = rng.randint(2, 60), 4000
    skewed = np.random.default_rng(rng.randrange(1 << 32)).exponential(size=(trials, count))
    intervals = [estimate_median(row) for row in skewed.tolist()]
    deviation = math.sqrt(0.25 / trials)
    found = [each.low <= math.log(2) <= each.high for each in intervals]
    assert np.mean(found) == pytest.approx(intervals[0].coverage, abs=5 * deviation)


# ---------------------------------------------------------------- pairs
def make_samples(row: Row, **by_variant: list[float | None]) -> list[Sample]:
    """Return a sample for each turn of each variant."""
    return [
        Sample(TABLE, variant, turn, Reading(row, each))
        for variant, values in by_variant.items()
        for turn, each in enumerate(values, 1)
    ]


def test_a_ratio_says_how_many_times_as_fast_one_is() -> None:
    times = compare_by_turns(make_samples(STEP, a=[50, 100, 40], b=[100, 100, 120]), "a", "b")
    assert times is not None
    assert (times.median, times.low, times.high, times.coverage) == (2, 1, 3, 0.75), "half the time is twice as fast"
    speeds = compare_by_turns(make_samples(SPEED, a=[50, 100], b=[100, 100]), "a", "b")
    assert speeds is not None
    assert (speeds.low, speeds.high) == (0.5, 1), "half the tokens are half as fast"


def test_turns_without_both_values_are_left_out() -> None:
    samples = make_samples(STEP, a=[None, 100, 40], b=[100, None, 120])
    ratio = compare_by_turns(samples, "a", "b")
    assert ratio is not None
    assert (ratio.median, ratio.coverage) == (3, 0)
    assert compare_by_turns(samples, "a", "c") is None


def test_several_values_of_a_turn_are_paired_in_their_order() -> None:
    samples = [*make_samples(STEP, a=[1, 10], b=[2, 30]), *make_samples(STEP, a=[3, 7], b=[12, 7])]
    ratio = compare_by_turns(samples, "a", "b")
    assert ratio is not None
    assert (ratio.median, ratio.low, ratio.high) == (2.5, 1, 4)


def test_drift_between_turns_does_not_matter() -> None:
    """The ratio of both medians would say something else where the machine is slower in some turns."""
    drift: list[float | None] = [random.uniform(0.3, 3) for _ in range(9)]
    ratio = compare_by_turns(make_samples(STEP, a=drift, b=[1.25 * (each or 0) for each in drift]), "a", "b")
    assert ratio is not None
    assert (ratio.low, ratio.high) == pytest.approx((1.25, 1.25))
    assert ratio.coverage >= 0.95
