"""What the answers of the live state have in common: rounded times, and no fields without a value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def drop_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


def round_seconds(seconds: float | None) -> float | None:
    """Return seconds with one digit after the point; None stays None."""
    return None if seconds is None else round(seconds, 1)
