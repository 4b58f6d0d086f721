"""Adapts a client's JSON schema to what llguidance reads, so that no text is written that the schema refuses.

llguidance reads all numbers as float64, turns bounds of integers into int64, refuses formats that it does not know
(which are annotations by the standard), and members that are null (which Go and C# write for what is empty).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

from config.wording import format_value

MAX_DEPTH = 128  # most objects and arrays within each other in a schema; llguidance reads hardly more
# The formats that llguidance knows
FORMATS = frozenset(
    {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
EXCLUSIVE = (LOWER[1], UPPER[1])
GAPS = 2**53  # from here on float64 does not hold all whole numbers
MOST = 2**63 - 1024  # the largest float64 below 2^63
LONGEST = 10**18  # from here on llguidance needs a bound on the other side, too

OF_NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
OF_LISTS = frozenset({"anyOf", "allOf", "oneOf", "prefixItems"})
OF_SCHEMAS = frozenset({"items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains"})
MAY_BE_NULL = frozenset({"const", "default", "example", "examples"})  # members whose null is a value

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})

Note = Callable[[str], None]


class SchemaError(ValueError):
    """A schema that cannot be read; the message begins with the keys of what is wrong in it."""

    def __init__(self, problem: str, *path: str) -> None:
        super().__init__(f"{'.'.join(path)}: {problem}" if path else problem)
        self.problem, self.path = problem, path


@contextmanager
def _within(key: str) -> Iterator[None]:
    """Put a key before the path of a SchemaError."""
    try:
        yield
    except SchemaError as error:
        raise SchemaError(error.problem, key, *error.path) from None


def adapt_schema(schema: Any, note_ignored: Note = lambda _: None) -> Any:
    """Return the adapted schema, an object or a boolean; `note_ignored` gets each format that has no effect.

    Bounds that float64 or int64 cannot hold are moved inwards, which leaves out a few numbers or those beyond 64 bits.
    Raises SchemaError for a schema that is nested too deeply or has a type that JSON does not have, and for numbers
    that would not be written as they are.
    """
    check_depth(schema)
    return _adapt(schema, note_ignored)


def check_depth(schema: Any) -> None:
    """Raise SchemaError for a schema that is nested too deeply to be written as JSON, however full the stack is."""
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH + 1):
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return
        level = [value for each in level for value in (each.values() if isinstance(each, dict) else each)]
    raise SchemaError("the schema is nested too deeply; move parts of it into $defs")


def _adapt(schema: Any, note_ignored: Note) -> Any:
    if not isinstance(schema, dict):
        return schema
    adapted = {}
    for key, value in schema.items():
        if value is None and key not in MAY_BE_NULL:
            continue
        if key == "format" and isinstance(value, str) and value not in FORMATS:
            note_ignored(f"format: {value}")
            continue
        with _within(key):
            adapted[key] = _adapt_member(key, value, note_ignored)
    return adapted | _adapt_bounds(adapted)


def _adapt_member(key: str, value: Any, note_ignored: Note) -> Any:
    if key in OF_NAMES and isinstance(value, dict):
        named = {}
        for name, each in value.items():
            with _within(name):
                named[name] = _adapt(each, note_ignored)
        return named
    if key in OF_LISTS | OF_SCHEMAS and isinstance(value, list):
        parts = []
        for index, each in enumerate(value):
            with _within(str(index)):
                parts.append(_adapt(each, note_ignored))
        return parts
    if key in OF_SCHEMAS:
        return _adapt(value, note_ignored)
    if key in ("const", "enum"):
        _check_exact(value)
    elif key == "type":
        for name in value if isinstance(value, list) else [value]:
            if not isinstance(name, str) or name not in TYPES:
                raise SchemaError(f"{format_value(name)} is no type of JSON; the types are {', '.join(sorted(TYPES))}")
    return value


def _check_exact(value: Any) -> None:
    """Raise SchemaError for a value with a number that float64 cannot hold, so that another one would be written."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            _check_exact(each)
    elif type(value) is int and (not _is_exact(value) or value == -(2**63)):  # of which llguidance takes the magnitude
        raise SchemaError(f"the number {value} has too many digits to be written exactly; make it a string")


def _is_exact(number: int) -> bool:
    try:
        return int(float(number)) == number
    except OverflowError:
        return False


# ---------------------------------------------------------------- bounds
def _adapt_bounds(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the bounds of a schema as they are read."""
    whole = schema.get("type") == "integer"
    lower, upper = ({key: schema[key] for key in keys if _is_number(schema.get(key))} for keys in (LOWER, UPPER))
    least = {key: _move_up(bound, whole=whole, beyond=key in EXCLUSIVE) for key, bound in lower.items()}
    most = {key: -_move_up(-bound, whole=whole, beyond=key in EXCLUSIVE) for key, bound in upper.items()}
    if lower and upper and max(least.values()) > min(most.values()) and max(lower.values()) <= min(upper.values()):
        raise SchemaError(
            f"no number from {max(lower.values())} to {min(upper.values())} can be written exactly; make it a string"
        )
    if not most and any(bound >= LONGEST for bound in least.values()):
        most["maximum"] = MOST
    if not least and any(bound <= -LONGEST for bound in most.values()):
        least["minimum"] = -MOST
    return least | most


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)  # not a boolean, which draft 4 has for exclusiveMinimum


def _move_up(bound: float, *, whole: bool, beyond: bool) -> float:
    """Return the least bound from this one on, or beyond it, that llguidance holds.

    It writes `whole` numbers as they are, and others in 17 digits. Where float64 has gaps, it may take a number as
    inclusive that is exclusive. Raises SchemaError if there is none.
    """
    if bound > MOST:
        raise SchemaError(f"a bound of {bound} is beyond 64 bits; make the number a string in the schema")
    if bound < -MOST:
        return -MOST
    if abs(bound) < GAPS:
        return bound
    bound = int(bound) + beyond
    moved = float(bound)
    while (int(moved) if whole else Decimal(repr(moved))) < bound:
        moved = math.nextafter(moved, math.inf)
    return int(moved)
