"""Tests of the C++ kernels are collected where there are any: without a compiler all others still pass."""

from __future__ import annotations

from tests.kernels.backend_matrix import BACKENDS

collect_ignore = [] if any(name.startswith("cpu-") for name in BACKENDS) else ["test_backend.py"]
