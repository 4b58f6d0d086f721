"""Time is divided without a rest, and each moment is that of the innermost span or operation."""

from __future__ import annotations

import itertools

import pytest

from server.profiling import spans as module
from server.profiling.spans import SpanTimer


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> SpanTimer:
    """A second passes from look to look."""
    monkeypatch.setattr(module, "perf_counter", itertools.count().__next__)
    return SpanTimer("rest")


def test_the_inner_span_pauses_the_outer_one(timer: SpanTimer) -> None:
    timer.begin()  # 0
    with timer.span("outer"), timer.op("inner", (), {}):  # rest to 1, outer to 2, inner to 3, outer to 4
        pass
    assert timer.end() == {"rest": 1 + 1, "outer": 1 + 1, "inner": 1}


def test_each_beginning_counts_anew(timer: SpanTimer) -> None:
    for _ in range(2):
        timer.begin()
        with timer.span("outer"):
            pass
        assert timer.end() == {"rest": 2, "outer": 1}


def test_a_span_that_raises_is_counted_as_well(timer: SpanTimer) -> None:
    timer.begin()
    with pytest.raises(ValueError, match="no"), timer.span("failing"):
        raise ValueError("no")
    assert timer.end() == {"rest": 2, "failing": 1}


def test_seconds_that_were_measured_elsewhere_are_taken_from_the_span_around(timer: SpanTimer) -> None:
    timer.begin()
    with timer.span("forward"):  # to 1
        timer.add_seconds("attend", 0.25)  # to 2
    assert timer.end() == {"rest": 2, "forward": 2 - 0.25, "attend": 0.25}
