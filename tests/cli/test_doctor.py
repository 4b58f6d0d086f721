"""`kvmux doctor` reports for every backend whether it is available and computes correctly."""

from __future__ import annotations

import json
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import backends as loading
from kernels.device import KernelsMissing
from kernels.ops import DTYPES, Ops
from kernels.reference.backend import ReferenceOps
from server.cli import doctor as doctoring
from tests.models.random_models import save_random_model


class Raising(ReferenceOps):
    def silu_mul(self, gate_up: Any) -> Any:
        raise RuntimeError("no such instruction")


def _missing() -> Ops:
    raise KernelsMissing("this machine has no abacus")


def _metal() -> Ops:
    raise KernelsMissing("there is no C++ compiler: install one")


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctoring, "PROBE_BYTES", 1 << 12)


def _report(monkeypatch: pytest.MonkeyPatch, out: Path, **backends: Any) -> tuple[int, dict[str, str]]:
    monkeypatch.setattr(loading, "BACKENDS", {name: ("cpu", load) for name, load in backends.items()})
    code = doctoring.doctor({"out": out})
    return code, json.loads(out.read_text())["kernels"]


def test_a_backend_that_is_right_and_one_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, kernels = _report(monkeypatch, tmp_path / "report.json", right=ReferenceOps, abacus=_missing)
    assert code == 0
    assert kernels["abacus"] == "none: this machine has no abacus"
    for words, dtype in zip(kernels["right silu_mul"].split(", "), DTYPES, strict=True):
        name = str(dtype).removeprefix("torch.")
        assert re.fullmatch(rf"{name} off by 0e\+00 in \d+\.\d ms", words)


def test_a_model_is_described_without_being_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_random_model("qwen3_5", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert doctoring.doctor({"model": str(tmp_path)}) == 0
    told = capsys.readouterr().out
    state = 2 * (96 * 4 * 2 + 4 * 16 * 8 * 4)  # two layers: inputs of a convolution in 16 bits, a state in 32
    assert re.search(rf"2 with states +{state / 1024:.1f} KiB a text", told)
    assert re.search(r"paged +yes; shares common prefixes", told)
    assert re.search(r"streaming +no: ", told)
    assert doctoring.doctor({"model": str(tmp_path / "missing")}) == 1
    assert "missing" in capsys.readouterr().err


def test_a_fault_is_named_and_ends_with_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, kernels = _report(monkeypatch, tmp_path / "report.json", broken=Raising)
    assert code == 1
    assert kernels["broken silu_mul"].startswith("float32 FAULT: RuntimeError: no such instruction")
    assert "FAULT" not in kernels["broken rope"]


def test_of_an_emulated_device_it_is_told_whether_it_is_usable_or_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = {"metal-emulated": ("metal-emulated", ReferenceOps), "metal-checked": ("metal-checked", _metal)}
    monkeypatch.setattr(loading, "BACKENDS", rows)
    kernels = doctoring.make_report()["kernels"]
    assert kernels == {
        "metal-emulated": "usable: --device metal-emulated",
        "metal-checked": "none: there is no C++ compiler: install one",
    }


def test_a_mac_tells_what_it_is_in_a_block_to_copy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 11 << 30)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 512 << 20)
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "mac_ver", lambda: ("26.1", ("", "", ""), "arm64"))
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, "Apple M9\n"))
    _report(monkeypatch, tmp_path / "report.json", right=ReferenceOps)
    printed = capsys.readouterr().out
    told = json.loads(printed.split("```json\n")[1].split("```")[0])
    assert told == json.loads((tmp_path / "report.json").read_text())
    assert told["machine"]["processor"] == "Apple M9"
    assert told["devices"]["mps"] == "macOS 26.1; 11.0 GiB recommended, 0.5 GiB of it taken by this process"


def test_a_report_that_cannot_be_written_is_printed_and_the_exit_code_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loading, "BACKENDS", {"right": ("cpu", ReferenceOps)})
    out = tmp_path / "nowhere" / "report.json"
    assert doctoring.doctor({"out": out}) == 1
    printed = capsys.readouterr()
    assert (
        f"cannot write the report to {out} (No such file or directory): choose another file with --out" in printed.err
    )
    assert "right silu_mul" in json.loads(printed.out.split("```json\n")[1].split("```")[0])["kernels"]
