"""transformers generates answers of a workload's length, and the times are reported as by `kvmux bench`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tools.bench.small_shape import SMALL_SHAPE
from tools.bench import transformers_peer as peer
from tools.bench.table.limits import WORKLOADS, Workload


def test_a_result_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(WORKLOADS, "a", Workload(1, 24, 6))
    peer.main(["--model", str(folder / SMALL_SHAPE.name), "--rounds", "2", "--threads", "1"])
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["strategy"], told["phase"], told["requests"], told["prompt_tokens"]) == ("transformers", None, 2, 48)
    assert told["ttft_ms"]["p50"] > 0 < told["itl_ms"]["mean"]
