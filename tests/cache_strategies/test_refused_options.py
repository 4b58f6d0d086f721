"""Options of strategies and of scorers: units are taken, and what is refused is explained in plain words."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cache_strategies.compressed.options import CompressedOptions, make_scorer
from cache_strategies.registry import BUILTIN, load_kind, resolve_instances
from cache_strategies.scorers import list_scorers, load_scorer
from config.errors import SettingsError
from config.settings import StrategySettings
from tests.wordings import catch, draw_wrong_values, find_wordings


def resolve(kind: str, **options: Any) -> Any:
    """Return the options of an instance that the settings declare."""
    return resolve_instances({"mine": StrategySettings.model_validate({"kind": kind, **options})})[0].options


@pytest.mark.parametrize("kind", BUILTIN)
def test_any_value_of_any_option_of_a_strategy(kind: str, rng: random.Random) -> None:
    for option in [*load_kind(kind).options_type.model_fields, "nonsense"]:
        for value in draw_wrong_values(rng):
            error = catch(SettingsError, resolve, kind, **{option: value})
            assert error is None or str(error).startswith("strategies.mine")
            assert not find_wordings(str(error)), (option, value, str(error))


@pytest.mark.parametrize("scorer", sorted(list_scorers()))
def test_any_value_of_any_option_of_a_scorer(scorer: str, rng: random.Random) -> None:
    for option in [*load_scorer(scorer).options_type.model_fields, "nonsense"]:
        for value in draw_wrong_values(rng):
            options = CompressedOptions(scorer=scorer, scorer_options={option: value})
            error = catch(SettingsError, make_scorer, "mine", options, [])
            assert not find_wordings(str(error)), (option, value, str(error))


@pytest.mark.parametrize(
    ("kind", "option", "given", "value"),
    [
        ("compressed", "budget", "25%", 0.25),
        ("compressed", "budget", "0.25", 0.25),
        ("compressed", "budget", 0.25, 0.25),
        ("compressed", "budget", "128", 128),
        ("compressed", "budget", 128, 128),
        ("quest", "budget", "12.5%", 0.125),
        ("paged", "ttl", "10m", 600.0),
        ("paged", "ttl", 600, 600.0),
        ("contiguous", "ttl", "1h30m", 5400.0),
    ],
)
def test_shares_and_durations(kind: str, option: str, given: Any, value: float) -> None:
    read = getattr(resolve(kind, **{option: given}), option)
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize("budget", ["0%", "100%", "150%", "-5%", "much", "0", "", "1.5", "nan", True, None, []])
def test_budgets_that_are_neither_a_share_nor_a_number_of_tokens(budget: Any) -> None:
    with pytest.raises(SettingsError, match=r"^strategies\.mine\.budget: (a share must|a number of tokens|should be)"):
        resolve("compressed", budget=budget)
