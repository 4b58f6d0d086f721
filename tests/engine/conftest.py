"""What the tests of this folder share: a tiny random model on disk, and the texts it must write."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Qwen2Config

from tests.engine.reference import Reference
from tests.models.random_models import CONFIGS, load, save_random


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a random model of two layers that see everything."""
    directory = tmp_path_factory.mktemp("tiny")
    fewer = {"num_hidden_layers": 2, "layer_types": None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONFIGS, "two_layers", Qwen2Config(**(CONFIGS["qwen2"].to_dict() | fewer)))
        save_random("two_layers", directory)
    return directory


@pytest.fixture(scope="session")
def tiny_windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a random model two of whose three layers see 16 tokens."""
    directory = tmp_path_factory.mktemp("tiny_windows")
    save_random("qwen2_windows", directory)
    return directory


@pytest.fixture(scope="session")
def reference(tiny: Path) -> Reference:
    """What `tiny` writes, computed without any cache."""
    return Reference(load(tiny))
