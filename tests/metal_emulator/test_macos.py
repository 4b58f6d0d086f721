"""The emulator's runtime and the C++ kernels compile for a Mac, by the clang and macOS headers of PyPI's ziglang.

It is not installed with the tests, so they are marked slow; `make check-metal` runs them.
"""

from __future__ import annotations

import importlib.util
import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

import metal_emulator

ROOT = Path(__file__).parents[2]
RUNTIME = Path(metal_emulator.__file__).parent / "runtime/runtime.cpp"
TORCH = Path(torch.__file__).parent / "include"
TARGET = ("-target", "aarch64-macos")

pytestmark = [
    pytest.mark.timeout(600),  # a compiler that reads all of torch's headers
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="needs pip install kvmux[metal-check]"),
]


def compile_for_a_mac(source: Path, to: Path, *options: str) -> None:
    command = [sys.executable, "-m", "ziglang", "c++", *TARGET, *options, "-c", str(source), "-o", str(to)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("option", [(), ("-DEMULATOR_UCONTEXT",)])
def test_the_emulators_runtime_compiles(option: tuple[str, ...], tmp_path: Path) -> None:
    compile_for_a_mac(RUNTIME, tmp_path / "runtime.o", "-std=c++17", "-O2", "-Werror", *option)


@pytest.mark.parametrize("source", sorted((ROOT / "kernels/cpu").glob("*.cpp")), ids=lambda source: source.name)
def test_the_cpp_kernels_compile(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the flags of setup.py, but not optimised, as only errors are looked for, and without OpenMP, as on a Mac."""
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    monkeypatch.chdir(ROOT)
    found: dict[str, Any] = runpy.run_path(str(ROOT / "setup.py"))
    flags = [flag for flag in found["FLAGS"] if flag != "-O3"] + found["INSTRUCTION_SETS"]["aarch64"]["neon"]
    folders = [TORCH, TORCH / "torch/csrc/api/include", Path(sysconfig.get_path("include"))]
    defines = ["-DKVMUX_LIBRARY=kvmux_neon", "-DTORCH_EXTENSION_NAME=_neon"]
    compile_for_a_mac(source, tmp_path / "kernel.o", *flags, *defines, *(f"-I{folder}" for folder in folders), "-w")
