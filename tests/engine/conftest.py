"""Fixtures of the engine's tests: a tiny random model on disk, its expected texts, a fake MPS device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import Qwen2Config

from kernels import backends as loading
from server.engine import build
from tests.engine.expected_tokens import Reference
from tests.engine.fake_mps import FakeMps, install
from tests.engine.sync_free_ops import SyncFreeOps
from tests.models.random_models import CONFIGS, load_decoder, save_random_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a random model of two layers with full attention."""
    directory = tmp_path_factory.mktemp("tiny")
    fewer = {"num_hidden_layers": 2, "layer_types": None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONFIGS, "two_layers", Qwen2Config(**(CONFIGS["qwen2"].to_dict() | fewer)))
        save_random_model("two_layers", directory)
    return directory


@pytest.fixture(scope="session")
def tiny_windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a random model of three layers, two of which have windows of 16 tokens."""
    directory = tmp_path_factory.mktemp("tiny_windows")
    save_random_model("qwen2_windows", directory)
    return directory


@pytest.fixture
def mps(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMps]:
    """Install a fake MPS device, whose operations never synchronize."""
    fake = FakeMps()
    install(monkeypatch, fake)
    monkeypatch.setattr(loading, "BACKENDS", {"metal": ("mps", SyncFreeOps)})
    monkeypatch.setattr(loading, "check_ops", lambda *_: [])  # they know no padding
    monkeypatch.setattr(build, "find_memory_fault", lambda *_: None)  # takes seconds with emulated tensors
    loading._check_backend.cache_clear()
    with fake:
        yield fake
    loading._check_backend.cache_clear()


@pytest.fixture(scope="session")
def reference(tiny: Path) -> Reference:
    """Return the expected texts of `tiny`, computed without a cache."""
    return Reference(load_decoder(tiny))
