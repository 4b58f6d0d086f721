"""How much of a prompt is computed is told after each step of it, if the client asked."""

from __future__ import annotations

from pathlib import Path

from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import random_prompt


def test_each_part_of_a_prompt_is_told(tiny: Path) -> None:
    driver = Driver(
        tiny, strategies=strategies(paged={"kind": "paged", "block_size": 8}), max_seq_len=96, max_num_batched_tokens=16
    )
    prompt = random_prompt(50)
    first = driver.submit("first", prompt, 3, reports_progress=True)
    driver.run()
    assert first.progress == [0, 16, 32, 48, 50]
    second = driver.submit("second", prompt, 3, reports_progress=True)
    silent = driver.submit("silent", random_prompt(50, seed=1), 3)
    driver.run()
    assert second.admitted is not None
    assert second.progress == [second.admitted.cached_tokens, 50], "first what was in the cache"
    assert silent.progress == []
    assert len(second.tokens) == len(silent.tokens) == 3
