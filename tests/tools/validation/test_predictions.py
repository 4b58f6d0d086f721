"""Predictions and greedy texts of two programs are compared."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from tools.validation.predictions import Bounds, GreedyText, Predictions, Results, compare, count_equal, find_margins


def predictions(log_probs: Sequence[float], likeliest: Sequence[int]) -> Predictions:
    return Predictions(np.array(log_probs), [frozenset({token}) for token in likeliest])


def read(own: Results, base: Results, near_tie: float = 0.01) -> dict[str, float | None]:
    readings = compare(own, base, Bounds(0.1, 0.1, near_tie), exact=True)
    return {each.row.what: each.value for each in readings}


def test_predictions_are_compared_by_position() -> None:
    base = Results(predictions([-1.0, -2.0, -3.0, -2.0], [1, 2, 3, 4]), [])
    found = read(Results(predictions([-1.0, -2.5, -2.0, -2.0], [1, 2, 9, 4]), []), base)
    assert found["perplexity"] == pytest.approx(math.exp(7.5 / 4))
    assert found["differs from llama.cpp's by"] == pytest.approx(100 * (1 - math.exp(-0.5 / 4)))
    assert found["log-probability, mean difference"] == pytest.approx(1.5 / 4)
    assert found["largest difference"] == pytest.approx(1.0)
    assert found["same likeliest token"] == 75
    equal = read(base, base)
    assert (equal["differs from llama.cpp's by"], equal["largest difference"]) == (0, 0)
    assert equal["same likeliest token"] == 100


def test_one_of_several_equally_likely_tokens_is_enough() -> None:
    base = Results(Predictions(np.array([-1.0]), [frozenset({3, 4})]), [])
    assert read(Results(predictions([-1.0], [4]), []), base)["same likeliest token"] == 100


def test_a_greedy_text_differs_without_a_near_tie() -> None:
    sure = [5.0, 5.0, 5.0]
    theirs = [GreedyText(ids, sure) for ids in ([1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2], [1, 2, 3])]
    theirs[1] = GreedyText([1, 2, 3], [5.0, 0.002, 5.0])
    ours = [
        GreedyText([1, 2, 3], sure),
        GreedyText([1, 7, 3], [5.0, 0.001, 5.0]),  # a near tie
        GreedyText([1, 2, 9], [5.0, 5.0, 1.0]),
        GreedyText([1, 2, 3], [5.0, 5.0, 2.0]),  # theirs ends
        GreedyText([4, 2, 3], [0.001, 5.0, 5.0]),  # a near tie only for us
    ]
    same = predictions([-1.0], [1])
    found = read(Results(same, ours), Results(same, theirs))
    assert found["greedy texts equal"] == 1
    assert found["greedy tokens equal"] == pytest.approx(100 * (3 + 1 + 2 + 2) / 14)
    assert find_margins(ours, theirs) == [0.002, 5.0, 5.0, 5.0]
    assert found["clear differences"] == 3
    assert read(Results(same, ours), Results(same, theirs), 0.001)["clear differences"] == 4


def test_the_beginning_that_two_texts_share() -> None:
    assert [count_equal(a, b) for a, b in (([], [1]), ([1, 2], [1, 2]), ([1, 2], [1, 3]), ([1], [1, 2]))] == [
        0,
        2,
        1,
        1,
    ]
