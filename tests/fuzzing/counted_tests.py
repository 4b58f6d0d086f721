"""Tests that do nothing, for those of which tests run. Run by name only, by test_fuzzing.py and test_environment.py."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("number", range(40))
def test_it(number: int) -> None:
    pass


@pytest.mark.apart
def test_apart() -> None:
    pass
