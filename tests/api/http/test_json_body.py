"""JSON is decoded as msgspec decodes it; much is counted before, and what has no effect is skipped."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel, ValidationError

from server.api.http import json_body
from server.api.http.json_body import (
    MAX_MEMBERS,
    MAX_VALUES,
    ReadAs,
    TooManyValues,
    count_values,
    decode,
    get_read_modes,
)
from server.api.openai.chat import ChatRequest
from server.api.openai.completions import CompletionRequest
from server.api.openai.tokenize import DetokenizeRequest
from server.api.ops.admin import PinRequest

VALUE, IGNORED, IDS = ReadAs.VALUE, ReadAs.IGNORED, ReadAs.TOKEN_IDS
PADDING = " " * MAX_VALUES  # makes a body one in which values are counted


@pytest.fixture
def dice() -> random.Random:
    seed = int.from_bytes(os.urandom(4), "big")
    print("seed", seed)
    return random.Random(seed)


def something(dice: random.Random, depth: int = 4) -> Any:
    """A random value, with what is hard to count in its strings."""
    match dice.randrange(8 if depth else 5):
        case 0:
            return dice.choice([None, True, False])
        case 1:
            return dice.choice([0, -1, 5, 2**40, 1.5, -0.0, 1e300])
        case 2 | 3 | 4:
            return "".join(dice.choices('ab,[{}]:"\\/\n\t\u00e9\u4e2d\U0001f600', k=dice.randrange(9)))
        case 5 | 6:
            return [something(dice, depth - 1) for _ in range(dice.randrange(5))]
    return {something(dice, 0).__repr__(): something(dice, depth - 1) for _ in range(dice.randrange(5))}


def values_in(value: Any) -> int:
    """Counted one by one."""
    match value:
        case dict():
            return 1 + sum(map(values_in, value.values()))
        case list():
            return 1 + sum(map(values_in, value))
    return 1


def counts(data: bytes) -> range:
    """An empty array or object counts as if there were a value in it."""
    value = json.loads(data)
    most = values_in(value) + data.count(b"[]") + data.count(b"{}") + data.count(b"[ ]") + data.count(b"{ }")
    return range(values_in(value), most + 1)


# ---------------------------------------------------------------- counting
@pytest.mark.parametrize("ascii_only", [True, False])
def test_values_are_counted_but_for_what_strings_quote(
    dice: random.Random, monkeypatch: pytest.MonkeyPatch, ascii_only: bool
) -> None:
    """Also where a slice ends within a string, or within an escape."""
    for _ in range(300):
        monkeypatch.setattr(json_body, "SLICE", dice.randrange(1, 9))
        data = json.dumps(something(dice), ensure_ascii=ascii_only).encode()
        assert count_values(data) in counts(data), data


@pytest.mark.parametrize("text", ["," * 10**6, '"' * 10**6, "\\" * 10**6, '\\",[' * 10**5, "\n" * 10**6])
def test_a_text_is_one_value_whatever_it_quotes(text: str) -> None:
    data = json.dumps({"messages": [{"content": text}]}).encode()
    assert count_values(data) < 10
    assert decode(data, {"messages": VALUE}) == {"messages": [{"content": text}]}


def test_counting_ends_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work by what is allowed, not by what was sent."""
    looked_at = []
    count = json_body._count_separators
    monkeypatch.setattr(json_body, "_count_separators", lambda data: looked_at.append(len(data)) or count(data))
    data = b"[" + b"[]," * 10**6 + b"[]]"
    assert count_values(data) > MAX_VALUES
    assert sum(looked_at) < 4 * MAX_VALUES


# ---------------------------------------------------------------- what is decoded
def test_as_msgspec_decodes_it(dice: random.Random) -> None:
    for padding in ("", PADDING):
        for _ in range(100):
            body = {name: something(dice) for name in dice.sample("abcdefg", dice.randrange(5))}
            data = (json.dumps(body)[:-1] + padding + "}").encode()
            assert decode(data, dict.fromkeys("abcdefg", VALUE)) == msgspec.json.decode(data) == body


@pytest.mark.parametrize(
    ("value", "empty"),
    [('"x"', ""), ("[1]", []), ('{"a": 1}', {}), ("true", False), ("-1.5", 0), ("1e999", 0), ("null", None)],
)
def test_of_what_is_ignored_the_outermost_type_is_kept(value: str, empty: object) -> None:
    result = decode(f'{{"a": {value}, "unknown": {value}}}'.encode(), {"a": IGNORED})
    assert result == {"a": empty, "unknown": empty}
    assert [type(each) for each in result.values()] == [type(empty)] * 2
    if not value.startswith("{"):
        assert decode(value.encode(), {}) == empty


@pytest.mark.parametrize(
    "value",
    [b"nul", b"NaN", b"[1,]", b'"\xff"', b'{"\xff": 1}', b'"\\ud800"', b"01", b"1e", b'"\n"', b'{"a" 1}', b"[" * 10**6],
    ids=lambda value: repr(value[:20]),
)
def test_what_is_ignored_is_json_all_the_same(value: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError, RecursionError)):
        decode(b'{"a": ' + value + b"}", {"a": IGNORED})


@pytest.mark.parametrize("count", [MAX_MEMBERS, MAX_MEMBERS + 1])
@pytest.mark.parametrize("name", ["a", "a{}"])
def test_members(count: int, name: str) -> None:
    data = "{" + ", ".join(f'"{name.format(i)}": {i}' for i in range(count)) + "}"
    if count > MAX_MEMBERS:
        with pytest.raises(TooManyValues, match="at most 100 members"):
            decode(data.encode(), {})
    else:
        assert len(decode(data.encode(), {})) in (1, count)


def test_the_values_of_all_fields_are_counted_together() -> None:
    half = [0] * (MAX_VALUES // 2 - 1)
    fields = {"a": VALUE, "b": VALUE, "c": IGNORED}
    data = json.dumps({"a": half, "b": half, "c": half}).encode()
    assert decode(data, fields) == {"a": half, "b": half, "c": []}
    with pytest.raises(TooManyValues) as raised:
        decode(json.dumps({"a": half, "b": [*half, 0, 0, 0]}).encode(), fields)
    assert raised.value.field == "b"


# ---------------------------------------------------------------- ids
@pytest.mark.parametrize("ids", [[7] * MAX_VALUES * 2, [[7, 2**40, -1]] * (MAX_VALUES - 1)])
def test_ids_may_be_many(ids: list[Any]) -> None:
    data = json.dumps({"prompt": ids, "ttl": 1, "model": "x", "tokens": ids}).encode()
    assert decode(data, {"prompt": IDS})["prompt"].ids == ids
    nested = isinstance(ids[0], list)
    del ids[: len(ids) // 4]
    for model, field in ((CompletionRequest, "prompt"), (DetokenizeRequest, "tokens"), (PinRequest, "prompt")):
        body = decode(json.dumps({field: ids} | REQUIRED[model]).encode(), get_read_modes(model))
        if nested and model is not CompletionRequest:
            with pytest.raises(ValidationError, match="one list of token ids"):
                model.model_validate(body)
        else:
            got = getattr(model.model_validate(body), field)
            assert got == ([ids] if model is CompletionRequest and not nested else ids)


REQUIRED: dict[type[BaseModel], dict[str, Any]] = {
    CompletionRequest: {"model": "x"},
    DetokenizeRequest: {},
    PinRequest: {"ttl": 1},
}


@pytest.mark.parametrize("wrong", [1.5, True, None, "x", [1], {}])
def test_ids_that_are_none(wrong: object) -> None:
    """As where they are few."""
    many = [7] * (MAX_VALUES - 100)
    for ids in ([*many, wrong], [many, [wrong]], [[], many]):
        data = json.dumps({"model": "x", "prompt": ids}).encode() + PADDING.encode()
        with pytest.raises(ValidationError) as raised:
            CompletionRequest.model_validate(decode(data, get_read_modes(CompletionRequest)))
        with pytest.raises(ValidationError) as plainly:
            CompletionRequest.model_validate(json.loads(data))
        assert problems(raised.value) == problems(plainly.value)
    with pytest.raises(TooManyValues):
        decode(json.dumps({"prompt": [*many, *many, wrong]}).encode(), {"prompt": IDS})


# ---------------------------------------------------------------- the same requests are taken as by plain decoding
def problems(error: ValidationError) -> list[tuple[Any, ...]]:
    return [(problem["loc"], problem["type"], problem["msg"]) for problem in error.errors()]


def outcome(model: type[BaseModel], body: Any) -> Any:
    """The request, without what has no effect, or what is wrong with it."""
    ignored = {name for name, field in get_read_modes(model).items() if field is IGNORED}
    try:
        return model.model_validate(body).model_dump(exclude=ignored)
    except ValidationError as error:
        return problems(error)


GOOD = {
    CompletionRequest: {"model": "x", "prompt": [1, 2], "stop": ["a"], "logit_bias": {"5": 1}, "n": 2, "user": "me"},
    ChatRequest: {
        "model": "x",
        "messages": [{"role": "user", "content": [{"type": "text", "text": 'a,"'}]}, {"role": "assistant"}],
        "chat_template_kwargs": {"a": [{}]},
        "metadata": {"a": "b"},
        "stream": True,
        "stream_options": {"include_usage": True},
    },
}


@pytest.mark.parametrize("model", GOOD, ids=lambda model: model.__name__)
def test_bodies_are_taken_and_refused_as_by_plain_decoding(dice: random.Random, model: type[BaseModel]) -> None:
    fields = get_read_modes(model)
    taken = 0
    for _ in range(1000):
        body = {name: value for name, value in GOOD[model].items() if dice.random() > 0.03}
        for _ in range(dice.randrange(3)):
            body[dice.choice([*fields, "other"])] = something(dice)
        padding = dice.choice(["", PADDING])
        data = (json.dumps(body, ensure_ascii=dice.random() < 0.5)[:-1] + padding + "}").encode()
        got = outcome(model, decode(data, fields))
        assert got == outcome(model, msgspec.json.decode(data)), data[:1000]
        taken += isinstance(got, dict)
    assert taken > 100
