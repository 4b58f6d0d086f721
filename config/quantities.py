"""Reads shares such as "25%" and durations such as "10m", as texts and as flags of the command line.

Imports only the standard library, as `kvmux health` and `loadtest` do. `units.py` has the types of settings.
"""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError
from fractions import Fraction
from typing import Any

MAX_TIMEOUT = 7 * 24 * 3600  # maximum of any timeout, in seconds

_PERCENTAGE = re.compile(r"\s*\d{1,3}(\.\d{1,9})?\s*%")
_UNITS = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}  # milliseconds, in the order of a text
_DURATION = re.compile(r"\s*".join(rf"(?:(\d{{1,9}}(?:\.\d{{1,9}})?)\s*{unit})?" for unit in _UNITS))


def parse_percentage(share: str) -> Fraction:
    """Return the number before the "%" of a text such as "12.5%". Raises ValueError if it is another text."""
    if not _PERCENTAGE.fullmatch(share):  # checked first: Fraction would compute for hours with "1e-999999999"
        raise ValueError(f"{share!r} is not a percentage such as '10%'")
    return Fraction(share[: share.index("%")].strip())


def write_percentage(share: Any) -> Any:
    """Return the text that `parse_percentage` reads for a number from 0 to 1: "12.5%" for 0.125; other values as is."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        return share
    return f"{share * 100:.9f}".rstrip("0").rstrip(".") + "%"


def parse_proportion(text: str) -> float:
    """Return the number that a text such as "25%" or "0.25" means. Raises ValueError if it is another text."""
    if _PERCENTAGE.fullmatch(text):
        return float(parse_percentage(text) / 100)
    if (number := _parse_number(text)) is None:
        raise ValueError(f"{text!r} is not a share: write a percentage such as '25%', or a number such as 0.25")
    return number


def parse_duration(text: str) -> float:
    """Return the seconds that a text such as "500ms", "30s", "1h30m" or "2.5" means.

    Raises ValueError if it is another text.
    """
    if (number := _parse_number(text)) is not None:
        return number
    parts = _DURATION.fullmatch(text.strip())
    if parts is None or not any(parts.groups()):
        raise ValueError(
            f"{text!r} is not a duration: write a number of seconds, or a text such as '500ms', '30s', '10m' or '1h30m'"
        )
    counts = zip(parts.groups(default="0"), _UNITS.values(), strict=True)
    return float(sum(Fraction(count) * unit for count, unit in counts) / 1000)


def parse_duration_flag(text: str) -> float:
    """Return the seconds that a flag says; raises ArgumentTypeError unless they are above 0, and a week at most."""
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise ArgumentTypeError(error) from None
    if not 0 < seconds <= MAX_TIMEOUT:
        raise ArgumentTypeError(f"{text!r} is not a duration above 0 and of {MAX_TIMEOUT:,} seconds or less")
    return seconds


def parse_share_flag(text: str) -> float:
    """Return the share that a flag says; raises ArgumentTypeError unless it is from 0 to 1."""
    try:
        share = parse_proportion(text)
    except ValueError as error:
        raise ArgumentTypeError(error) from None
    if not 0 <= share <= 1:
        raise ArgumentTypeError(f"{text!r} should be from 0% to 100%")
    return share


def _parse_number(text: str) -> float | None:
    """Return a finite number; None for another text."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
