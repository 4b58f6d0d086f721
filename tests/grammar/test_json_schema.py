"""What llguidance cannot read of a schema is adapted, and what would be written otherwise is refused."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from server.grammar.json_schema import FORMATS, adapt_schema
from server.grammar.lark import write_lark
from server.text.errors import GrammarError
from tests.grammar.judge import GrammarJudge
from tests.grammar.random_schemas import make_schema

INT64 = 2**63


@pytest.fixture(scope="module")
def judge() -> GrammarJudge:
    return GrammarJudge()


def grammar_of(schema: Any) -> str:
    return write_lark("json_schema", json.dumps(adapt_schema(schema)))


def is_valid(schema: Any, value: Any) -> bool:
    try:
        Draft202012Validator(schema).validate(value)
    except ValidationError:
        return False
    return True


# ---------------------------------------------------------------- numbers
@pytest.mark.parametrize(
    ("schema", "accepted"),
    [
        ({"type": "integer", "minimum": -INT64, "maximum": INT64 - 1}, [-(10**18), 0, 10**18]),
        ({"type": "integer", "minimum": -INT64}, [-(10**18), 10**30]),
        ({"type": "integer", "exclusiveMinimum": -INT64, "exclusiveMaximum": INT64 - 1}, [-5, 10**18]),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, [0, 10**18]),
        ({"type": "integer", "minimum": 10**18}, [10**18, 9 * 10**18]),
        ({"type": "integer", "maximum": -(10**18)}, [-(10**18)]),
        ({"type": "number", "minimum": -INT64, "maximum": INT64 - 1}, [0.5, -3]),
        ({"type": "integer", "minimum": -(10**30), "maximum": 10**30}, [7]),
        ({"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1}, [2**53 - 1, -(2**53) + 1]),
        ({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": -INT64}]}, ["x", -1]),
        ({"type": "array", "items": {"enum": [2**53 + 2, 7]}}, [[2**53 + 2, 7]]),
        ({"const": -(2**62)}, [-(2**62)]),
        ({"const": [10**19, {"id": 10**22}]}, [[10**19, {"id": 10**22}]]),
        ({"$ref": "#/own/id", "own": {"id": {"type": "integer", "minimum": -INT64, "maximum": INT64 - 1}}}, [-5]),
    ],
)
def test_numbers_of_64_bits_are_accepted(judge: GrammarJudge, schema: Any, accepted: list[Any]) -> None:
    grammar = grammar_of(schema)
    for value in accepted:
        assert is_valid(schema, value)
        assert judge.accepts(grammar, json.dumps(value)), value


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 2**53 + 1},
        {"const": -INT64},
        {"const": int("9" * 30)},
        {"const": INT64},
        {"enum": ["x", {"id": [-(2**64)]}]},
        {"const": 10**400},
        {"enum": [7, 1234567890123456789]},
        {"const": {"id": [2**53 + 1]}},
        {"type": "object", "properties": {"id": {"anyOf": [{"type": "null"}, {"const": 2**60 + 1}]}}},
        {"$defs": {"id": {"const": 2**53 + 1}}, "$ref": "#/$defs/id"},
        {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1},
        {"type": "integer", "minimum": INT64},
        {"type": "number", "maximum": -1e30},
        {"$ref": "#/components/schemas/id", "components": {"schemas": {"id": {"const": 2**53 + 1}}}},
        {"anyOf": [{"$ref": "#/$defs/group/a~1b%25"}], "$defs": {"group": {"a/b%": {"const": 2**53 + 1}}}},
        {"$ref": "#/own/list/1", "own": {"list": [{}, {"$ref": "#/own/further"}], "further": {"const": 2**53 + 1}}},
        {"$ref": "ids#/own/id", "$defs": {"ids": {"$id": "ids", "own": {"id": {"const": 2**53 + 1}}}}},
        {"$ref": "ids", "$defs": {"ids": {"$id": "ids", "$ref": "#/own/id", "own": {"id": {"const": 2**53 + 1}}}}},
    ],
)
def test_numbers_that_would_be_written_as_others_are_refused(schema: Any) -> None:
    with pytest.raises(ValueError, match=r"make it a string|beyond 64 bits"):
        adapt_schema(schema)


def test_no_number_is_accepted_that_random_bounds_refuse(judge: GrammarJudge, rng: random.Random) -> None:
    for _ in range(100):
        schema: dict[str, Any] = {"type": rng.choice(["integer", "number"])}
        edges = [rng.choice([-1, 1]) * rng.choice([2**53, 2**62, INT64, 10**18, 9]) + rng.randint(-3, 3) for _ in "ab"]
        low, high = sorted(edges)
        schema |= {rng.choice(["minimum", "exclusiveMinimum"]): low} if rng.random() < 0.8 else {}
        schema |= {rng.choice(["maximum", "exclusiveMaximum"]): high} if rng.random() < 0.8 else {}
        try:
            grammar = grammar_of(schema)
            accepted = [
                value for edge in edges for value in range(edge - 3, edge + 4) if judge.accepts(grammar, str(value))
            ]
        except (ValueError, GrammarError):  # nothing, or nothing that can be written
            continue
        assert all(is_valid(schema, value) for value in accepted), schema


def test_a_whole_number_is_written_as_it_is_or_refused(judge: GrammarJudge, rng: random.Random) -> None:
    for _ in range(200):
        number = rng.choice([-1, 1]) * rng.choice([2 ** rng.randrange(50, 90), 10 ** rng.randrange(15, 30)])
        number += rng.choice([0, 0, 1, 1024, 2048])
        value = rng.choice([number, [number], {"id": number}])
        schema = rng.choice([{"const": value}, {"enum": ["x", value]}])
        try:
            grammar = grammar_of(schema)
        except ValueError:
            assert number != int(float(number)) or abs(number) >= INT64
            continue
        assert judge.accepts(grammar, json.dumps(value)), schema


def test_bounds_in_errors_are_those_of_the_schema() -> None:
    for bound, limit in ((2**64, "minimum"), (-1e300, "exclusiveMaximum")):
        with pytest.raises(ValueError, match=f"^properties.a: a bound of {bound} is beyond".replace("+", r"\+")):
            adapt_schema({"properties": {"a": {"type": "number", limit: bound}}})


# ---------------------------------------------------------------- references
@pytest.mark.parametrize("name", ["Page[int]", "a b", "größe", "a%", "a~1b~0", "x^{|}", 'q"<>'])
def test_references_may_be_written_without_escapes(judge: GrammarJudge, name: str) -> None:
    key = name.replace("~1", "/").replace("~0", "~")
    grammar = grammar_of({"$ref": f"#/$defs/{name}", "$defs": {key: {"const": 5}}})
    assert judge.accepts(grammar, "5")
    assert not judge.accepts(grammar, "6")


def test_what_references_point_at_is_a_schema() -> None:
    for schema, problem in (
        ({"$ref": "#/own/id", "own": {"id": None}}, r"^own\.id: should be a schema"),
        ({"anyOf": [{"const": {"format": "x"}}, {"$ref": "#/anyOf/0/const"}]}, "points into a value of const"),
    ):
        with pytest.raises(ValueError, match=problem):
            adapt_schema(schema)


def test_the_schema_of_a_client_is_not_changed() -> None:
    shared = {"type": "string", "format": "byte", "title": None}
    schema = {"anyOf": [shared, {"const": shared}, {"$ref": "#/own"}], "own": shared}
    before = json.dumps(schema)
    assert adapt_schema(schema)["anyOf"][:2] == [{"type": "string"}, {"const": shared}]
    assert json.dumps(schema) == before


# ---------------------------------------------------------------- other members
def test_null_instead_of_a_schema_is_named() -> None:
    for schema, place in (
        ({"properties": {"a": None}}, "properties.a"),
        ({"items": {"anyOf": [{}, None]}}, "items.anyOf.1"),
        ({"prefixItems": [7]}, "prefixItems.0"),
    ):
        with pytest.raises(
            ValueError, match=rf"^{place}: should be a schema \(an object, true or false\), not (null|7)$"
        ):
            adapt_schema(schema)


@pytest.mark.parametrize(
    "members",
    [
        {"propertyNames": {"type": "string", "title": "name"}},
        {"propertyNames": True},
        {"uniqueItems": False},
        {"contains": {"const": 1}, "minContains": 0},
        {"minContains": 3, "maxContains": 4},
        {"dependentRequired": {}, "dependentSchemas": {"a": True}, "dependencies": {"a": [], "b": {}}},
        {"unevaluatedProperties": True, "unevaluatedItems": {}},
        {"not": False},
        {"if": {"const": 1}, "then": {}, "else": True},
        {"then": False, "else": False},
    ],
)
def test_keywords_that_restrict_nothing_are_dropped(judge: GrammarJudge, members: Any) -> None:
    grammar = grammar_of(members)
    for value in ({}, {"a": 1}, [], [1, 1], [2], "x", 1):
        assert is_valid(members, value)
        assert judge.accepts(grammar, json.dumps(value)), value


@pytest.mark.parametrize(
    "members",
    [
        {"propertyNames": {"minLength": 1}},
        {"propertyNames": {"type": "integer"}},
        {"propertyNames": False},
        {"uniqueItems": True},
        {"contains": {}},
        {"contains": True, "minContains": 0, "maxContains": 1},
        {"dependentRequired": {"a": ["b"]}},
        {"not": {}},
        {"if": {"const": 1}, "then": False},
        {"unevaluatedItems": False},
    ],
)
def test_keywords_that_restrict_something_are_refused(judge: GrammarJudge, members: Any) -> None:
    with pytest.raises(GrammarError, match="keywords that are not supported"):
        judge.accepts(grammar_of(members), "1")


def test_lengths_may_be_written_as_2_0(judge: GrammarJudge) -> None:
    schema = {"anyOf": [{"type": "string", "maxLength": 2.0}, {"type": "array", "minItems": 2.0, "maxItems": 2.0}]}
    for value in ("ab", "abc", [1], [1, 2]):
        assert judge.accepts(grammar_of(schema), json.dumps(value)) == is_valid(schema, value)


def test_null_members_are_absent(judge: GrammarJudge) -> None:
    nothing = {"type": "object", "properties": {"a": {"const": None, "title": None}}, "required": None, "items": None}
    assert adapt_schema(nothing) == {"type": "object", "properties": {"a": {"const": None}}}
    assert judge.accepts(grammar_of(nothing | {"additionalProperties": False}), '{"a": null}')


def test_unknown_formats_are_annotations(judge: GrammarJudge) -> None:
    ignored: list[str] = []
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "iri"}, "format": {"type": "string"}}}
    adapted = adapt_schema(schema, ignored.append)
    assert adapted["properties"] == {"a": {"type": "string"}, "format": {"type": "string"}}
    assert ignored == ["format: iri"]
    assert judge.accepts(grammar_of(schema), '{"a": "x"}')


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_known_formats_stay(judge: GrammarJudge, name: str) -> None:
    schema = {"type": "string", "format": name}
    assert adapt_schema(schema) == schema
    judge.accepts(grammar_of(schema), "x")  # it compiles


def test_the_rest_of_a_schema_stays_as_it_is(rng: random.Random) -> None:
    for _ in range(100):
        schema = make_schema(rng)
        assert adapt_schema(schema) == schema


def test_floats_stay() -> None:
    for value in (0.1, 1e-300, 1e300, math.pi):
        assert adapt_schema({"enum": [value]}) == {"enum": [value]}
