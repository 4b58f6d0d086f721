"""The backend for NVIDIA GPUs says what it lacks, and is taken by nobody who did not ask for it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from config.errors import SettingsError
from kernels import backends
from kernels.cuda import nvrtc, runtime
from kernels.cuda.cubin_cache import get_cubin
from kernels.device import KernelsMissing, device_of
from kernels.reference.backend import ReferenceOps
from tests.engine.engine_driver import Driver

CPU = device_of("cpu")


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(KernelsMissing, match="no NVIDIA GPU that torch can use"):
        runtime.load.__wrapped__()


def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)  # as if it was not installed
    with pytest.raises(KernelsMissing, match=r"NVRTC is missing .*: install torch's CUDA build"):
        nvrtc.find_compiler()


def test_without_headers_it_says_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bindings = SimpleNamespace(nvrtcVersion=lambda: (0, 13, 0))
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=SimpleNamespace(nvrtc=bindings)))
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(nvrtc=bindings))
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", bindings)
    monkeypatch.setattr(nvrtc, "HEADER", "no_such_header.h")
    with pytest.raises(KernelsMissing, match=r"header no_such_header\.h is missing: .* or set CUDA_HOME"):
        nvrtc.find_compiler()
    (tmp_path / "include").mkdir()
    (tmp_path / "include/no_such_header.h").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert nvrtc.find_compiler() == (bindings, tmp_path / "include")


def test_compiled_kernels_are_kept_for_the_next_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled = []

    def compile_cubin() -> bytes:
        compiled.append(1)
        return b"cubin"

    assert get_cubin(("sm_90", "source"), compile_cubin) == get_cubin(("sm_90", "source"), compile_cubin) == b"cubin"
    assert len(compiled) == 1
    get_cubin(("sm_80", "source"), compile_cubin)
    assert len(compiled) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")  # nothing can be written there
    assert get_cubin(("sm_90", "source"), compile_cubin) == b"cubin"


def test_it_computes_only_if_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "BACKENDS", {"metal-cuda": ("cpu", ReferenceOps)})
    assert backends.load_ops(CPU, torch.float32).backend == "reference"
    assert backends.load_ops(CPU, torch.float32, kernels="metal").backend == "metal-cuda"


def test_kernels_that_were_asked_for_are_not_replaced_in_silence(tmp_path: Path) -> None:
    with pytest.raises(KernelsMissing, match="there are none for this device"):
        backends.load_ops(CPU, torch.float32, kernels="metal")
    with pytest.raises(SettingsError, match="'cpu' is not usable here with kernels 'metal': there are none for"):
        Driver(Path("tiny"), device="cpu", kernels="metal")
