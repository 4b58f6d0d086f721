"""Scattered idle blocks never keep a request from running: an idle engine does not leave requests waiting."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.engine_driver import Driver


@pytest.mark.parametrize("waiting", ["contiguous", "sliding_window"])
def test_idle_blocks_within_a_floor_give_way_to_a_run(tiny: Path, waiting: str) -> None:
    driver = Driver(tiny, strategies={"paged": {"kind": "paged", "floor": "50%"}}, max_seq_len=256, kv_memory="240KiB")
    for name in ("a", "b"):  # together, so that their blocks alternate
        driver.submit(name, [ord(name)] * 8, 200, kv_cache="paged")
    driver.run()
    assert driver.core.instances["paged"].usage().idle > 0
    driver.submit("run", [7] * 8, 8, kv_cache=waiting)
    driver.run(at_most=50)
    assert len(driver.heard["run"].tokens) == 8
