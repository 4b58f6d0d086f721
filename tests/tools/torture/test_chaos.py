"""Half a minute of faults. The seed is new each time; the report, which a failure shows, begins with it."""

from __future__ import annotations

import pytest

from tests.tools.torture.tool_process import run_tool


@pytest.mark.timeout(600)
def test_half_a_minute_of_chaos_finds_nothing() -> None:
    report = run_tool("chaos", "--minutes", "0.5", "--requests", "20")
    assert report["problems"] == {}
    assert report["counts"]["answers checked"] > 10
    assert sum(fault["injected"] for fault in report["faults"].values()) > 1
