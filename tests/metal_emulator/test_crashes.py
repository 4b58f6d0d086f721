"""A kernel that crashes ends its own launch with an error that names it: pytest names its test, and goes on."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = """
#include <metal_stdlib>
using namespace metal;
kernel void right(device float* x, uint i [[thread_position_in_grid]]) { x[i] = 2; }
kernel void null_write(device float* x, uint i [[thread_position_in_grid]]) {
  if (i == 5) *(device float*)ulong(x[i]) = 1;
}
kernel void null_read(device float* x, uint i [[thread_position_in_grid]]) {
  if (i == 5) x[i] = *(const device float*)(ulong(x[i]) + 8);
}
kernel void endless_read(device float* x, uint i [[thread_position_in_grid]]) {
  const volatile device float* all = x;
  for (ulong at = 0; i == 5; ++at) x[i] = all[at];
}
kernel void trap(device float* x, uint i [[thread_position_in_grid]]) {
  if (i == 5) __builtin_trap();
}
kernel void aborts(device float* x, uint i [[thread_position_in_grid]]) {
  if (i == 5) __builtin_abort();
}
"""

TESTS = """
import pytest
import torch

from metal_emulator import compile_shader



@pytest.mark.parametrize("kernel", ["null_write", "null_read", "endless_read", "trap", "aborts"])
def test_crash(kernel):
    getattr(compile_shader(KERNELS, checked=CHECKED), kernel)(torch.zeros(64), threads=64, group_size=32)


def test_after():
    x = torch.zeros(64)
    compile_shader(KERNELS, checked=CHECKED).right(x, threads=64, group_size=32)
    assert x.eq(2).all()
"""
SIGNALS = {  # by kernel, of the fast build
    "null_write": "SIGSEGV at address 0x0",
    "null_read": "SIGSEGV at address 0x8",
    "endless_read": "SIGSEGV at address 0x",
    "trap": "SIGILL at address 0x",
    "aborts": "SIGABRT",
}


@pytest.mark.parametrize("checked", [False, True], ids=["fast", "checked"])
def test_the_tests_of_crashing_kernels_are_named_and_the_others_go_on(tmp_path: Path, checked: bool) -> None:
    (tmp_path / "test_planted.py").write_text(f"CHECKED = {checked}\nKERNELS = {KERNELS!r}\n{TESTS}")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rf", "test_planted.py"]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[4]), "COLUMNS": "300"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{len(SIGNALS)} failed, 1 passed" in done.stdout
    for kernel, words in SIGNALS.items():
        (line,) = [each for each in done.stdout.splitlines() if each.startswith("FAILED") and f"[{kernel}]" in each]
        found = f"KernelFault: {kernel}: "
        if not checked or kernel in ("trap", "aborts"):
            found += "crash by thread 5 of group 0: "
            assert platform.machine() != "x86_64" or words in line
        else:
            found += "out of bounds: "
        assert found in line, line


def test_a_signal_from_elsewhere_is_not_a_fault_of_a_kernel() -> None:
    """Between launches the handlers are those of before: here that of Python, whose default ends the process."""
    program = (
        "import os, signal, torch\n"
        "from metal_emulator import compile_shader\n"
        f"source = '''{KERNELS}'''\n"
        "compile_shader(source).right(torch.zeros(64), threads=64, group_size=32)\n"
        "os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=200, check=False)
    assert done.returncode == -signal.SIGSEGV
