"""Numbers in the tables of reports."""

from __future__ import annotations

import pytest

from config.tables import format_number


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.01234, "0.0123"), (12.345, "12.3"), (123.4, "123"), (12345, "12,345")]
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert format_number(value) == text
