"""A model with random weights that may end a text by itself, and its vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.text.encoder import Encoder
from server.text.vocabulary import Vocabulary
from tests.models.random_models import save_random_model

EOS = 1  # of the random models


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a random model that ends a text when it draws EOS."""
    directory = tmp_path_factory.mktemp("constrained")
    save_random_model("qwen2", directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return directory


@pytest.fixture(scope="module")
def vocabulary(model: Path) -> Vocabulary:
    return Encoder.from_directory(model).vocabulary
