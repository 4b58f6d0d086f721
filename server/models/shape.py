"""What is known of a model before its weights are loaded: what computes it, and what its layers keep of a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from torch import Tensor

from config.settings import ModelImpl
from kernels.states import StateSpec
from kernels.types import LayerSpec
from server.models.config import ModelInfo
from server.models.decoder import make_layer_spec
from server.models.load import load_lean_config


class ModelShape(NamedTuple):
    """A model without its weights."""

    info: ModelInfo
    impl: Literal["lean", "transformers"]
    attention: Sequence[LayerSpec]
    states: Sequence[StateSpec]
    file_bytes: int  # of its weights


def read_model_shape(directory: Path, impl: ModelImpl = "auto") -> ModelShape:
    """Return the shape of a model. Raises ModelError if it cannot be served, as far as that shows without weights."""
    size = sum(file.stat().st_size for file in directory.iterdir() if file.suffix in (".safetensors", ".gguf", ".bin"))
    config = load_lean_config(directory, impl)
    if config is not None:
        # Its keys can be rotated, once there are the tables
        layers = [make_layer_spec(config, each.window)._replace(rotate=_rotate_nothing) for each in config.layers]
        return ModelShape(config.info, "lean", layers, [], size)
    # Imported here, so that other models are described without transformers
    from server.models.transformers_backend.loading import read_transformers_info
    from server.models.transformers_backend.probe import describe_layers

    info = read_transformers_info(directory)
    found = describe_layers(directory, info)
    return ModelShape(info, "transformers", found.attention, found.states, size)


def _rotate_nothing(x: Tensor, delta: Tensor) -> Tensor:
    raise AssertionError("a model without weights computes nothing")
