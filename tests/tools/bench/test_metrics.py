"""The benchmark of the metrics counts in one half of its rounds, and leaves the requests running in both."""

from __future__ import annotations

import json

import pytest

from tools.bench import metrics as bench_metrics


def test_rounds_with_and_without(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    observe = bench_metrics.observe
    monkeypatch.setattr(
        bench_metrics, "observe", lambda metrics, result: counted.append(result.report.rows) or observe(metrics, result)
    )
    bench_metrics.main(
        ["--json", "--threads", "1", "--sequences", "3", "--tokens", "4", "--rounds", "2", "--steps", "5"]
    )
    cost = json.loads(capsys.readouterr().out)
    assert len(counted) == 3 * 5, "with one round that warms"
    assert min(counted[3:]) >= 1
    assert cost["sequences"] == 3
    assert 0 < cost["observe_time"] < cost["step_with_metrics"]
    assert cost["step"] > 0 < cost["scrape"]
