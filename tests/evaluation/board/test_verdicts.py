"""What follows from made-up figures: the Pareto line beside brute force, and sentences."""

from __future__ import annotations

import random

import pytest

from server.evaluation.board.data import Board
from server.evaluation.board.verdicts import describe_length, find_pareto_line, judge, recommend
from server.evaluation.suites.paired import SuiteVerdict
from tests.evaluation.board.boards import RIGHT, WRONG, make_board, make_quality

EXACT = make_quality({"easy": RIGHT, "hard": WRONG}, exact=True)
BOTH_EASY = make_quality({"easy": RIGHT, "other": RIGHT}, exact=True)
FIRST_WRONG = [0.0, 0.0, *RIGHT[2:]]


@pytest.mark.fuzz
def test_the_pareto_line_has_what_no_other_point_beats(rng: random.Random) -> None:
    for _ in range(300):
        most = rng.choice([3, 1000])  # few values give equal points
        points = {f"{i}": (rng.randrange(most) / 7, rng.randrange(most) / 3) for i in range(rng.randrange(12))}
        found = find_pareto_line(points)
        beaten = {
            a
            for a, (x, y) in points.items()
            for b, (u, v) in points.items()
            if u <= x and v <= y and (u, v) != (x, y) and b != a
        }
        assert sorted(found) == sorted(points.keys() - beaten)
        assert [points[name][0] for name in found] == sorted(points[name][0] for name in found)


def test_a_strategy_is_the_same_if_every_task_that_is_not_too_hard_says_so() -> None:
    def find(**tasks: list[float]) -> SuiteVerdict:
        exact = {"easy": RIGHT, "other": RIGHT, "hard": WRONG}
        return judge(make_quality(exact), make_quality(exact | tasks), 0.1).verdict

    assert find() is SuiteVerdict.SAME
    assert find(hard=RIGHT) is SuiteVerdict.SAME
    assert find(other=WRONG) is SuiteVerdict.WORSE
    assert find(other=FIRST_WRONG) is SuiteVerdict.NOT_DECIDED
    assert find(other=FIRST_WRONG, easy=WRONG) is SuiteVerdict.WORSE
    hard = make_quality({"hard": WRONG})
    assert judge(hard, hard, 0.1).verdict is SuiteVerdict.TOO_HARD


def test_the_smallest_strategy_that_answers_alike_is_named_with_its_memory_and_speed() -> None:
    board = make_board(
        {
            "exact": BOTH_EASY,
            "int8": make_quality({"easy": RIGHT, "other": RIGHT}, kv_bytes=531),
            "small": make_quality({"easy": RIGHT, "other": RIGHT}, kv_bytes=406),
            "window": make_quality({"easy": RIGHT, "other": WRONG}, kv_bytes=100),
        }
    )
    assert describe_length(board, 4096) == (
        "For texts up to 4,096 tokens `small` answers as exact caching does, within 10 points, in 0.41 of the memory "
        "at 1.20 of the speed with 8 streams; `window` (50%) answers worse than exact caching (100%)."
    )


def test_tasks_that_are_too_hard_are_counted() -> None:
    tasks = {"easy": RIGHT, "other": RIGHT, "hard": WRONG}
    board = make_board({"exact": make_quality(tasks), "small": make_quality(tasks, kv_bytes=500)})
    assert describe_length(board, 4096).endswith(" This is by 2 of 3 tasks, the others being too hard for this model.")


def test_a_strategy_that_one_task_decides_on_is_named_only_if_running_text_agrees() -> None:
    same = {"easy": RIGHT, "hard": RIGHT}
    cells = {"int4": make_quality(same, kv_bytes=280, kl=0.03), "int8": make_quality(same, kv_bytes=530, kl=0.004)}
    board = make_board({"exact": EXACT, **cells})
    assert describe_length(board, 4096) == (
        "For texts up to 4,096 tokens `int8` answers as exact caching does, within 10 points, in 0.53 of the memory "
        "at 1.20 of the speed with 8 streams. This is by 1 of 2 tasks, the others being too hard for this model; so "
        "what is named has to be within 0.01 nats a token of exact caching, too."
    )


def describe(**others: list[float]) -> str:
    cells = {name: make_quality({"easy": scores}, kv_bytes=400) for name, scores in others.items()}
    board = make_board({"exact": make_quality({"easy": RIGHT}, exact=True), **cells}, speed=False)
    return describe_length(board, 4096)


def test_what_is_not_decided_says_from_how_many_samples_on() -> None:
    found = describe(a=FIRST_WRONG, b=WRONG)
    none = "For texts up to 4,096 tokens no strategy in less memory is known to answer as exact caching does"
    assert found.startswith(
        f"{none}; `b` (0%) answers worse than exact caching (100%); `a` is not decided before about "
    )
    assert " samples. This is by 1 of 1 tasks; so what is named has to be within " in found
    assert " are not decided before about " in describe(a=FIRST_WRONG, b=FIRST_WRONG)
    assert "answer worse" in describe(a=WRONG, b=WRONG)


def hard_board(*kls: float) -> Board:
    cells = {f"kl{kl:g}": make_quality({"hard": WRONG}, kv_bytes=400 - i, kl=kl) for i, kl in enumerate(kls)}
    return make_board({"exact": make_quality({"hard": WRONG}, exact=True), **cells})


def test_running_text_decides_where_all_tasks_are_too_hard() -> None:
    begin = "For texts up to 4,096 tokens all tasks are too hard for this model, which leaves running text: "
    best = recommend(hard_board(0.002, 0.009, 0.02), 4096)
    assert best is not None
    assert best.strategy == "kl0.009"
    assert describe_length(hard_board(0.002, 0.009, 0.02), 4096) == (
        f"{begin}`kl0.009` is the smallest within 0.01 nats a token of exact caching (0.009), in 0.40 of the memory at "
        "1.20 of the speed with 8 streams."
    )
    none = "no strategy in less memory is within 0.01 nats a token of exact caching."
    assert describe_length(hard_board(0.02), 4096) == begin + none
    assert recommend(hard_board(0.02), 4096) is None


def test_one_strategy_is_compared_with_none() -> None:
    board = make_board({"exact": EXACT})
    assert describe_length(board, 4096) == "For texts up to 4,096 tokens nothing is compared yet."
