"""Tests of what expected_attention adds to its formula: statistics over many boundaries, and tables that are short."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cache_strategies.scorers.expected_attention import _average_rotations
from plugin_kit.scorers.texts import D, ScoredText, rotate
from tests.cache_strategies.scorers.generators import new_generator
from tests.cache_strategies.scorers.test_formulas import LAYERS, make_scorer


@pytest.mark.parametrize("num_positions", [1, 5, 31, 32, 33, 100, 512])
def test_the_mean_of_many_rotations_is_made_of_few(num_positions: int) -> None:
    largest = 0

    def rotate_by_few(x: Tensor, delta: Tensor) -> Tensor:
        nonlocal largest
        largest = max(largest, int(delta.max()))
        return rotate(x, delta)

    mean = _average_rotations(rotate_by_few, num_positions, D, torch.device("cpu"))
    basis = torch.eye(D, dtype=torch.float64).expand(num_positions, D, D)
    wanted = rotate(basis, torch.arange(1, num_positions + 1)).mean(0)
    torch.testing.assert_close(mean.double(), wanted, rtol=0, atol=2e-6)
    assert largest == min(num_positions, 32)


def test_statistics_of_many_boundaries_are_those_of_all_queries() -> None:
    scorer = make_scorer("expected_attention", {"sinks": 3})
    text = ScoredText(LAYERS["plain"], new_generator(), 2000)
    offset = 30 * torch.ones(2000, 6, D)  # a mean that is much larger than the deviations from it
    text.queries = rotate(text.queries + offset, torch.arange(2000))
    for _ in range(200):
        past = text.read(10, scorer)
        scorer.score(past)
        text.drop(past, 10, same_in_all_heads=False)
    queries = rotate(text.queries.double(), -torch.arange(2000))[3:]
    torch.testing.assert_close(past.state["mean"].double(), queries.mean(0), rtol=1e-5, atol=1e-5)
    for head in range(6):
        wanted = torch.cov(queries[:, head].T, correction=0)
        torch.testing.assert_close(past.state["covariance"][head].double(), wanted, rtol=1e-3, atol=1e-4)
    assert past.state["num_queries"].item() == 1997


def test_a_boundary_among_the_sinks_has_no_statistics_yet() -> None:
    scorer = make_scorer("expected_attention", {"sinks": 10})
    text = ScoredText(LAYERS["plain"], new_generator(), 30)
    assert scorer.score(text.read(6, scorer)).isinf().all()
    past = text.past(6, scorer)
    scorer.score(past)
    text.state = past.state
    assert not scorer.score(text.read(14, scorer)).isnan().any()
