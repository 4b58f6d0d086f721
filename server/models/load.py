"""Loads a model with the lean decoder if that supports its family, otherwise with transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from config.settings import ModelImpl
from kernels.ops import Ops
from server.models.base import Model
from server.models.config import ModelConfig, ModelInfo, load_config
from server.models.decoder import Decoder
from server.models.errors import ModelError, UnknownModelError
from server.models.files.end_tokens import warn_invalid_eos_ids
from server.models.formats.gguf_directory import find_gguf_file
from server.models.formats.mlx_weights import MLXWeights, is_mlx
from server.models.formats.quantized import open_quantized_weights
from server.models.weights import Safetensors, Weights, WeightsConfig


def read_model_info(directory: Path, impl: ModelImpl) -> ModelInfo:
    """Return the model's vocabulary size, context length, end tokens and dtype, without reading weights.

    Raises ModelError if the model cannot be served.
    """
    config = load_lean_config(directory, impl)
    if config is None:
        # Imported here, so that other models start without transformers
        from server.models.transformers_backend.loading import read_transformers_info

        info = read_transformers_info(directory)
    else:
        info = config.info
    warn_invalid_eos_ids(directory, info.vocab_size)
    return info


def load_model(
    directory: Path,
    impl: ModelImpl,
    *,
    ops: Ops,
    dtype: torch.dtype,
    weights: WeightsConfig,
    device: torch.device,
    positions: int,
) -> Model:
    """Return the model ready to run, for texts of up to `positions` tokens; `weights` is their dtype and format.

    Raises ModelError if the model, or the requested format of its weights, is not supported.
    """
    config = load_lean_config(directory, impl)
    if config is not None:
        with _open_weights(directory, config, weights, ops, device) as opened:
            return Decoder(config, opened, ops, dtype, positions=positions)
    if weights.format is not None:
        raise ModelError(
            f"{directory}: this model is computed by transformers, and only the lean decoder can quantize weights: "
            "give --weights auto, or leave --model-impl out"
        )
    if weights.dtype != dtype:
        raise ModelError(
            f"{directory}: weights in {weights.dtype} with activations in {dtype} are for the lean decoder only: "
            "give --weights auto"
        )
    from server.models.transformers_backend.model import TransformersModel

    return TransformersModel(directory, dtype, device, positions=positions)


def load_lean_config(directory: Path, impl: ModelImpl) -> ModelConfig | None:
    """Return the config for the lean decoder; None if transformers computes the model."""
    if find_gguf_file(directory) is not None or is_mlx(directory):
        if impl == "transformers":
            kind = "an MLX checkpoint" if find_gguf_file(directory) is None else "a GGUF file"
            raise ModelError(f"{kind} is computed by the lean decoder only: leave --model-impl out")
        return load_config(directory)
    if impl == "transformers":
        return None
    try:
        return load_config(directory)
    except UnknownModelError:
        if impl == "lean":
            raise
        return None


@contextmanager
def _open_weights(
    directory: Path, config: ModelConfig, kept: WeightsConfig, ops: Ops, device: torch.device
) -> Iterator[Weights]:
    """Yield the checkpoint's weights, quantized if `kept` has a format; they are closed after the `with` block."""
    if kept.format is None:
        yield _open_checkpoint(directory, config, kept, kept.dtype, ops, device)
        return
    # Weights to be quantized are read in the checkpoint's dtype: values are rounded only once, by quantization.
    checkpoint = _open_checkpoint(directory, config, kept, getattr(torch, config.dtype), ops, device)
    with open_quantized_weights(checkpoint, directory, kept, device, config.num_layers) as weights:
        yield weights


def _open_checkpoint(
    directory: Path, config: ModelConfig, kept: WeightsConfig, dtype: torch.dtype, ops: Ops, device: torch.device
) -> Weights:
    """Open the weights of a GGUF, MLX or safetensors checkpoint; those that are not quantized become `dtype`."""
    if (file := find_gguf_file(directory)) is not None:
        # GGUFWeights is imported here, so that other models start without gguf
        from server.models.formats.gguf_weights import GGUFWeights

        return GGUFWeights(file, dtype, device, kept_formats=ops.block_formats if kept.as_stored else ())
    if not is_mlx(directory):
        return Safetensors(directory, dtype, device)
    if any(layer.experts for layer in config.layers):
        raise ModelError(
            f"{directory}: MLX checkpoints of mixtures of experts cannot be read: use the unquantized checkpoint, and "
            "give --weights int4 or int8"
        )
    return MLXWeights(directory, dtype, device, as_stored=kept.as_stored)
