"""pydantic's own wordings, which no message for a user has, and values that most fields refuse."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any, TypeVar, get_args

from pydantic_core import PydanticKnownError, core_schema

E = TypeVar("E", bound=Exception)

NUMBERS = ("gt", "ge", "lt", "le", "multiple_of", "min_length", "max_length", "actual_length")
NUMBERS += ("max_digits", "decimal_places", "whole_digits", "expected_version", "tz_expected", "tz_actual")
TEXTS = ("attribute", "error", "method_name", "class_name", "field_type", "pattern", "expected", "encoding")
TEXTS += ("encoding_error", "class", "discriminator", "tag", "expected_tags", "expected_schemes")
CONTEXT: dict[str, Any] = dict.fromkeys(NUMBERS, 1) | dict.fromkeys(TEXTS, "it")


def make_errors() -> dict[str, PydanticKnownError]:
    """Return an error of each of pydantic's types."""
    return {kind: PydanticKnownError(kind, CONTEXT) for kind in get_args(core_schema.ErrorType)}


def _find_fixed_words(template: str) -> str:
    """Return what a message always has: its beginning, or if that is a value, its longest part."""
    parts = re.split(r"\{[^}]*\}", template)
    return (parts[0] or max(parts, key=len)).strip().lower()


WORDINGS = {_find_fixed_words(error.message_template) for error in make_errors().values()}


def find_wordings(message: str) -> list[str]:
    """Return the wordings of pydantic that a message has."""
    return [wording for wording in WORDINGS if wording in message.lower()]


def catch(kind: type[E], call: Callable[..., object], *arguments: Any, **named: Any) -> E | None:
    """Return the error of this kind that a call raises; None if it raises none."""
    try:
        call(*arguments, **named)
    except kind as error:
        return error
    return None


def draw_wrong_values(draw: random.Random) -> list[Any]:
    """Return values of every kind: wrong types, bad texts, numbers out of range, nothing, and too much of it."""
    sign, digits = draw.choice([-1, 1]), draw.randint(20, 400)
    text = "".join(draw.choices("abcxyz %_-.:/\\\u00e9\U0001f600\"'", k=draw.randint(1, 30)))
    return [
        *(None, True, False, 0, -1, 0.5, 1.5, sign * 10**digits, sign * 1e300, float("nan"), float("inf")),
        *("", " ", text, "x" * 5000, "nan", "-5", "1,5", "-5%", "150%", "10 fish", "9" * 400, "5m3"),
        *([], {}, [[]], [None], [1], [text], [{}], {text: text}, {"type": text}, {"": None}, [[text] * 3] * 3),
    ]
