"""Amounts of memory as people write them."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from config.sizes import Share, exceeds, parse_bytes, share_to_bytes

SHARE = TypeAdapter(Share)


@pytest.mark.parametrize(
    ("text", "count"), [("0", 0), ("17", 17), (17, 17), ("512MiB", 512 << 20), ("2GB", 2 * 10**9), ("1.5 KiB", 1536)]
)
def test_bytes(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "much", "-1", "5 fish", "10%", "1,5GiB", "1GiB/2", "nan"])
def test_no_bytes(text: str) -> None:
    with pytest.raises(ValueError, match="is not an amount of memory: write"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("share", "count"), [("0%", 0), ("100%", 1000), ("12.5 %", 125), ("33.33%", 333), ("64", 64), ("1KiB", 1024)]
)
def test_shares(share: str, count: int) -> None:
    assert SHARE.validate_python(share) == share
    assert share_to_bytes(share, 1000) == count


def test_a_percentage_of_much_memory_is_exact() -> None:
    assert share_to_bytes("10%", 10 * (2**60 + 1)) == 2**60 + 1


@pytest.mark.parametrize("share", ["110%", "100.4%", "-1%", "-0.1%", "%", "1/0%", "x%", "x", "-5", ""])
def test_no_shares(share: str) -> None:
    with pytest.raises(ValidationError):
        SHARE.validate_python(share)


@pytest.mark.parametrize(
    ("share", "other", "more"),
    [("60%", "50%", True), ("50%", "50%", False), ("2GiB", "1GiB", True), ("1MiB", "1GiB", False), ("90%", "1", False)],
)
def test_what_exceeds_whatever_the_total(share: str, other: str, more: bool) -> None:
    assert exceeds(share, other) is more
