"""Predictions and greedy texts of two programs are compared."""

from __future__ import annotations

import math

import pytest

from tools.validation.predictions import Agreement, GreedyAgreement, GreedyText, Predictions, count_equal


def predictions(log_probs: list[float], likeliest: list[int]) -> Predictions:
    return Predictions.from_log_probs(log_probs, [frozenset({token}) for token in likeliest])


def test_predictions_are_compared_by_position() -> None:
    base = predictions([-1.0, -2.0, -3.0, -2.0], [1, 2, 3, 4])
    own = predictions([-1.0, -2.5, -2.0, -2.0], [1, 2, 9, 4])
    found = Agreement.between(own, base)
    assert found.positions == 4
    assert found.perplexity == pytest.approx(math.exp(7.5 / 4))
    assert found.perplexity_ratio == pytest.approx(math.exp(-0.5 / 4))
    assert (found.mean_difference, found.max_difference) == pytest.approx((1.5 / 4, 1.0))
    assert found.same_top == 0.75
    equal = Agreement.between(base, base)
    assert (equal.perplexity_ratio, equal.max_difference, equal.same_top) == (1, 0, 1)


def test_one_of_several_equally_likely_tokens_is_enough() -> None:
    base = Predictions.from_log_probs([-1.0], [frozenset({3, 4})])
    assert Agreement.between(predictions([-1.0], [4]), base).same_top == 1


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
    found = GreedyAgreement.between(ours, theirs)
    assert (found.texts, found.equal_texts) == (5, 1)
    assert (found.tokens, found.equal_tokens) == (14, 3 + 1 + 2 + 2)
    assert found.margins == [0.002, 5.0, 5.0, 5.0]
    assert found.count_clear(0.01) == 3
    assert found.count_clear(0.001) == 4


def test_the_beginning_that_two_texts_share() -> None:
    assert [count_equal(a, b) for a, b in (([], [1]), ([1, 2], [1, 2]), ([1, 2], [1, 3]), ([1], [1, 2]))] == [
        0,
        2,
        1,
        1,
    ]
