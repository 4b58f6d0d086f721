"""The benchmark of starting tells of all processes, and that none but the engine is large."""

from __future__ import annotations

import json
import sys

import pytest

from tools.bench import starting

MIB = 2**20


@pytest.mark.apart
@pytest.mark.skipif(sys.platform != "linux", reason="no /proc/PID/smaps_rollup")
def test_seconds_and_memory_of_every_process(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--rounds", "1", "--streams", "2", "--prompt", "8", "--tokens", "4"]
    starting.main([*load, "--json", "--", "--kv-memory", "64MiB", "--threads", "1"])
    result = json.loads(capsys.readouterr().out)
    (seconds,) = result["seconds"]
    assert 0.3 < seconds < 120
    ready, peak = result["ready"], result["peak"]
    assert set(ready) == {"supervisor", "resource tracker", "engine", "API", "text", "all"}
    for when in (ready, peak):
        assert all(0 < pss <= rss for pss, rss in when.values())
    parts = [pss for role, (pss, _) in ready.items() if role != "all"]
    assert ready["all"][0] == sum(parts)
    assert peak["engine"][0] > 64 * MIB, "the KV memory is touched"
    assert peak["API"][0] < 150 * MIB
    assert peak["supervisor"][0] < 100 * MIB
