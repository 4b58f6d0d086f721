"""A soak of half a minute and, marked as slow, one of an hour. A failure shows the report, which has the seed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tools.torture.tool_process import run_tool


def soaked(minutes: float, *flags: str) -> dict[str, Any]:
    report = run_tool("soak", "--minutes", str(minutes), *flags)
    assert report["problems"] == {}
    for name in (
        "answers checked",
        "clients that hung up",
        "admin calls: pin",
        "admin calls: share",
        "admin calls: clear",
    ):
        assert report["counts"].get(name, 0) > 0, name
    assert report["counts"]["kvmux_num_preemptions_total"] > 0
    return report


@pytest.mark.timeout(600)
def test_half_a_minute_of_soak_finds_nothing() -> None:
    report = soaked(0.6, "--requests", "40")
    assert report["rounds"] >= 2
    assert not report["slopes_judged"], "so short a run says nothing about them"
    assert set(report["resident_mib"]) >= {"supervisor", "engine", "worker-0", "worker-1"}


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_an_hour_of_soak_finds_nothing() -> None:
    assert soaked(60)["slopes_judged"]
