"""The tensors of a GGUF file, by the decoder's names and as the decoder has them: dequantised, one by one, on demand.

Owns the way back from what llama.cpp's converter does to weights. Knows no layer.
"""

from __future__ import annotations

import re
from math import prod
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from server.models.errors import ModelError
from server.models.gguf_config import Keys
from server.models.gguf_file import TensorInfo, read_header
from server.models.weights import Matrix

_NAME = re.compile(r"(?:model\.)?(?:layers\.(\d+)\.)?(.+)\.(weight|bias)")
_AS_THEY_ARE = {  # torch reads these itself
    gguf.GGMLQuantizationType.F32: torch.float32,
    gguf.GGMLQuantizationType.F16: torch.float16,
    gguf.GGMLQuantizationType.BF16: torch.bfloat16,
}


class GGUFWeights:
    """Implements `server.models.weights.Weights`."""

    def __init__(self, file: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ModelError if the file is cut off, or holds tensors of a type that cannot be read."""
        header = read_header(file)
        self._file = file.resolve()
        self._keys = Keys(header)
        self._tensors = header.tensors
        self._dtype = dtype
        self._device = device
        # A private mapping, which torch may take for writable: a tensor that is used as it lies costs no copy.
        self._bytes = np.memmap(file, mode="c")
        for name, tensor in self._tensors.items():
            self._check(name, tensor)

    def __contains__(self, name: str) -> bool:
        return self._stored(name) in self._tensors

    def get(self, name: str) -> Tensor:
        """The tensor of that name. Raises ModelError if there is none."""
        stored = self._stored(name)
        found = None if stored is None else self._tensors.get(stored)
        if found is None:
            raise ModelError(f"{self._file} has no tensor {stored or name!r}; is the file complete?")
        tensor = self._dequantised(found)
        row = self._keys.row
        if row.permuted and (heads := self._heads(name)):
            tensor = _in_halves(tensor, heads)
        if row.norm_offset and name.endswith("norm.weight"):
            tensor = tensor.float() - row.norm_offset
        return tensor.to(device=self._device, dtype=self._dtype)

    def embedding(self, name: str) -> Matrix:
        return self.get(name)

    def matrix(self, name: str) -> Matrix:
        return self.get(name)

    def _stored(self, name: str) -> str | None:
        """The file's name for a tensor; None: its architecture has no such thing."""
        match = _NAME.fullmatch(name)
        if match is None or match[2] not in self._keys.row.names:
            return None
        at = "" if match[1] is None else f"blk.{match[1]}."
        return f"{at}{self._keys.row.names[match[2]]}.{match[3]}"

    def _heads(self, name: str) -> int | None:
        """Of a matrix, or a bias, whose rows are queries or keys."""
        match = _NAME.fullmatch(name)
        of = {"self_attn.q_proj": self._keys.heads, "self_attn.k_proj": self._keys.kv_heads}
        return of.get(match[2]) if match else None

    def _dequantised(self, tensor: TensorInfo) -> Tensor:
        kind = gguf.GGMLQuantizationType(tensor.type)
        data = self._bytes[tensor.offset : tensor.offset + _size(tensor)]
        if kind in _AS_THEY_ARE:
            return torch.from_numpy(data).view(_AS_THEY_ARE[kind]).view(tensor.shape)
        rows = data.reshape(*tensor.shape[:-1], -1)
        return torch.from_numpy(gguf.quants.dequantize(rows, kind)).view(tensor.shape)

    def _check(self, name: str, tensor: TensorInfo) -> None:
        try:
            kind = gguf.GGMLQuantizationType(tensor.type)
            if kind not in _AS_THEY_ARE:
                gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except (ValueError, KeyError, NotImplementedError):
            raise ModelError(
                f"{self._file}: tensor {name!r} is of type {_type_name(tensor.type)}, which cannot be read; "
                "take a file in F32, F16, BF16, Q8_0, Q4_0 or a K-quant"
            ) from None
        if tensor.offset + _size(tensor) > len(self._bytes):
            raise ModelError(f"{self._file} is cut off before the end of tensor {name!r}: fetch it again")


def _size(tensor: TensorInfo) -> int:
    """In bytes."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.type)]
    return prod(tensor.shape) // block * size


def _type_name(kind: int) -> str:
    try:
        return gguf.GGMLQuantizationType(kind).name
    except ValueError:
        return str(kind)


def _in_halves(x: Tensor, heads: int) -> Tensor:
    """[heads * D, ...]: llama.cpp turns dimension 2i with 2i + 1, the decoder i with D / 2 + i."""
    return x.view(heads, -1, 2, *x.shape[1:]).transpose(1, 2).reshape(x.shape)
