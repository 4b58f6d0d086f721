"""What is refused is explained in plain words: every setting, and every entry of a settings file's tables."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from config.errors import SettingsError
from config.rollouts import GuardSettings, RolloutSettings, parse_rollout
from config.settings import SECRETS, KeyLimits, SelectionRule, Settings, StrategySettings, load_settings
from config.wording import explain_problem
from tests.wordings import WORDINGS, catch, draw_wrong_values, find_wordings, make_errors

ROLLOUT = {"from": "paged", "to": "contiguous"}


def place(table: type[BaseModel], key: str, value: Any) -> dict[str, Any]:
    """Return settings with a value at a key of a table."""
    entry = {key: value}
    if table is StrategySettings:
        return {"strategies": {"mine": {"kind": "paged"} | entry}}
    if table is KeyLimits:
        return {"api_keys": ["some-long-key"], "key_limits": {"some-long-key": entry}}
    if table is SelectionRule:
        return {"rules": [{"use": "paged"} | entry]}
    if table is RolloutSettings:
        return {"rollouts": {"mine": ROLLOUT | entry}}
    if table is GuardSettings:
        return {"rollouts": {"mine": ROLLOUT | {"guard": entry}}}
    return entry


def iter_places() -> Iterator[tuple[type[BaseModel], str]]:
    for table in (Settings, StrategySettings, KeyLimits, SelectionRule, RolloutSettings, GuardSettings):
        for name, field in table.model_fields.items():
            yield table, field.alias or name
        yield table, "nonsense"


def test_wordings_are_those_of_pydantic() -> None:
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(dict[int, list[float]]).validate_python({"a": 1, 2: ["x"]})
    assert all(find_wordings(problem["msg"]) for problem in refused.value.errors())
    assert {"field required", "extra inputs are not permitted", "input should be"} <= WORDINGS


def test_every_error_of_pydantic_has_a_message_of_our_own() -> None:
    for kind, error in make_errors().items():
        problem = {"type": kind, "input": [1], "ctx": error.context or {}}
        message = explain_problem("field", problem)
        assert message.startswith("field")
        assert not find_wordings(message), (kind, message)


@pytest.mark.parametrize(("table", "key"), list(iter_places()), ids=str)
def test_any_value_of_any_setting_is_refused_plainly(table: type[BaseModel], key: str, rng: random.Random) -> None:
    refused = 0
    for value in (object(), *rng.sample(draw_wrong_values(rng), 8)):
        error = catch(SettingsError, load_settings, None, place(table, key, value), are_flags=False)
        assert not find_wordings(str(error)), (value, str(error))
        refused += error is not None
    assert refused or table is StrategySettings, "no value was wrong"  # which options there are, the kind knows


@pytest.mark.parametrize("key", [*RolloutSettings.model_fields, "nonsense"])
def test_any_value_of_a_roll_out_that_an_operator_starts(key: str, rng: random.Random) -> None:
    errors = [catch(ValueError, parse_rollout, ROLLOUT | {key.rstrip("_"): value}) for value in draw_wrong_values(rng)]
    assert any(errors)
    assert not [str(error) for error in errors if find_wordings(str(error))]


def test_secrets() -> None:
    assert {"api_keys", "key_limits", "admin_token", "metrics_key", "otlp_traces_endpoint"} == SECRETS
    assert "my-secret" not in repr(Settings(admin_token="my-secret"))


@pytest.mark.parametrize("name", sorted(SECRETS))
def test_no_error_shows_a_secret(name: str) -> None:
    secret = "my secret\x00word"
    values: list[Any] = [secret, [secret], {secret: 1}, [[secret]], {"a": secret}, secret[:9]]
    errors = [catch(SettingsError, load_settings, None, {name: value}) for value in values]
    assert any(errors)
    assert not [str(error) for error in errors if "secret" in str(error)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"port": "web"}, 'port: should be a whole number, not "web"'),
        ({"port": 70000}, "port: should be 65,535 or less, not 70000"),
        ({"log_prompts": "perhaps"}, 'log_prompts: should be true or false, not "perhaps"'),
        (
            {"queue_timeout": "soon"},
            "queue_timeout: 'soon' is not a duration: write a number of seconds, or a text such",
        ),
        ({"queue_timeout": "30d"}, 'queue_timeout: should be 604,800 or less, not "30d"'),
        ({"max_header_bytes": "1 apple"}, "max_header_bytes: '1 apple' is not an amount of memory: write a number of"),
        ({"kv_memory_share": "much"}, "kv_memory_share: 'much' is not a share: write a percentage such as '25%'"),
        ({"kv_memory_share": "150%"}, "kv_memory_share: should be below 1, not 1.5"),
        ({"kv_overcommit": []}, "kv_overcommit: should be a number, not a list"),
        ({"model": Path("m.gguf")}, "model: should be a text, not an object of the type PosixPath"),
        ({"rules": {"use": "paged"}}, 'rules: should be a list, not {"use": "paged"}'),
        ({"rules": [{}]}, "rules.0.use is required"),
        ({"admin_token": "short"}, "admin_token: should have 8 or more characters"),
    ],
)
def test_a_message_says_what_to_write(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings(None, given, are_flags=False)
    assert str(refused.value).startswith(message)


def test_a_share_of_a_rollout_may_be_a_number() -> None:
    rollout = parse_rollout(ROLLOUT | {"shadow": 0.05})
    assert rollout.shadow == "5%"
    with pytest.raises(ValueError, match="'5' is not a percentage such as '10%'"):
        parse_rollout(ROLLOUT | {"shadow": 5})
