"""Adapts the JSON schemas within a client's Lark grammar (`%json`), like those that stand alone.

Splits a grammar as llguidance's lexer does. What that refuses is left as it is.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from server.grammar.json_schema import adapt_schema
from server.grammar.schema_numbers import SchemaError
from server.text.errors import GrammarError

# Strings, regular expressions, comments and special tokens, within which there is no keyword; keywords before JSON; and
# the beginning of what does not end
_PARTS = re.compile(
    r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\])+/|(?:#|//)[^\n]*|<[^<>\s]+>|%(?P<keyword>json|regex|llguidance)|["/<]'
)
_NOT_SPACE = re.compile(r"[^ \t\r\n]|$")


def adapt_embedded_schemas(lark: str) -> str:
    """Return the grammar with its schemas adapted, each in as many lines as before.

    Raises GrammarError for a schema that cannot be read.
    """
    pieces, done, position = [], 0, 0
    while (part := _PARTS.search(lark, position)) is not None and part[0] not in ('"', "/", "<"):
        position = part.end()
        if part["keyword"] is None:
            continue
        start = _find_start(lark, position)
        try:
            value, position = _DECODER.raw_decode(lark, start)
        except (ValueError, RecursionError):
            break
        if part["keyword"] == "json" and (adapted := _adapt(value)) != json.dumps(value):
            pieces += [lark[done:start], _add_lines(adapted, lark.count("\n", start, position))]
            done = position
    return "".join([*pieces, lark[done:]])


def _find_start(text: str, position: int) -> int:
    found = _NOT_SPACE.search(text, position)
    return len(text) if found is None else found.start()


def _adapt(schema: Any) -> str:
    """Return an adapted schema as JSON."""
    try:
        return json.dumps(adapt_schema(schema))
    except SchemaError as error:
        raise GrammarError(f"%json: {error}") from None


def _add_lines(schema: str, count: int) -> str:
    """Return a schema with line feeds within it, so that later lines keep their numbers in errors."""
    return schema[0] + "\n" * count + schema[1:] if count else schema


def _parse_float(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError("out of range")
    return number


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_float=_parse_float, parse_constant=_refuse_constant)
