"""`kvmux doctor` tells of every backend whether it is here and computes what it should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernels import load as loading
from kernels.cpu.load import KernelsMissing
from kernels.ops import Ops
from kernels.reference import ReferenceOps
from server import doctor as doctoring


class Raising(ReferenceOps):
    def silu_mul(self, gate_up: Any) -> Any:
        raise RuntimeError("no such instruction")


def _missing() -> Ops:
    raise KernelsMissing("this machine has no abacus")


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctoring, "PROBE_BYTES", 1 << 12)


def _report(monkeypatch: pytest.MonkeyPatch, out: Path, **backends: Any) -> tuple[int, dict[str, str]]:
    monkeypatch.setattr(loading, "BACKENDS", {name: ("cpu", load) for name, load in backends.items()})
    code = doctoring.doctor(out)
    return code, json.loads(out.read_text())["kernels"]


def test_a_backend_that_is_right_and_one_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, kernels = _report(monkeypatch, tmp_path / "report.json", right=ReferenceOps, abacus=_missing)
    assert code == 0
    assert kernels["abacus"] == "none: this machine has no abacus"
    assert kernels["right silu_mul"] == "float32 off by 0e+00, float16 off by 0e+00, bfloat16 off by 0e+00"


def test_a_fault_is_named_and_ends_with_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, kernels = _report(monkeypatch, tmp_path / "report.json", broken=Raising)
    assert code == 1
    assert kernels["broken silu_mul"].startswith("float32 FAULT: RuntimeError: no such instruction")
    assert "FAULT" not in kernels["broken rope"]
