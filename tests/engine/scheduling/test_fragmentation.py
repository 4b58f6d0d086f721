"""In one tensor, scattered idle blocks never keep a request from running: nobody waits in an idle engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cache_strategies import memory
from cache_strategies.one_tensor import OneTensor
from server.engine import build
from server.engine.instance_reports import read_usage
from tests.engine.engine_driver import Driver, least_memory


@pytest.mark.parametrize("waiting", ["contiguous", "sliding_window"])
def test_idle_blocks_within_a_floor_give_way_to_a_run(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, waiting: str
) -> None:
    for module in (memory, build):
        monkeypatch.setattr(module, "find_space", lambda device: OneTensor)
    settings: dict[str, Any] = {"strategies": {"paged": {"kind": "paged", "floor": "50%"}}, "max_seq_len": 256}
    driver = Driver(tiny, **settings, kv_memory=str(int(1.2 * least_memory(tiny, **settings))))
    for name in ("a", "b"):  # together, so that their blocks alternate
        driver.submit(name, [ord(name)] * 8, 200, kv_cache="paged")
    driver.run()
    assert read_usage(driver.core.instances["paged"]).idle > 0
    driver.submit("run", [7] * 8, 8, kv_cache=waiting)
    driver.run(at_most=50)
    assert len(driver.heard["run"].tokens) == 8
