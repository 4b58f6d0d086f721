"""Skips tests that this machine cannot run: they need the emulator, for its fibers, and its C++ compiler."""

from __future__ import annotations

from kernels.backends import list_backends

if "metal-emulated" not in {backend.name for backend in list_backends() if backend.missing is None}:
    collect_ignore_glob = ["test_*.py"]
