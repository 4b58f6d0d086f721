"""Constraints with their judges, and requests that have them: what tests of grammars in the engine share.

Whether a text satisfies its constraint is judged by `re` and `jsonschema`.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jsonschema

from server.grammar.constraint import Constraint, constrain_to_choices, constrain_to_schema
from server.grammar.lark import write_lark
from server.text.vocabulary import Vocabulary
from tests.engine.engine_driver import Driver, RequestEvents, strategies
from tests.engine.expected_tokens import random_prompt
from tests.engine.grammar.conftest import EOS

SETTINGS: dict[str, Any] = {
    "strategies": strategies(paged={"kind": "paged", "block_size": 8}),
    "max_seq_len": 128,
    "max_num_seqs": 6,
    "deterministic": True,  # a row's logits do not depend on the other rows
}
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": -9, "maximum": 99},
        "b": {"enum": ["x", "y", 3]},
        "c": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}


class Case(NamedTuple):
    """A constraint, its judge, and tokens enough for its longest text."""

    constraint: Constraint
    accepts: Callable[[str], bool]
    max_tokens: int = 90


def accepts_json(text: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


PATTERN = r"[a-f]{3,9}(-[0-9]{2}){0,4}"
CHOICES = ["yes", "no", "perhaps", 'é\n"quoted"']
CASES = {
    "schema": Case(constrain_to_schema(SCHEMA, "", whitespace=None), accepts_json),
    "regex": Case(Constraint("regex", PATTERN, ""), lambda text: re.fullmatch(PATTERN, text) is not None),
    "choice": Case(constrain_to_choices(CHOICES, ""), lambda text: text in CHOICES),
    "gbnf": Case(
        Constraint("grammar", 'root ::= "a" x{0,3} "."\nx ::= [0-9] | "(" x ")"', ""),
        lambda text: re.fullmatch(r"a((\(*)\d\)*){0,3}\.", text) is not None and text.count("(") == text.count(")"),
    ),
}


def compile_grammar(driver: Driver, case: Case) -> str:
    """Return the case's grammar, compiled: then a request with it needs not wait."""
    grammar = write_lark(case.constraint.kind, case.constraint.text)
    while not driver.engine.grammars.prepare(grammar):
        time.sleep(0.001)
    return grammar


def submit(driver: Driver, name: str, case: Case | None, number: int, **options: Any) -> RequestEvents:
    """Submit a request whose prompt, and unless `options` has a seed also its draws, follow from `number`."""
    sampling = {"temperature": 1.5, "ignore_eos": False, "seed": number} | options
    if case is not None:
        sampling["grammar"] = compile_grammar(driver, case)
    max_tokens = sampling.pop("max_tokens", 24 if case is None else case.max_tokens)
    return driver.submit(name, random_prompt(5 + number % 20, seed=number % 5), max_tokens, **sampling)


def compute_alone(driver: Driver, case: Case | None, number: int, **options: Any) -> RequestEvents:
    heard = submit(driver, f"{random.random()}", case, number, **options)
    driver.run()
    return heard


def read(vocabulary: Vocabulary, heard: RequestEvents) -> str:
    """Return the text of a request that has ended, without an end token."""
    text = heard.tokens[:-1] if heard.tokens[-1:] == [EOS] else heard.tokens
    return b"".join(map(vocabulary.token_bytes, text)).decode()
