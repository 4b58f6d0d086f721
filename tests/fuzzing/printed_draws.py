"""A random test that prints what it draws. Run by name only, by test_fuzzing.py."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st


def test_it() -> None:
    drawn: list[int] = []

    @settings(max_examples=5)
    @given(st.integers(0, 10**9))
    def draw(number: int) -> None:
        drawn.append(number)

    draw()
    print(f"drawn: {drawn}")
