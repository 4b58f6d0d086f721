"""The benchmark of checks adds up the checks of each step, and copies tokens with every backend of the CPU."""

from __future__ import annotations

import json

import pytest

from kernels.backends import REFERENCE
from tools.bench import kernel_inputs
from tools.bench.checks import __main__ as checks
from tools.bench.checks.__main__ import list_measured_backends


def test_a_step_and_every_backend_have_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_inputs, "GIBIBYTE", 1 << 16)
    monkeypatch.setattr(checks, "KEPT_TOKENS", 64)
    checks.main(["--json", "--threads", "1", "--sequences", "3", "--tokens", "4", "--steps", "5", "--rounds", "1"])
    step, *copies = map(json.loads, capsys.readouterr().out.splitlines())
    assert step["sequences"] == 3
    assert 0 < step["checks"] < step["step"]
    assert 0 < step["share"] < 1
    assert [each["backend"] for each in copies] == [name for name, _ in list_measured_backends()]
    assert copies[0]["backend"] == REFERENCE
    assert all(each["milliseconds"] > 0 for each in copies)
