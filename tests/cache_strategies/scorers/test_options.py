"""Tests of the scorers' options and of the layers that they refuse."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from cache_strategies.scorers import BUILTIN, list_scorers, load_scorer
from config.errors import SettingsError
from plugin_kit.scorers.texts import layer_specs
from tests.cache_strategies.scorers.test_formulas import make_scorer


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("snapkv", {"window": 0}, "greater than or equal to 1"),
        ("snapkv", {"kernel_size": 4}, "must be an odd number, such as 5"),
        ("r_kv", {"kernel_size": 2}, "must be an odd number, such as 3"),
        ("r_kv", {"mix_lambda": 1.5}, "less than or equal to 1"),
        ("r_kv", {"threshold": 2}, "less than or equal to 1"),
        ("lagkv", {"lag_size": 1}, "greater than or equal to 2"),
        ("lagkv", {"sinks": -1}, "greater than or equal to 0"),
        ("expected_attention", {"num_future_positions": 0}, "greater than or equal to 1"),
        ("expected_attention", {"epsilon": -0.1}, "greater than or equal to 0"),
        ("random", {"seed": -1}, "greater than or equal to 0"),
        ("h2o", {"window": 3}, "Extra inputs are not permitted"),
        ("keydiff", {"seed": 3}, "Extra inputs are not permitted"),
    ],
    ids=str,
)
def test_bad_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        load_scorer(name).options_type(**options)


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_every_option_has_a_description(name: str) -> None:
    assert all(field.description for field in load_scorer(name).options_type.model_fields.values())


def test_all_built_in_scorers_are_listed() -> None:
    assert list_scorers() | dict(BUILTIN) == list_scorers()
    with pytest.raises(SettingsError, match="there is no scorer of keys 'h3o'; scorers are expected_attention, h2o"):
        load_scorer("h3o")


def test_the_queries_that_a_scorer_looks_at_follow_its_options() -> None:
    numbers = {name: make_scorer(name).num_queries for name in BUILTIN}
    assert numbers == dict.fromkeys(BUILTIN, 0) | {
        "expected_attention": None,
        "h2o": None,
        "r_kv": 8,
        "snapkv": 8,
        "tova": 1,
    }
    assert make_scorer("snapkv", {"window": 32}).num_queries == 32


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_only_expected_attention_refuses_layers_that_cannot_rotate(name: str) -> None:
    layers = [spec._replace(rotate=None) for spec in layer_specs().values()]
    scorer = make_scorer(name)
    scorer.check_layers(list(layer_specs().values()))
    if name != "expected_attention":
        return scorer.check_layers(layers)
    with pytest.raises(SettingsError, match="use the scorer 'keydiff' or 'snapkv' instead"):
        scorer.check_layers(layers)
    return None
