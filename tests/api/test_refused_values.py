"""What is refused of a request is explained in plain words: every field of every body, header, query and path."""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

import server.api
from server.api.http.errors import make_body_error
from server.api.http.json_body import Body
from tests.api.conftest import ADMIN_TOKEN
from tests.api.fake_engine import FakeEngine
from tests.api.payloads import VALID_REQUEST, error_of
from tests.wordings import catch, draw_wrong_values, find_wordings


def iter_bodies(parent: type[Body] = Body) -> Iterator[type[Body]]:
    """Yield the models of all bodies, and of objects within them, that the package `server.api` has."""
    for module in pkgutil.walk_packages(server.api.__path__, "server.api."):
        importlib.import_module(module.name)
    for child in parent.__subclasses__():
        yield child
        yield from iter_bodies(child)


BODIES = sorted(set(iter_bodies()), key=lambda body: body.__name__)


def is_refused(body: type[Body], value: Any) -> bool:
    """Return whether a body is refused, and check that neither the error nor the log has pydantic's words then."""
    error = catch(ValidationError, body.model_validate, value)
    if error is not None:
        told = make_body_error(error, {})
        assert not find_wordings(f"{told.message}\n{told.log_message}"), (value, told.message)
    return error is not None


def test_there_are_bodies() -> None:
    names = {body.__name__ for body in BODIES}
    assert {"CompletionRequest", "ChatRequest", "PinRequest", "RolloutRequest", "GuardRequest"} <= names


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_any_value_of_any_field_is_refused_in_plain_words(body: type[Body], rng: random.Random) -> None:
    for name, field in [*body.model_fields.items(), ("nonsense", None)]:
        for value in draw_wrong_values(rng):
            is_refused(body, {(field and field.alias) or name: value})
    assert all(is_refused(body, value) for value in draw_wrong_values(rng) if not isinstance(value, dict))


def test_an_api_key_that_is_refused_is_not_repeated() -> None:
    body = next(each for each in BODIES if each.__name__ == "ClearRequest")
    with pytest.raises(ValidationError) as refused:
        body.model_validate({"api_key": " my-secret"})
    assert "my-secret" not in make_body_error(refused.value, {}).message


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/v1/models?strategies=perhaps", 'strategies: should be true or false, not "perhaps"'),
        ("/v1/live/blocks/paged/0/first", 'block: should be a whole number, not "first"'),
        ("/v1/live/blocks/paged/-1/0", "region: should be 0 or more, not"),
    ],
)
def test_what_an_address_says_is_refused_in_plain_words(
    engine: FakeEngine, http: httpx.Client, path: str, message: str
) -> None:
    told = error_of(http.get(path, headers={"Authorization": f"Bearer {ADMIN_TOKEN}"}))["message"]
    assert message in told
    assert not find_wordings(told)


def test_a_header_is_refused_in_plain_words(engine: FakeEngine, http: httpx.Client) -> None:
    response = http.post("/v1/completions", json=VALID_REQUEST, headers={"X-KV-Cache": "x" * 200})
    assert error_of(response)["message"] == "x-kv-cache: should have 128 or fewer characters, not 200"
