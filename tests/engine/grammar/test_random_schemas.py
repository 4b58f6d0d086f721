"""A model with random weights, which would write nonsense, writes JSON that `jsonschema` accepts by random schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from server.grammar.constraint import BOUNDED_WHITESPACE, constrain_to_schema
from server.text.vocabulary import Vocabulary
from tests.engine.engine_driver import Driver
from tests.engine.grammar.constrained import Case, read, submit
from tests.grammar.random_schemas import find_longest, make_schema

TOGETHER = 16  # requests in a batch
MAX_TOKENS = 480
SETTINGS: dict[str, Any] = {"max_seq_len": 512, "max_num_seqs": TOGETHER, "kv_memory": "96MiB", "kv_overcommit": 9}
UNBOUNDED: list[Any] = [
    {"type": "object"},
    {"type": "array"},
    {"type": "string"},
    {"type": "number", "minimum": -2, "exclusiveMaximum": 7.5},
    {"type": "integer", "multipleOf": 7},
    {"type": "array", "items": {"type": "number"}, "minItems": 2},
    {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1},
    {"type": "object", "patternProperties": {"^s_": {"type": "string"}}, "additionalProperties": False},
    {
        "$defs": {
            "n": {
                "type": "object",
                "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/n"}},
                "required": ["v"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/n",
    },
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "email"},
    {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"b": {"type": "null"}}, "required": ["b"]},
        ]
    },
]


@pytest.fixture(scope="module")
def driver(model: Path) -> Driver:
    return Driver(model, **SETTINGS)


def accepts(schema: Mapping[str, Any], text: str) -> bool:
    """Return whether a text is valid, with formats; the 29th of February, which the grammar has in all years, is."""
    text = text.replace("-02-29", "-02-28")
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    return bool(validator.is_valid(json.loads(text)))


def write_all(driver: Driver, schemas: list[Any], whitespace: str | None, rng: random.Random, **options: Any) -> Any:
    """Yield each schema with the events of a request for it; TOGETHER requests run at a time."""
    for first in range(0, len(schemas), TOGETHER):
        heard = []
        for schema in schemas[first : first + TOGETHER]:
            case = Case(constrain_to_schema(schema, "", whitespace=whitespace), lambda _: True)
            name = f"{len(driver.heard)}"
            heard.append((schema, submit(driver, name, case, rng.randrange(2**20), temperature=1.0, **options)))
        driver.run(at_most=20_000)
        yield from heard


def check_bounded(driver: Driver, vocabulary: Vocabulary, rng: random.Random, count: int) -> None:
    schemas = []
    while len(schemas) < count:
        if find_longest(schema := make_schema(rng)) <= MAX_TOKENS:
            schemas.append(schema)
    texts = set()
    for schema, heard in write_all(driver, schemas, None, rng, max_tokens=MAX_TOKENS):
        assert heard.failed is None, (schema, heard.failed)
        assert heard.finish_reason == "stop", (schema, len(heard.tokens))
        text = read(vocabulary, heard)
        assert accepts(schema, text), (schema, text)
        texts.add(text)
    assert len(texts) > count // 3


def check_unbounded(driver: Driver, vocabulary: Vocabulary, rng: random.Random, rounds: int) -> None:
    """Most texts end, because the characters that end values are made likelier."""
    ids = {vocabulary.token_bytes(token): token for token in range(2, vocabulary.num_ids)}
    likelier = tuple((ids[character], 3.0) for character in (b'"', b"}", b"]", b"0"))
    ended = 0
    for whitespace in (None, BOUNDED_WHITESPACE, r"[ \n\t]*"):
        for schema, heard in write_all(
            driver, UNBOUNDED * rounds, whitespace, rng, max_tokens=250, logit_bias=likelier
        ):
            assert heard.failed is None, (schema, heard.failed)
            if heard.finish_reason == "stop":
                text = read(vocabulary, heard)
                assert accepts(schema, text), (schema, text)
                ended += 1
    assert ended > len(UNBOUNDED) * rounds
    print(f"{ended} of {3 * len(UNBOUNDED) * rounds} texts of unbounded schemas ended")


def test_texts_of_random_schemas_are_accepted(driver: Driver, vocabulary: Vocabulary, rng: random.Random) -> None:
    check_bounded(driver, vocabulary, rng, 2 * TOGETHER)


def test_texts_of_unbounded_schemas_are_accepted_if_they_end(
    driver: Driver, vocabulary: Vocabulary, rng: random.Random
) -> None:
    check_unbounded(driver, vocabulary, rng, 1)


@pytest.mark.slow
def test_texts_of_500_random_schemas_are_accepted(driver: Driver, vocabulary: Vocabulary, rng: random.Random) -> None:
    check_bounded(driver, vocabulary, rng, 500)
    check_unbounded(driver, vocabulary, rng, 6)
