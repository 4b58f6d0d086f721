"""What is said of a model before it is loaded is what the loaded model says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.reference.backend import ReferenceOps
from kernels.types import LayerSpec
from server.models.load import load_model
from server.models.shape import read_model_shape
from server.models.weights import WeightsConfig
from tests.models.random_models import CONFIGS, FALLBACK, HYBRIDS, save_random_model


@pytest.mark.parametrize("name", [*CONFIGS, *FALLBACK, *HYBRIDS])
def test_a_shape_is_that_of_the_model(name: str, tmp_path: Path) -> None:
    save_random_model(name, tmp_path)
    model = load_model(
        tmp_path,
        "auto",
        ops=ReferenceOps(),
        dtype=torch.float32,
        weights=WeightsConfig(torch.float32),
        device=torch.device("cpu"),
        positions=100,
    )
    shape = read_model_shape(tmp_path)
    assert (shape.impl, shape.info) == (model.impl, model.info)
    assert [*map(describe, shape.attention)] == [*map(describe, model.layer_specs)]
    found, expected = (
        [[tuple(tensor.shape) for tensor in spec] for spec in specs] for specs in (shape.states, model.state_specs)
    )
    assert found == expected
    assert shape.file_bytes == (tmp_path / "model.safetensors").stat().st_size


def describe(layer: LayerSpec) -> tuple[object, ...]:
    """Return all of a layer's attention but tensors and functions."""
    return (*layer[:7], layer.sink_logits is None, layer.rotate is None)
