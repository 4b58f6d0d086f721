"""A model of a small shape, made as those of benchmarks are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.bench.small_shape import SMALL_SHAPE
from tools.bench import models
from tools.bench.models import make_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of models; the small one is in it."""
    place = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "LEARNT_VOCAB_SIZE", 600)
        patch.setattr(models, "MAX_TRAINING_FILES", 5)
        make_model(SMALL_SHAPE, place, lambda _: None)
    return place
