"""Says in plain words what is wrong with a value that pydantic has refused, and what to write instead.

The only place where errors of pydantic become messages. Callers name the field, and where its value came from.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence, Sized
from datetime import date, time
from typing import Any

MAX_VALUES = 5  # most wrong values that a message shows
MAX_VALUE_LENGTH = 60  # maximum number of characters of a value in an error

_NOUNS = {  # what a value should be, by the first word of pydantic's error type, such as int_parsing
    "int": "a whole number",
    "float": "a number",
    "decimal": "a number",
    "fraction": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "a text",
    "bytes": "a text",
    "dict": "{table}",
    "model": "{table}",
    "mapping": "{table}",
    "dataclass": "{table}",
    "list": "a list",
    "tuple": "a list",
    "set": "a list",
    "iterable": "a list",
    "date": "a date",
    "datetime": "a date and a time",
    "time": "a time",
    "url": "a URL",
    "uuid": "a UUID",
    "none": "null",
}
_RULES = {  # messages by pydantic's whole error type; the names in braces are its context
    "missing": "is required",
    "extra_forbidden": "is not known; remove it",
    "value_error": "{error}",
    "assertion_error": "{error}",
    "greater_than": "should be above {gt}",
    "greater_than_equal": "should be {ge} or more",
    "less_than": "should be below {lt}",
    "less_than_equal": "should be {le} or less",
    "multiple_of": "should be a multiple of {multiple_of}",
    "literal_error": "should be {expected}",
    "enum": "should be {expected}",
    "string_pattern_mismatch": "should match the regular expression {pattern}",
    "string_not_ascii": "should have letters, digits and signs of ASCII only",
    "string_too_short": "should have {min_length} or more characters",
    "string_too_long": "should have {max_length} or fewer characters",
    "bytes_too_short": "should have {min_length} or more bytes",
    "bytes_too_long": "should have {max_length} or fewer bytes",
    "too_short": "should have {min_length} or more items",
    "too_long": "should have {max_length} or fewer items",
    "invalid_key": "should have texts for keys",
}
_COMPLETE = ("missing", "extra_forbidden", "value_error", "assertion_error")  # the value adds nothing to these messages
_LENGTHS = ("too_short", "too_long")  # end of the types of errors about a length, which is named in place of the value


def explain_problem(
    where: str,
    problem: Mapping[str, Any],
    *,
    value: str | None = None,
    shows_value: bool = True,
    table: str = "a table",
) -> str:
    """Return what is wrong with the field `where`: 'port: should be a whole number, not "x"'.

    `problem` is one of the errors that pydantic lists. `value` is what was given, if that has to be written in another
    way than `format_value` does; it is not shown if it may be a secret. `table` is the word for a value with keys.
    """
    kind: str = problem["type"]
    noun = _NOUNS.get(kind.split("_")[0])
    template = _RULES.get(kind) or (f"should be {noun}" if noun else "cannot be used here")
    context = {name: _format_bound(bound) for name, bound in problem.get("ctx", {}).items()}
    message = template.format_map(context | {"table": table})
    if kind not in _COMPLETE and shows_value:
        sent = problem["input"]
        message += f", not {_measure(sent) if kind.endswith(_LENGTHS) else value or format_value(sent)}"
    colon = "" if message.startswith("is ") or not where else ":"
    return f"{where}{colon} {message}".lstrip()


def _format_bound(bound: Any) -> str:
    if isinstance(bound, float) and bound.is_integer():
        bound = int(bound)
    return f"{bound:,}" if isinstance(bound, int | float) else str(bound)


def _measure(value: Any) -> str:
    return _format_bound(len(value)) if isinstance(value, Sized) else "as many"


# ---------------------------------------------------------------- values
def format_values(values: Sequence[Any]) -> str:
    """Return some values, and how many more there are, for an error message."""
    shown = ", ".join(map(format_value, values[:MAX_VALUES]))
    return shown if len(values) <= MAX_VALUES else f"{shown} and {len(values) - MAX_VALUES:,} more"


def format_value(value: Any) -> str:
    """Return a value as JSON for an error message; an empty, nested or large value is only described by its type."""
    match value:
        case None:
            return "null"
        case "":
            return "an empty text"
        case str():
            return json.dumps(value if len(value) <= MAX_VALUE_LENGTH else f"{value[:MAX_VALUE_LENGTH]}...")
        case int() if value.bit_length() > 128:
            return "a number that long"
        case bool() | int() | float():
            return json.dumps(value)
        case date() | time():  # TOML has them
            return str(value)
        case dict() if _is_short(value.values()):
            return json.dumps(value)[:MAX_VALUE_LENGTH]
        case {"type": str(kind)} if kind:
            return f'{{"type": {format_value(kind)}, ...}}'
        case dict():
            return "an object"
        case list() if _is_short(value):
            return json.dumps(value)
        case list() | tuple() | set() | frozenset():
            return "a list"
    return f"an object of the type {type(value).__name__}"


def _is_short(values: Collection[Any]) -> bool:
    short = (isinstance(value, str) and len(value) < MAX_VALUE_LENGTH for value in values)
    return 0 < len(values) <= 2 and all(short)
