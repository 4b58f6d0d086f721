"""Skips tests that this machine cannot run: some need the emulator and its C++ compiler, test_device.py needs a Mac."""

from __future__ import annotations

from pathlib import Path

from kernels.backends import list_backends

ON_THE_GPU = ("test_device.py",)
_there = {backend.name for backend in list_backends() if backend.missing is None}
collect_ignore = [
    file.name
    for file in Path(__file__).parent.glob("test_*.py")
    if ("metal" if file.name in ON_THE_GPU else "metal-emulated") not in _there
]
