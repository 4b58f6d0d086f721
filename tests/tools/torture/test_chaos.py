"""A minute of faults. The seed is new each time; the report, which a failure shows, begins with it."""

from __future__ import annotations

import pytest

from tests.tools.torture.tool_process import run_tool


@pytest.mark.timeout(600)
def test_a_minute_of_chaos_finds_nothing() -> None:
    report = run_tool("chaos", "--minutes", "1", "--requests", "40")
    assert report["problems"] == {}
    assert report["counts"]["answers checked"] > 20
    assert sum(fault["injected"] for fault in report["faults"].values()) > 2
