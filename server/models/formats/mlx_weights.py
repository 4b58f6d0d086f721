"""Reads checkpoints that mlx-lm has quantized, and keeps their weights quantized or dequantizes them.

A quantized matrix is three tensors: `name.weight` has the numbers packed into uint32 (lowest bits first), `name.scales`
and `name.biases` have one value for each group of columns. "quantization" in config.json has the bits and the group
size, for all modules and, by name, for single ones. A tensor without scales is not quantized.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from config.wording import explain_problem
from kernels.weights.quantization import QuantizedTensor, check_format, dequantize
from server.models.config_file import Count, read_json
from server.models.errors import ModelError
from server.models.weights import FLOAT_DTYPES, Matrix, Safetensors, Shape, check_shape


class _Quantization(BaseModel):
    """Group size, bits and mode: the entry "quantization" of config.json for all modules, or its entry for one."""

    model_config = ConfigDict(strict=True, extra="allow")

    group_size: Count
    bits: Count
    mode: Literal["affine"] = "affine"


def is_mlx(directory: Path) -> bool:
    """Return whether a directory holds an MLX checkpoint. Raises ModelError if config.json cannot be read."""
    return read_json(directory / "config.json").get("quantization") is not None


class MLXWeights:
    """The weights of an MLX checkpoint; implements `server.models.weights.Weights`."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device, *, as_stored: bool) -> None:
        """Open a checkpoint. With `as_stored`, quantized weights stay quantized; otherwise they become `dtype`.

        Raises ModelError if its files cannot be read.
        """
        self._config = directory / "config.json"
        self._tensors = Safetensors(directory, dtype, device)
        self._quantization: Any = read_json(self._config)["quantization"]
        self._dtype, self._device = dtype, device
        self._as_stored = as_stored

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def describe(self, name: str) -> str:
        return self._tensors.describe(name)

    def get(self, name: str, shape: Shape) -> Tensor:
        found = self._load_tensor(name, shape)
        return dequantize(found).to(self._dtype) if isinstance(found, QuantizedTensor) else found

    def matrix(self, name: str, shape: Shape) -> Matrix:
        return self._load_tensor(name, shape) if self._as_stored else self.get(name, shape)

    embedding = matrix

    def _load_tensor(self, name: str, shape: Shape) -> Tensor | QuantizedTensor:
        module = name.removesuffix(".weight")
        parts = [f"{module}.{part}" for part in ("weight", "scales", "biases")]
        if name != parts[0] or (
            parts[1] not in self._tensors and self._tensors.read_tensor(name).dtype in FLOAT_DTYPES
        ):
            return self._tensors.get(name, shape)
        packed, scale, offset = (self._tensors.read_tensor(part) for part in parts)
        scheme = self._get_quantization(self._tensors.get_stored_name(name).removesuffix(".weight"))
        weight = _make_quantized(packed, scale, offset, scheme, f"{self._config}: {module}")
        check_shape(self._tensors.describe(name), weight.shape, shape)
        return weight.to(self._device)

    def _get_quantization(self, module: str) -> _Quantization:
        """Return the bits and group size of a module by its name in the files. Raises ModelError for invalid ones."""
        given = self._quantization
        if isinstance(given, dict) and isinstance(given.get(module), dict):
            given = given[module]
        try:
            return _Quantization.model_validate(given)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            location = ".".join(map(str, ("quantization", *fault["loc"])))
            message = explain_problem(f"{location} of {module}", fault)
            raise ModelError(
                f"{self._config}: {message}; of MLX's modes of quantization only affine can be read: convert the model "
                "with `mlx_lm.convert -q --q-mode affine`"
            ) from None


def _make_quantized(packed: Tensor, scale: Tensor, offset: Tensor, scheme: _Quantization, what: str) -> QuantizedTensor:
    """Return a quantized matrix; `what` names it in errors. Raises ModelError if its tensors contradict config.json."""
    if not all(part.dim() == 2 for part in (packed, scale, offset)):
        raise ModelError(f"{what}: weight, scales and biases must be matrices; is the checkpoint complete?")
    groups = scale.shape[-1]
    width = groups * scheme.group_size
    try:
        check_format(width, scheme.bits, scheme.group_size)
    except ValueError as error:
        raise ModelError(f"{what}: {error}; convert the model with `mlx_lm.convert -q --q-bits 4`, or 8") from None
    shapes = tuple(packed.shape), tuple(scale.shape), tuple(offset.shape)
    outputs = len(packed)
    if shapes != ((outputs, width * scheme.bits / 32), (outputs, groups), (outputs, groups)) or (
        (packed.dtype, offset.dtype) != (torch.uint32, scale.dtype) or scale.dtype not in FLOAT_DTYPES
    ):
        raise ModelError(
            f"{what} is not in {scheme.bits} bits and groups of {scheme.group_size}, as quantization says: weight, "
            f"scales and biases are {packed.dtype} {shapes[0]}, {scale.dtype} {shapes[1]} and {offset.dtype} "
            f"{shapes[2]}"
        )
    return QuantizedTensor(packed.view(torch.uint8), scale, offset, scheme.bits, scheme.group_size)
