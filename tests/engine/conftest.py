"""Fixtures of the engine's tests: a tiny random model on disk, its expected texts, an emulated Mac."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import Qwen2Config

from tests.engine.emulated_mps import DeviceUse, emulated_mps
from tests.engine.expected_tokens import Reference
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
def mps() -> Iterator[DeviceUse]:
    """Let `device=mps` be the emulated device; yield what is asked of it."""
    with emulated_mps() as use:
        yield use


@pytest.fixture(scope="session")
def reference(tiny: Path) -> Reference:
    """Return the expected texts of `tiny`, computed without a cache."""
    return Reference(load_decoder(tiny))
