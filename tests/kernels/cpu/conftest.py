"""Skips the tests of the C++ kernels if they were not built, for example without a compiler."""

from __future__ import annotations

from tests.kernels.backend_matrix import BACKENDS

collect_ignore = [] if any(name.startswith("cpu-") for name in BACKENDS) else ["test_backend.py", "test_formats.py"]
