"""Time is divided without a rest, whoever is called pauses who called it, and what was put in between is gone after."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from server.profiling import spans as module
from server.profiling.spans import Spans


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes from look to look."""
    monkeypatch.setattr(module, "perf_counter", itertools.count().__next__)


@pytest.mark.usefixtures("clock")
def test_who_is_called_pauses_who_called_it() -> None:
    spans = Spans("rest")
    spans.begin()  # 0
    with spans.measure("outer"), spans.measure("inner"):  # rest to 1, outer to 2, inner to 3, outer to 4
        pass
    assert spans.end() == {"rest": 1 + 1, "outer": 1 + 1, "inner": 1}


@pytest.mark.usefixtures("clock")
def test_each_beginning_counts_anew() -> None:
    spans = Spans("rest")
    for _ in range(2):
        spans.begin()
        with spans.measure("outer"):
            pass
        assert spans.end() == {"rest": 2, "outer": 1}


@pytest.mark.usefixtures("clock")
def test_a_call_that_raises_is_counted_as_well() -> None:
    spans = Spans("rest")

    def fail() -> None:
        raise ValueError("no")

    owner = SimpleNamespace(run=fail)
    spans.begin()
    with pytest.raises(ValueError, match="no"), spans.trace_calls(owner, "run", "failing"):
        owner.run()
    assert owner.run is fail
    assert spans.end() == {"rest": 2, "failing": 1}


def test_a_method_of_the_class_is_found_again() -> None:
    class Owner:
        def double(self, x: int) -> int:
            return 2 * x

    owner, spans = Owner(), Spans("rest")
    spans.begin()
    with spans.trace_calls(owner, "double", "it"):
        assert "double" in vars(owner)
        assert owner.double(4) == 8
    assert "double" not in vars(owner)
    assert owner.double(4) == 8
    assert spans.end()["it"] > 0
