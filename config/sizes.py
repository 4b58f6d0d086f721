"""Parses amounts of memory such as "512MiB" and shares of it such as "10%". Does not know what they are used for."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ByteSize, TypeAdapter, ValidationError

from config.quantities import parse_percentage, write_percentage

_BYTES = TypeAdapter(ByteSize)
_AMOUNT = re.compile(r"\s*(\d+|\d*\.?\d+\s*[^\W\d_]+)\s*")  # checked first: pydantic would read "1,5GiB" as 1 byte


def parse_bytes(text: str | int) -> int:
    """Return the bytes that a text such as "512MiB", "2GB" or "1024" means. Raises ValueError if it is another text."""
    try:
        if _AMOUNT.fullmatch(str(text)):
            return int(_BYTES.validate_python(text))
    except ValidationError:
        pass
    raise ValueError(f"{text!r} is not an amount of memory: write a number of bytes, or a text such as '512MiB'")


def share_to_bytes(share: str, total: int) -> int:
    """Return the bytes of a share of `total` bytes, rounded down; `share` is a text such as "10%" or "512MiB".

    Raises ValueError if it is neither a percentage nor an amount of memory.
    """
    parsed = _parse_share(share)
    return parsed if isinstance(parsed, int) else total * parsed.numerator // parsed.denominator


@lru_cache  # a starting server needs the same few shares of thousands of totals
def _parse_share(share: str) -> int | Fraction:
    """Return an amount as bytes, and a percentage as a fraction of the total."""
    return parse_percentage(share) / 100 if _is_percentage(share) else parse_bytes(share)


def exceeds(share: str, other: str) -> bool:
    """Return whether `share` is more than `other`, such as "20%" than "10%".

    False for a percentage and an amount such as "512MiB", which cannot be compared without the total.
    """
    if _is_percentage(share) != _is_percentage(other):
        return False
    if _is_percentage(share):
        return parse_percentage(share) > parse_percentage(other)
    return parse_bytes(share) > parse_bytes(other)


def _is_percentage(share: str) -> bool:
    return share.endswith("%")


def _write_number(share: Any) -> Any:
    """Return a number from 0 to 1 as a percentage, and a larger one, which is one of bytes, as a text."""
    written = write_percentage(share)
    return str(written) if type(written) in (int, float) else written


def _check_share(share: str) -> str:
    try:
        share_to_bytes(share, 0)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"{share!r} is not a share: write a percentage ('10%') or an amount ('512MiB')") from None
    if _is_percentage(share) and not 0 <= parse_percentage(share) <= 100:
        raise ValueError(f"{share!r}: a percentage has to be between 0% and 100%")
    return share


Share = Annotated[str, BeforeValidator(_write_number), AfterValidator(_check_share)]
"""A part of the KV memory: "10%" of it, which may be written as 0.1, or an absolute "512MiB"."""
