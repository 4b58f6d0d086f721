"""The Metal backend says what it lacks."""

from __future__ import annotations

import sys

import pytest

from kernels.device import KernelsMissing
from kernels.metal import runtime


def test_without_the_emulator_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "metal_emulator", None)  # as if it was not installed
    with pytest.raises(KernelsMissing, match=r"not installed: in a copy of .* run pip install \./metal_emulator"):
        runtime.load_emulated.__wrapped__()
    with pytest.raises(KernelsMissing, match="not installed"):
        runtime.register_emulated_device()
