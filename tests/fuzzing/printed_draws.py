"""A random test that prints a sum of all that it draws. Run by name only, by test_fuzzing.py."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st


def test_it() -> None:
    drawn: list[list[int]] = []

    @settings(max_examples=50)
    @given(st.lists(st.integers(0, 10**9), max_size=20))
    def draw(numbers: list[int]) -> None:
        drawn.append(numbers)

    draw()
    print(f"drawn: {sum(map(sum, drawn))}")
