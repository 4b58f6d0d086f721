"""What the tests of this folder share: a tiny random model on disk, the texts it must write, a device that is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import Qwen2Config

from kernels import backends as loading
from tests.engine.expected_tokens import Reference
from tests.engine.fake_mps import FakeMps, install
from tests.engine.sync_free_ops import SyncFreeOps
from tests.models.random_models import CONFIGS, load_decoder, save_random_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a random model of two layers that see everything."""
    directory = tmp_path_factory.mktemp("tiny")
    fewer = {"num_hidden_layers": 2, "layer_types": None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONFIGS, "two_layers", Qwen2Config(**(CONFIGS["qwen2"].to_dict() | fewer)))
        save_random_model("two_layers", directory)
    return directory


@pytest.fixture(scope="session")
def tiny_windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a random model two of whose three layers see 16 tokens."""
    directory = tmp_path_factory.mktemp("tiny_windows")
    save_random_model("qwen2_windows", directory)
    return directory


@pytest.fixture
def mps(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMps]:
    """A device of that name, with operations that wait for nothing."""
    fake = FakeMps()
    install(monkeypatch, fake)
    monkeypatch.setattr(loading, "BACKENDS", {"metal": ("mps", SyncFreeOps)})
    monkeypatch.setattr(loading, "check_ops", lambda *_: [])  # they know no padding
    loading._check_backend.cache_clear()
    with fake:
        yield fake
    loading._check_backend.cache_clear()


@pytest.fixture(scope="session")
def reference(tiny: Path) -> Reference:
    """What `tiny` writes, computed without any cache."""
    return Reference(load_decoder(tiny))
