"""The numbers of a JSON schema as llguidance reads and writes them: as float64, and bounds of integers as int64.

Values that would be written as others are refused, and bounds are moved inwards. Knows one schema at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
EXCLUSIVE = (LOWER[1], UPPER[1])
GAPS = 2**53  # from here on float64 does not hold all whole numbers
MOST = 2**63 - 1024  # the largest float64 below 2^63
LONGEST = 10**18  # from here on llguidance needs a bound on the other side, too


class SchemaError(ValueError):
    """A schema that cannot be read; the message begins with the keys of what is wrong in it."""

    def __init__(self, problem: str, *path: str) -> None:
        super().__init__(f"{'.'.join(path)}: {problem}" if path else problem)
        self.problem, self.path = problem, path


def check_exact(value: Any, *path: str) -> None:
    """Raise SchemaError for a value with a number of which another one would be written; `path` leads to the value."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            check_exact(each, *path)
    elif type(value) is int and not _is_exact(value):
        raise SchemaError(f"the number {value} has too many digits to be written exactly; make it a string", *path)


def _is_exact(number: int) -> bool:
    """Return whether llguidance writes a whole number as it is: from 2^63 on in the fewest digits, then zeros."""
    try:
        held = float(number)
    except OverflowError:
        return False
    return int(held) == number and (abs(number) < 2**63 or int(Decimal(repr(held))) == number)


# ---------------------------------------------------------------- bounds
def adapt_bounds(schema: Mapping[str, Any], *path: str) -> dict[str, Any]:
    """Return the bounds of a schema as they are read; `path` leads to the schema."""
    whole = schema.get("type") == "integer"
    lower, upper = ({key: schema[key] for key in keys if _is_number(schema.get(key))} for keys in (LOWER, UPPER))
    for bound in [*(low for low in lower.values() if low > MOST), *(high for high in upper.values() if high < -MOST)]:
        raise SchemaError(f"a bound of {bound} is beyond 64 bits; make the number a string in the schema", *path)
    least = {key: _move_up(bound, whole=whole, beyond=key in EXCLUSIVE) for key, bound in lower.items()}
    most = {key: -_move_up(-bound, whole=whole, beyond=key in EXCLUSIVE) for key, bound in upper.items()}
    if lower and upper and max(least.values()) > min(most.values()) and max(lower.values()) <= min(upper.values()):
        between = f"from {max(lower.values())} to {min(upper.values())}"
        raise SchemaError(f"no number {between} can be written exactly; make it a string", *path)
    if not most and any(bound >= LONGEST for bound in least.values()):
        most["maximum"] = MOST
    if not least and any(bound <= -LONGEST for bound in most.values()):
        least["minimum"] = -MOST
    return least | most


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)  # not a boolean, which draft 4 has for exclusiveMinimum


def _move_up(bound: float, *, whole: bool, beyond: bool) -> float:
    """Return the least bound from this one on, or beyond it, that llguidance holds; it is at most MOST.

    llguidance writes `whole` numbers as they are, and others in 17 digits. Where float64 has gaps, it may take a number
    as inclusive that is exclusive.
    """
    if bound < -MOST:
        return -MOST
    if abs(bound) < GAPS:
        return bound
    bound = int(bound) + beyond
    moved = float(bound)
    while (int(moved) if whole else Decimal(repr(moved))) < bound:
        moved = math.nextafter(moved, math.inf)
    return int(moved)
