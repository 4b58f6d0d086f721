"""A step's cost does not depend on the number of requests that wait for a seat or memory. Counted, not timed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engine_driver import Driver, strategies
from tests.engine.expected_tokens import random_prompt
from tools.bench.counts import count_calls

FEW, MANY = 10, 1500
INSTANCES = strategies(paged={"kind": "paged"}, other={"kind": "paged"}, contiguous={"kind": "contiguous"})
PROMPT = random_prompt(60)


def scheduling(directory: Path, waiting: int, **settings: Any) -> tuple[int, int]:
    """Return the numbers of Python calls for scheduling a step and for a submission, while `waiting` requests wait."""
    driver = Driver(directory, max_queued_requests=2 * MANY, max_seq_len=256, strategies=INSTANCES, **settings)
    core, names = driver.core, list(INSTANCES)

    def submit(name: str | None = None) -> None:
        n = len(driver.heard)
        driver.submit(str(n), PROMPT, max_tokens=150, kv_cache=name or names[n % len(names)])

    while not core.scheduler.waiting or len(core.scheduler.running) < 2:
        submit()
        core.step()
    for _ in range(waiting):
        submit()
    taking = count_calls(partial(submit, names[0]))
    for _ in range(3):
        core.step()
    assert len(core.scheduler.waiting) > waiting
    return count_calls(core.scheduler.schedule), taking


@pytest.mark.parametrize(
    "settings", [{"max_num_seqs": 4}, {"kv_memory": "700KiB", "kv_overcommit": 1}], ids=["seats", "memory"]
)
def test_many_who_wait_cost_no_more_than_a_few(tiny: Path, settings: dict[str, Any]) -> None:
    few, many = (scheduling(tiny, waiting, **settings) for waiting in (FEW, MANY))
    assert few[0] == many[0]
    assert many[1] <= few[1] + 16, "only the search for its place in line grows, by one for each doubling"
