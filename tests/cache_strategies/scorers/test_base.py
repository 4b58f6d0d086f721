"""Tests of what a scorer sees of a layer (`Past`)."""

from __future__ import annotations

import pytest
import torch

from tests.cache_strategies.scorers.test_formulas import LAYERS, make_scorer
from tests.cache_strategies.scorers.texts import ScoredText, new_generator, rotate


@pytest.mark.parametrize("layer", LAYERS)
def test_the_weights_of_some_queries_are_those_among_all(layer: str) -> None:
    scorer, text = make_scorer("h2o"), ScoredText(LAYERS[layer], new_generator(), 40)
    past = text.read(40, scorer)
    weights = past.attention_weights()
    assert weights.shape == (text.spec.num_kv_heads, past.num_groups, 40, 40)
    parts = [past.attention_weights(start, start + 7) for start in range(0, 40, 7)]
    torch.testing.assert_close(torch.cat(parts, dim=2), weights)
    torch.testing.assert_close(past.attention_weights(39), weights[:, :, 39:])


def test_weights_add_up_to_one_but_for_learned_sinks() -> None:
    scorer = make_scorer("h2o")
    for spec in LAYERS.values():
        plain = spec._replace(sink_logits=None)
        total = ScoredText(plain, new_generator(), 30).read(30, scorer).attention_weights().sum(-1)
        torch.testing.assert_close(total, torch.ones_like(total))
        sinks = spec._replace(sink_logits=torch.full((spec.num_q_heads,), 30.0))  # a score that no key has
        assert (ScoredText(sinks, new_generator(), 30).read(30, scorer).attention_weights().sum(-1) < 0.5).all()


def test_queries_are_unrotated_as_the_model_rotated_them() -> None:
    scorer, text = make_scorer("h2o"), ScoredText(LAYERS["plain"], new_generator(), 20)
    past = text.read(20, scorer)
    plain = past.unrotate(past.queries, past.query_positions)
    torch.testing.assert_close(rotate(plain, torch.arange(20)), past.queries)


def test_the_latest_keys_are_those_of_the_latest_tokens_even_if_some_were_dropped() -> None:
    scorer, text = make_scorer("keydiff"), ScoredText(LAYERS["plain"], new_generator(), 30)
    text.drop(text.read(25, scorer), 15, same_in_all_heads=False)
    past = text.read(5, scorer)
    for head, positions in enumerate(past.positions.tolist()):
        assert past.is_latest(9)[head].tolist() == [p >= 21 for p in positions]
