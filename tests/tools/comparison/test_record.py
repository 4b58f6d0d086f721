"""What is measured is kept, and a comparison goes on only with the same plan."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from loadtest.bench.vocabulary import PromptVocabulary
from tools.comparison.figures import FIGURES, Interval, Reading, Series, make_query, summarize
from tools.comparison.plan import Cell, Load, Plan
from tools.comparison.record import CELLS, CellResult, Record, RecordError

PLAN = Plan(("a", "b", "c"), (128, 256), (1, 8), 16, 5.0, 2, 7)
DESCRIPTION = {"model": "tiny", "batch": (1, 8)}


def make_result(cell: Cell, value: float | None = 1.5, errors: dict[str, int] | None = None) -> CellResult:
    figures = {figure.name: Reading("up", 20.0, value) for figure in FIGURES}
    return CellResult(cell, Interval(10.0, 20.0, 5.0), figures, 4, errors or {})


def test_strategies_take_turns_at_a_load() -> None:
    cells = list(PLAN.cells())
    assert len(cells) == len(set(cells)) == 2 * 4 * 3
    assert [cell.strategy for cell in cells[:6]] == ["a", "b", "c", "a", "b", "c"]
    assert [cell.strategy for cell in cells[12:15]] == ["b", "c", "a"], "the second round begins with another one"
    assert {cell.load for cell in cells[:3]} == {Load(128, 1)}


def test_the_requests_of_a_load_are_the_same_for_every_strategy() -> None:
    one, two, three = (Cell(round_, Load(128, 8), name) for round_, name in ((0, "a"), (0, "b"), (1, "a")))
    assert PLAN.make_salt(one) == PLAN.make_salt(two) != PLAN.make_salt(three)
    vocabulary = PromptVocabulary(range(1000))
    first, again, other = (
        [each.prompt for each in islice(PLAN.make_requests(vocabulary, Load(128, 8), PLAN.make_salt(cell)), 3)]
        for cell in (one, two, three)
    )
    assert first == again != other
    assert {len(prompt) for prompt in first} == {128}
    assert first[0][:64] == first[1][:64], "as with a common system prompt"
    assert first[0][64:] != first[1][64:]


def test_a_comparison_goes_on(tmp_path: Path) -> None:
    record = Record.open(tmp_path / "it", DESCRIPTION, restart=False)
    first, second, *_ = PLAN.cells()
    record.add(make_result(first, errors={"HTTP 503": 2}))
    record.add(make_result(second, None))
    record.set_fidelity(128, {"strategies": []})
    record.set_fidelity(256, {"error": "no room"})
    record.set_exact({"a": True})
    again = Record.open(tmp_path / "it", DESCRIPTION, restart=False)
    assert again.results == {first: make_result(first, errors={"HTTP 503": 2}), second: make_result(second, None)}
    assert [again.lacks_fidelity(length) for length in (64, 128, 256)] == [True, False, True]
    assert again.exact == {"a": True}
    assert not Record.open(tmp_path / "it", DESCRIPTION, restart=True).results
    assert not Record.open(tmp_path / "it", DESCRIPTION, restart=False).results


def test_another_comparison_is_refused(tmp_path: Path) -> None:
    Record.open(tmp_path, DESCRIPTION, restart=False)
    with pytest.raises(RecordError, match="has another comparison"):
        Record.open(tmp_path, DESCRIPTION | {"model": "other"}, restart=False)
    Record.open(tmp_path, DESCRIPTION | {"model": "other"}, restart=True)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    Record.open(tmp_path, DESCRIPTION, restart=False)
    (tmp_path / CELLS).write_text('{"round": 0\n')
    with pytest.raises(RecordError, match="measure again with --restart"):
        Record.open(tmp_path, DESCRIPTION, restart=False)


def test_a_line_that_was_not_written_to_its_end_is_measured_again(tmp_path: Path) -> None:
    record = Record.open(tmp_path, DESCRIPTION, restart=False)
    first, second, *_ = PLAN.cells()
    record.add(make_result(first))
    with (tmp_path / CELLS).open("a") as lines:
        lines.write('{"round": 0, "pro')
    again = Record.open(tmp_path, DESCRIPTION, restart=False)
    assert again.results.keys() == {first}
    again.add(make_result(second))
    assert Record.open(tmp_path, DESCRIPTION, restart=False).results.keys() == {first, second}


# -------------------------------------------------------------------- figures
def test_queries_are_complete() -> None:
    for figure in FIGURES:
        query = make_query(figure, Series("my-strategy", "h:1"), Interval(1000.25, 1010.5, 9.125))
        assert 'strategy="my-strategy"' in query
        assert "{s}" not in query
        assert "{s," not in query
        assert "{end}" not in query
        assert "1010.500" in query
    assert make_query(FIGURES[0], Series("x", "h:1"), Interval(1, 2, 1)) == (
        'histogram_quantile(0.5, kvmux_time_to_first_token_seconds_bucket{strategy="x",instance="h:1"} @ 2.000 - '
        'kvmux_time_to_first_token_seconds_bucket{strategy="x",instance="h:1"} @ 1.000)'
    )


def test_a_summary_is_the_median_of_the_rounds() -> None:
    readings = [Reading("q", 1.0, value) for value in (0.3, None, 0.1, 0.2)]
    summary = summarize(FIGURES[0], readings)
    assert summary is not None
    assert (summary.value, summary.low, summary.high) == pytest.approx((200, 100, 300))
    assert summarize(FIGURES[0], readings[1:2]) is None
