"""Reads the tensors of a GGUF file one by one, with the names and layout of Hugging Face.

Matrices can stay in the blocks of the file; else, and if they are of a type that no kernel knows, they are dequantized.
What llama.cpp's converter changes (order of rows, offsets of norms) is changed back.
"""

from __future__ import annotations

import re
from collections.abc import Container
from itertools import pairwise
from math import prod
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from kernels.weights.block_formats import FORMATS, BlockTensor
from kernels.weights.stored import dequantize_weight
from server.models.errors import ModelError
from server.models.formats.gguf_config import GGUFMetadata
from server.models.formats.gguf_file import TensorInfo, read_header
from server.models.formats.mmap import map_bytes
from server.models.weights import Matrix, Shape, check_finite, check_shape

_TENSOR_NAME = re.compile(r"(?:model\.)?(?:layers\.(\d+)\.)?(.+)\.(weight|bias)")
_TORCH_DTYPES = {  # types that torch has
    gguf.GGMLQuantizationType.F32: torch.float32,
    gguf.GGMLQuantizationType.F16: torch.float16,
    gguf.GGMLQuantizationType.BF16: torch.bfloat16,
}


class GGUFWeights:
    """The weights of a GGUF file; implements `server.models.weights.Weights`."""

    def __init__(
        self, file: Path, dtype: torch.dtype, device: torch.device, *, kept_formats: Container[str] = ()
    ) -> None:
        """Open a file and check its tensors. Matrices in `kept_formats` stay as they are stored, others become `dtype`.

        Raises ModelError if the file is truncated, or has tensors of a type that cannot be read.
        """
        header = read_header(file, vocabulary=False)
        self._file = header.file.resolve()
        self._keys = GGUFMetadata(header)
        # The user knows the files themselves, not the links to them in the cache.
        files = {tensor.file: tensor.file.resolve() for tensor in header.tensors.values()}
        self._tensors = {name: tensor._replace(file=files[tensor.file]) for name, tensor in header.tensors.items()}
        self._dtype, self._device = dtype, device
        self._kept_formats = kept_formats
        for name, tensor in self._tensors.items():
            self._check_tensor(name, tensor)
        self._check_no_overlap()

    def __contains__(self, name: str) -> bool:
        return self._get_stored_name(name) in self._tensors

    def get(self, name: str, shape: Shape) -> Tensor:
        tensor = dequantize_weight(self._load_tensor(name, shape))
        if self._keys.arch_spec.norm_offset and name.endswith("norm.weight"):
            tensor = tensor.float() - self._keys.arch_spec.norm_offset
        return check_finite(self.describe(name), tensor.to(device=self._device, dtype=self._dtype))

    def matrix(self, name: str, shape: Shape) -> Matrix:
        found = self._load_tensor(name, shape)
        if isinstance(found, BlockTensor) and found.format.name in self._kept_formats:
            if not found.halves().isfinite().all():
                raise ModelError(f"{self.describe(name)} has scales that are NaN or infinite: fetch the file again")
            return found.to(self._device)
        return self.get(name, shape)

    embedding = matrix

    def _load_tensor(self, name: str, shape: Shape) -> Tensor | BlockTensor:
        """Return a tensor on the CPU, with rows in Hugging Face's order. Raises ModelError for wrong names, shapes."""
        stored = self._get_stored_name(name)
        info = None if stored is None else self._tensors.get(stored)
        if info is None:
            raise ModelError(f"{self._file} has no tensor {stored or name!r}; is the file complete?")
        check_shape(self.describe(name), info.shape, shape, "its metadata")
        found = self._read_tensor(info)
        if self._keys.arch_spec.permuted and (heads := self._count_heads(name)):
            rows = _make_row_order(found.shape[0], heads)
            found = found.rows(rows) if isinstance(found, BlockTensor) else found[rows]
        return found

    def describe(self, name: str) -> str:
        stored = self._get_stored_name(name)
        info = self._tensors.get(stored or "")
        return f"{info.file if info else self._file}: tensor {stored!r}"

    def _get_stored_name(self, name: str) -> str | None:
        """Return a tensor's name in the GGUF file; None if the architecture has no such tensor."""
        match = _TENSOR_NAME.fullmatch(name)
        if match is None or match[2] not in self._keys.arch_spec.names:
            return None
        prefix = "" if match[1] is None else f"blk.{match[1]}."
        return f"{prefix}{self._keys.arch_spec.names[match[2]]}.{match[3]}"

    def _count_heads(self, name: str) -> int | None:
        """Return the number of heads in the rows of q_proj or k_proj (weight or bias); None for other tensors."""
        match = _TENSOR_NAME.fullmatch(name)
        num_heads = {"self_attn.q_proj": self._keys.heads, "self_attn.k_proj": self._keys.kv_heads}
        return num_heads.get(match[2]) if match else None

    def _read_tensor(self, tensor: TensorInfo) -> Tensor | BlockTensor:
        kind = gguf.GGMLQuantizationType(tensor.type)
        data = map_bytes(tensor.file, tensor.offset, compute_nbytes(tensor))
        if kind in _TORCH_DTYPES:
            return data.view(_TORCH_DTYPES[kind]).view(tensor.shape)
        rows = data.view(*tensor.shape[:-1], -1)
        if kind.name in FORMATS and rows.dim() == 2:
            return BlockTensor(rows, FORMATS[kind.name])
        return torch.from_numpy(gguf.quants.dequantize(rows.numpy(), kind)).view(tensor.shape)

    def _check_tensor(self, name: str, tensor: TensorInfo) -> None:
        try:
            kind = gguf.GGMLQuantizationType(tensor.type)
            if kind not in _TORCH_DTYPES:
                gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except (ValueError, KeyError, NotImplementedError):
            raise ModelError(
                f"{tensor.file}: tensor {name!r} is of type {_type_name(tensor.type)}, which cannot be read; "
                "take a file in F32, F16, BF16, Q8_0, Q4_0 or a K-quant"
            ) from None
        if tensor.shape and tensor.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            raise ModelError(
                f"{tensor.file}: tensor {name!r} of type {kind.name} has rows of {tensor.shape[-1]} numbers, not "
                "a multiple of the type's block size: fetch the file again"
            )
        if tensor.offset + compute_nbytes(tensor) > tensor.file.stat().st_size:
            raise ModelError(f"{tensor.file} is cut off before the end of tensor {name!r}: fetch it again")

    def _check_no_overlap(self) -> None:
        """Raise ModelError if two tensors share bytes."""
        ordered = sorted(
            (tensor.file, tensor.offset, compute_nbytes(tensor), name) for name, tensor in self._tensors.items()
        )
        for (file, start, size, name), (next_file, following, _, other) in pairwise(ordered):
            if file == next_file and start + size > following:
                raise ModelError(f"{file}: tensors {name!r} and {other!r} overlap: fetch the file again")


def compute_nbytes(tensor: TensorInfo) -> int:
    """Return the number of bytes that a tensor takes in the file."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.type)]
    return prod(tensor.shape) // block * size


def _type_name(kind: int) -> str:
    try:
        return gguf.GGMLQuantizationType(kind).name
    except ValueError:
        return str(kind)


def _make_row_order(rows: int, heads: int) -> Tensor:
    """Return, for each row of q_proj or k_proj in Hugging Face's order, its row in the GGUF file.

    RoPE rotates the pairs of dimensions (i, D / 2 + i) of a head in this project, and (2i, 2i + 1) in llama.cpp.
    """
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()
