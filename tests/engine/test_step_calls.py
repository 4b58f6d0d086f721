"""How many of our own Python functions a decode step calls: a tripwire, which says who calls if there are more.

Whoever has to raise a number says why. Comprehensions do not count.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.engine.engine_driver import Driver
from tests.engine.expected_tokens import random_prompt

ROOT = str(Path(__file__).parents[2])
PRODUCT = tuple(f"{ROOT}/{folder}/" for folder in ("cache_strategies", "config", "kernels", "server"))
FIRST_ROW, FURTHER_ROW = 180, 35  # most calls
WARM, STEPS, ROWS = 10, 15, 9  # the steps are few enough that no block is filled


def count_step_calls(tiny: Path, strategy: str, rows: int) -> Counter[str]:
    """Return the calls of a decode step with `rows` rows, by function: those of the step with the fewest."""
    driver = Driver(
        tiny, max_num_seqs=ROWS, kv_memory="16MiB", strategies={"sliding_window": {"kind": "sliding_window"}}
    )
    driver.core.timing_interval = 0
    for i in range(rows):
        driver.submit(str(i), random_prompt(33, seed=i), 60, kv_cache=strategy)
    for _ in range(WARM):
        driver.core.step()
    counted = [count_calls(driver) for _ in range(STEPS)]
    return min(counted, key=Counter.total)


def count_calls(driver: Driver) -> Counter[str]:
    """Return the calls of one step by function."""
    calls = Counter[str]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        named = not code.co_name.startswith("<") or code.co_name == "<lambda>"
        if event == "call" and named and code.co_filename.startswith(PRODUCT):
            calls[f"{code.co_filename.removeprefix(ROOT)} {code.co_qualname}"] += 1

    sys.setprofile(note)
    try:
        driver.core.step()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("strategy", ["paged", "contiguous", "sliding_window"])
def test_a_decode_step_calls_few_functions(tiny: Path, strategy: str) -> None:
    one, many = (count_step_calls(tiny, strategy, rows) for rows in (1, ROWS))
    further = (many.total() - one.total()) / (ROWS - 1)
    listed = "\n".join(f"{count:4} {name}" for name, count in many.most_common())
    print(f"{strategy}: {one.total()} calls of the first row, {further} of a further one; with {ROWS} rows:\n{listed}")
    assert one.total() <= FIRST_ROW
    assert further <= FURTHER_ROW
