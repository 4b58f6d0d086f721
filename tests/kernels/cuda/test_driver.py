"""Kernels are loaded and launched through NVIDIA's own bindings, by a driver that runs them on the CPU.

The bindings are not installed with the tests, so this is marked slow; `make check-metal` runs it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import metal_emulator
from kernels.selfcheck.op_db import OPS

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("cuda") is None, reason="needs pip install kvmux[metal-check]")
def test_every_operation_is_the_references(tmp_path: Path) -> None:
    compiler, driver = metal_emulator.Compiler.find().command, tmp_path / "libcuda.so.1"
    subprocess.run([*compiler, "-shared", "-fPIC", HERE / "host/libcuda.cpp", "-o", driver, "-ldl"], check=True)
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.cuda.run_with_driver", tmp_path],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == [f"{op.full_name} None" for op in OPS], done.stderr
