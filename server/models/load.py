"""Chooses who computes a model: the lean decoder for the families it knows, transformers for all others."""

from __future__ import annotations

from pathlib import Path

import torch

from config.settings import ModelImpl
from kernels.ops import Ops
from server.models.base import Model
from server.models.config import Facts, ModelConfig, load_config
from server.models.decoder import Decoder
from server.models.errors import ModelError, UnknownModelError
from server.models.gguf_directory import gguf_of
from server.models.gguf_weights import GGUFWeights
from server.models.hf import TransformersModel, facts_of
from server.models.weights import Safetensors, Weights


def describe(directory: Path, impl: ModelImpl) -> Facts:
    """What is known before the weights are read. Raises ModelError."""
    config = _lean_config(directory, impl)
    return facts_of(directory) if config is None else config.facts


def load_model(
    directory: Path,
    impl: ModelImpl,
    *,
    ops: Ops,
    dtype: torch.dtype,
    weights: torch.dtype,
    device: torch.device,
    positions: int,
) -> Model:
    """The model ready to run, for texts of up to `positions` tokens; `weights` are kept in that dtype.

    Raises ModelError.
    """
    config = _lean_config(directory, impl)
    if config is not None:
        return Decoder(config, _weights(directory, weights, device), ops, dtype, positions=positions)
    if weights != dtype:
        raise ModelError(
            f"weights in {weights} under activations in {dtype} are for the lean decoder: give --weights auto"
        )
    return TransformersModel(directory, dtype, device, positions=positions)


def _lean_config(directory: Path, impl: ModelImpl) -> ModelConfig | None:
    """None: transformers computes it."""
    if gguf_of(directory) is not None:
        if impl == "transformers":
            raise ModelError("a GGUF file is computed by the lean decoder only: leave --model-impl out")
        return load_config(directory)
    if impl == "transformers":
        return None
    try:
        return load_config(directory)
    except UnknownModelError:
        if impl == "lean":
            raise
        return None


def _weights(directory: Path, dtype: torch.dtype, device: torch.device) -> Weights:
    file = gguf_of(directory)
    return Safetensors(directory, dtype, device) if file is None else GGUFWeights(file, dtype, device)
