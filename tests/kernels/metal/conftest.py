"""Skips tests that this machine cannot run: Metal kernels need a C++ compiler for the emulator, and some need a Mac."""

from __future__ import annotations

from kernels.backends import list_backends

_there = {backend.name for backend in list_backends() if backend.missing is None}
collect_ignore_glob = [] if "metal-emulated" in _there else ["*"]
collect_ignore = [] if "metal" in _there else ["test_device.py"]
