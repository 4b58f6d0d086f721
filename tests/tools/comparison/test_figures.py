"""What is measured in which order, by which queries."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from loadtest.bench.vocabulary import PromptVocabulary
from tools.comparison.figures import FIGURES, Interval, make_query, summarize
from tools.comparison.plan import Cell, Load, Plan
from tools.comparison.results import CellResult

PLAN = Plan(("a", "b", "c"), (128, 256), (1, 8), 16, 5.0, 2, 7)


def make_result(value: float | None = 1.5, errors: dict[str, int] | None = None) -> CellResult:
    return CellResult(5.0, dict.fromkeys((figure.name for figure in FIGURES), value), 4, errors or {})


def test_strategies_take_turns() -> None:
    cells = list(PLAN.cells())
    assert len(cells) == len(set(cells)) == 2 * 4 * 3
    assert "".join(cell.strategy for cell in cells) == "aaaabbbbcccc" + "bbbbccccaaaa", "each has a turn in each round"
    assert [cell.load for cell in cells] == PLAN.loads * 6, "all loads of a turn"


@pytest.mark.parametrize(("names", "rounds", "begin"), [("abcdefghij", 3, "adg"), ("ab", 3, "aba"), ("abc", 1, "a")])
def test_each_round_begins_with_another_strategy(names: str, rounds: int, begin: str) -> None:
    cells = list(replace(PLAN, strategies=names, rounds=rounds).cells())
    assert "".join(cell.strategy for cell in cells[:: len(names) * len(PLAN.loads)]) == begin


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


# -------------------------------------------------------------------- figures
def test_queries_are_complete() -> None:
    for figure in FIGURES:
        query = make_query(figure, "my-strategy", Interval(1000.25, 1010.5, 9.125))
        assert 'strategy="my-strategy"' in query
        assert "{s}" not in query
        assert "{s," not in query
        assert "{end}" not in query
        assert "1010.500" in query
    assert make_query(FIGURES[0], "x", Interval(1, 2, 1)) == (
        'histogram_quantile(0.5, kvmux_time_to_first_token_seconds_bucket{strategy="x"} @ 2.000 - '
        'kvmux_time_to_first_token_seconds_bucket{strategy="x"} @ 1.000)'
    )


def test_a_summary_is_the_median_of_the_rounds() -> None:
    summary = summarize(FIGURES[0], [0.3, None, 0.1, 0.2])
    assert summary is not None
    assert (summary.value, summary.low, summary.high) == pytest.approx((200, 100, 300))
    assert summarize(FIGURES[0], [None]) is None
