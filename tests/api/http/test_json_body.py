"""JSON is decoded as msgspec decodes it; its values are counted before, and of fields without effect none is kept."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel, ValidationError

from server.api.http.json_body import (
    MAX_INTEGERS,
    MAX_MEMBERS,
    MAX_VALUES,
    FieldNotes,
    TooManyValues,
    count_values,
    decode,
)
from server.api.openai.chat import ChatRequest
from server.api.openai.completions import CompletionRequest
from server.api.openai.tokenize import DetokenizeRequest
from server.api.ops.admin import PinRequest

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
def test_values_are_counted_but_for_what_strings_quote(dice: random.Random, ascii_only: bool) -> None:
    for _ in range(300):
        data = json.dumps(something(dice), ensure_ascii=ascii_only).encode()
        assert count_values(data) in counts(data), data


@pytest.mark.parametrize("text", ["," * 10**6, '"' * 10**6, "\\" * 10**6, '\\",[' * 10**5, "\n" * 10**6])
def test_a_text_is_one_value_whatever_it_quotes(text: str) -> None:
    data = json.dumps({"messages": [{"content": text}]}).encode()
    assert count_values(data) < 10
    assert decode(data) == {"messages": [{"content": text}]}


@pytest.mark.parametrize("item", ['""', '"a"', "1.5", "1e5", "null", "{}", "[]", "[7]", '{"a":1}', '"[1]"', "-true"])
def test_many_values_are_refused_undecoded(item: str) -> None:
    for data in (f"[{f'{item},' * MAX_VALUES}1]", f'{{"a":[[{f"{item}," * MAX_VALUES}[]]]}}'):
        with pytest.raises(TooManyValues, match="at most 65536 values"):
            decode(data.encode())


def test_a_list_of_integers_is_one_value() -> None:
    for ids in ([7] * MAX_INTEGERS, [[7, 2**40, -1]] * (MAX_VALUES - 1)):
        assert count_values(json.dumps(ids, indent=1).encode()) <= MAX_VALUES
        assert decode(json.dumps(ids).encode()) == ids
    for ids in ([7] * (MAX_INTEGERS + 2), [[7, 2**40, -1]] * MAX_VALUES):
        with pytest.raises(TooManyValues):
            decode(json.dumps(ids).encode())


# ---------------------------------------------------------------- what is decoded
def test_as_msgspec_decodes_it(dice: random.Random) -> None:
    for padding in ("", PADDING):
        for _ in range(100):
            body = {name: something(dice) for name in dice.sample("abcdefg", dice.randrange(5))}
            data = (json.dumps(body)[:-1] + padding + "}").encode()
            assert decode(data) == msgspec.json.decode(data) == body


@pytest.mark.parametrize(
    "value",
    [b"nul", b"NaN", b"[1,]", b'"\xff"', b'{"\xff": 1}', b'"\\ud800"', b"01", b"1e", b'"\n"', b'{"a" 1}', b"[" * 10**4],
    ids=lambda value: repr(value[:20]),
)
def test_what_is_ignored_is_json_all_the_same(value: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError, RecursionError)):
        decode(b'{"a": ' + value + b"}")


def test_of_what_is_ignored_nothing_is_kept() -> None:
    body = {"model": "x", "messages": [{"role": "user", "content": "a"}], "metadata": {"a": "b" * 10**6}}
    notes = FieldNotes()
    assert ChatRequest.model_validate(body, context=notes).metadata is None
    assert [*notes.ignored] == ["metadata"]


@pytest.mark.parametrize("count", [MAX_MEMBERS, MAX_MEMBERS + 1])
def test_members(count: int) -> None:
    with pytest.raises(ValidationError) as raised:
        CompletionRequest.model_validate({f"a{i}": i for i in range(count)})
    assert ("at most 100 members" in str(raised.value)) == (count > MAX_MEMBERS)


# ---------------------------------------------------------------- ids
@pytest.mark.parametrize("ids", [[7] * MAX_VALUES * 2, [[7, 2**40, -1]] * (MAX_VALUES // 2)])
def test_ids_may_be_many(ids: list[Any]) -> None:
    nested = isinstance(ids[0], list)
    for model, field in ((CompletionRequest, "prompt"), (DetokenizeRequest, "tokens"), (PinRequest, "prompt")):
        body = decode(json.dumps({field: ids} | REQUIRED[model]).encode())
        if nested and model is not CompletionRequest:
            with pytest.raises(ValidationError):
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
    many = [7] * (MAX_VALUES - 100)
    for ids in ([*many, wrong], [many, [wrong]], [[], many]):
        with pytest.raises(ValidationError, match=r"should be a string, (or )?a list of token ids"):
            CompletionRequest.model_validate(decode(json.dumps({"model": "x", "prompt": ids}).encode()))
