"""Tests of what a scorer sees of a layer (`Past`)."""

from __future__ import annotations

import pytest
import torch

from plugin_kit.scorers.texts import ScoredText, rotate
from tests.cache_strategies.scorers.generators import new_generator
from tests.cache_strategies.scorers.test_formulas import LAYERS, make_scorer


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
    for layer, spec in LAYERS.items():
        past = ScoredText(spec, new_generator(), 30).read(30, scorer)
        expected = torch.ones(())
        if past.sink_logits is not None:
            expected = torch.sigmoid(past.attention_scores().logsumexp(-1) - past.sink_logits[:, :, None])
        total = past.attention_weights().sum(-1)
        torch.testing.assert_close(total, expected.expand_as(total), msg=layer)


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
