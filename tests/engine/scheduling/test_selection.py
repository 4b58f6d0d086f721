"""Tests of a request's instance and its reason: the one that it names, rules or default, in this order."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from config.settings import SelectionRule
from server.engine.ipc.messages import SamplingParams, Submit
from server.engine.scheduling.request import RequestError
from server.engine.scheduling.selection import Selector, matches

NAMES = ("body", "head", "alias", "long", "urgent", "rest", "unused")
LONG = SelectionRule(use="long", min_prompt_tokens=100)
URGENT = SelectionRule(use="urgent", max_priority=-1)


def submit(prompt_tokens: int = 10, **options: Any) -> Submit:
    return Submit("r", [5] * prompt_tokens, SamplingParams(1), **options)


def choose(message: Submit, *rules: SelectionRule, kv_usage: float = 0.0) -> tuple[str, str]:
    return Selector(NAMES, rules, "rest").choose_before_rollouts(message, kv_usage)[:2]


ORDER: tuple[tuple[dict[str, Any], tuple[str, str]], ...] = (  # what is asked for, and what comes of it
    ({"kv_cache": "alias", "named_by": "model"}, ("alias", "model")),
    ({"priority": -1}, ("urgent", "rule 1")),
    ({}, ("rest", "default")),
)


def test_the_first_in_the_documented_order_wins() -> None:
    for present in product([False, True], repeat=len(ORDER) - 1):
        asked = [case for case, there in zip(ORDER, (*present, True), strict=True) if there]
        options = {name: value for given, _ in asked for name, value in given.items()}
        assert choose(submit(**options), LONG, URGENT) == asked[0][1], options


def test_the_first_rule_that_matches_wins() -> None:
    message = submit(200, priority=-5)
    assert choose(message, LONG, URGENT) == ("long", "rule 0")
    assert choose(message, URGENT, LONG) == ("urgent", "rule 0")
    assert choose(submit(99), LONG, URGENT) == ("rest", "default")
    assert choose(submit(), SelectionRule(use="unused")) == ("unused", "rule 0"), "no condition: always"


CONDITIONS = [  # condition, a request that just meets it, and one that just does not: prompt, priority, usage
    ({"min_prompt_tokens": 5}, (5, 0, 0.0), (4, 0, 0.0)),
    ({"max_prompt_tokens": 5}, (5, 0, 0.0), (6, 0, 0.0)),
    ({"min_priority": 3}, (1, 3, 0.0), (1, 2, 0.0)),
    ({"max_priority": -3}, (1, -3, 0.0), (1, -2, 0.0)),
    ({"kv_usage_above": 0.5}, (1, 0, 0.51), (1, 0, 0.5)),
    ({"min_prompt_tokens": 0, "max_prompt_tokens": 0}, (0, 0, 0.0), (1, 0, 0.0)),
    ({"min_priority": 0, "max_priority": 0}, (1, 0, 0.0), (1, -1, 0.0)),
    ({"kv_usage_above": 0.0}, (1, 0, 0.001), (1, 0, 0.0)),
]


@pytest.mark.parametrize(("conditions", "met", "missed"), CONDITIONS, ids=lambda value: str(value))
def test_every_condition_has_its_edge_where_the_settings_say(
    conditions: dict[str, Any], met: tuple[int, int, float], missed: tuple[int, int, float]
) -> None:
    rule = SelectionRule(use="long", **conditions)
    assert matches(rule, *met)
    assert not matches(rule, *missed)


def test_all_conditions_of_a_rule_must_hold() -> None:
    rule = SelectionRule(
        use="long", min_prompt_tokens=5, max_prompt_tokens=9, min_priority=1, max_priority=2, kv_usage_above=0.3
    )
    good = (7, 1, 0.4)
    assert matches(rule, *good)
    for place, bad in ((0, 4), (0, 10), (1, 0), (1, 3), (2, 0.3)):
        prompt, priority, usage = (bad if i == place else value for i, value in enumerate(good))
        assert not matches(rule, int(prompt), int(priority), usage)


@pytest.mark.parametrize(
    ("options", "where", "param"),
    [
        ({"kv_cache": "nope"}, "kv_cache", "kv_cache"),
        ({"kv_cache": "nope", "named_by": "header"}, "header X-KV-Cache", None),
        ({"kv_cache": "nope", "named_by": "model"}, "model", "model"),
        ({"kv_cache": ""}, "kv_cache", "kv_cache"),
    ],
)
def test_an_unknown_name_is_refused_with_the_names_there_are(
    options: dict[str, Any], where: str, param: str | None
) -> None:
    with pytest.raises(RequestError) as caught:
        choose(submit(**options))
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "unknown_kv_cache", param)
    name = options["kv_cache"]
    listed = "alias, body, head, long, rest, unused, urgent"
    assert error.message == f"{where}: there is no cache strategy {name!r}; there are {listed}"
