"""The interface through which the decoder loads weights by name (`Weights`), and its implementation for safetensors.

GGUF files (gguf_weights.py), MLX checkpoints (mlx_weights.py) and quantization at load (quantized.py) implement it,
too. Each tensor has its own memory mapping: a tensor that is used as it is on disk is not copied; if a tensor is
converted, its mapping is freed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.weights.stored import StoredWeight
from server.models.config import Dim
from server.models.config_file import read_json, shorten_repr
from server.models.errors import ModelError, first_line
from server.models.formats.mmap import map_bytes

MAX_NAME_LENGTH = 255  # characters of a file name: the limit of file systems
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SAFETENSORS_DTYPES = {  # torch dtypes by their safetensors names: FLOAT_DTYPES and the integers of quantized weights
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
    "U8": torch.uint8,
    "U32": torch.uint32,
}

WHOLE = "model.safetensors"  # the name of a file with all weights
HEAD = "lm_head."  # with which the names of the head's tensors begin

Matrix = StoredWeight  # [out, in]
# An expected shape; its `Dim`s name the keys of config.json from which it comes, for error messages
Shape = Sequence[int]


class WeightFormat(NamedTuple):
    """The block formats (kernels/weights/block_formats.py) to which matrices are quantized at load."""

    name: str  # of the setting `weights`
    usual: str  # of most matrices
    sensitive: str  # of those whose errors cost most: the embedding, the head, and some projections


class WeightsConfig(NamedTuple):
    """The dtype and format in which a loaded model keeps its weights."""

    dtype: torch.dtype  # dtype of weights that are not quantized
    format: WeightFormat | None = None  # format to which matrices are quantized at load; None: they are not
    # Whether matrices that are quantized in the checkpoint stay quantized; else they are dequantized
    as_stored: bool = False
    cache_dir: Path | None = None  # the folder where quantized matrices are cached for the next start; None: no cache


class Weights(Protocol):
    """Loads tensors by their Hugging Face names to the device.

    All methods raise ModelError if the tensor is missing, has another shape, or cannot be read. The shape, which the
    kernels rely on, is checked before memory is allocated.
    """

    def __contains__(self, name: str) -> bool: ...

    def describe(self, name: str) -> str:
        """Return the names of the file and of the tensor in it, for error messages."""
        ...

    def get(self, name: str, shape: Shape) -> Tensor:
        """Return a tensor, dequantized if the checkpoint has it quantized; vectors are checked to be finite."""
        ...

    def embedding(self, name: str, shape: Shape) -> Matrix:
        """Return an embedding matrix, whose rows are looked up; it is never quantized at load."""
        ...

    def matrix(self, name: str, shape: Shape) -> Matrix:
        """Return a matrix for `linear`, quantized if the `WeightsConfig` says so."""
        ...


def check_shape(what: str, found: Shape, shape: Shape, by: str = "config.json") -> None:
    """Raise ModelError if the shape `found` is not `shape`, which `by` demands; `what` names the file and tensor."""
    if tuple(found) != tuple(shape):
        words = ", ".join(dim.description for dim in shape if isinstance(dim, Dim))
        raise ModelError(
            f"{what} is {list(found)}, and by {by} it should be {list(shape)}" + (f" ({words})" if words else "")
        )


def check_finite(what: str, tensor: Tensor) -> Tensor:
    """Return the tensor. Raise ModelError if it is a vector with NaN or infinite values; `what` names it.

    One such value in a norm or a bias spoils every output. Matrices are not checked: that would read all of them.
    """
    if tensor.dim() == 1 and not tensor.isfinite().all():
        raise ModelError(f"{what} has numbers that are NaN or infinite in {tensor.dtype}; is the checkpoint damaged?")
    return tensor


class _TensorInfo(NamedTuple):
    """A tensor's entry in the header of a safetensors file."""

    file: Path
    name: str  # in the file
    dtype: str  # safetensors' name of the dtype, such as "BF16"
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file
    size: int  # number of bytes


class Safetensors:
    """Implements `Weights` for a directory of safetensors files; tensors are converted to `dtype` on `device`."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Read the headers of all files. Raises ModelError if a file cannot be read."""
        self._directory = directory
        self._dtype = dtype
        self._device = device
        found = _find_tensors(directory)
        root = _find_root_prefix(found)
        self._infos = {_strip_root_prefix(name, root): info for name, info in found.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def get(self, name: str, shape: Shape) -> Tensor:
        what = self.describe(name)
        if SAFETENSORS_DTYPES.get(self._infos[name].dtype) not in FLOAT_DTYPES:
            raise self._unsupported_dtype_error(name)
        check_shape(what, self._infos[name].shape, shape)
        return check_finite(what, self.read_tensor(name).to(device=self._device, dtype=self._dtype))

    def embedding(self, name: str, shape: Shape) -> Matrix:
        return self.get(name, shape)

    def matrix(self, name: str, shape: Shape) -> Matrix:
        return self.get(name, shape)

    def read_tensor(self, name: str) -> Tensor:
        """Return a tensor on the CPU, in its stored dtype. Raises ModelError if there is none of that name."""
        self.get_stored_name(name)
        info = self._infos[name]
        if info.dtype not in SAFETENSORS_DTYPES:
            raise self._unsupported_dtype_error(name)
        dtype = SAFETENSORS_DTYPES[info.dtype]
        found = map_bytes(info.file, info.start, info.size)
        if found.data_ptr() % dtype.itemsize:  # not aligned: a mapped tensor may begin at any byte of the file
            found = found.clone()
        return found.view(dtype).view(info.shape)

    def get_stored_name(self, name: str) -> str:
        """Return a tensor's name in its file. Raises ModelError if there is no such tensor."""
        if name not in self._infos:
            raise ModelError(f"{self._directory} has no tensor {name!r}; is the checkpoint complete?")
        return self._infos[name].name

    def describe(self, name: str) -> str:
        stored = self.get_stored_name(name)
        return f"{self._infos[name].file}: tensor {shorten_repr(stored)}"

    def _unsupported_dtype_error(self, name: str) -> ModelError:
        info = self._infos[name]
        return ModelError(
            f"{info.file}: {shorten_repr(info.name)} is of type {info.dtype}: of quantized checkpoints, only MLX's "
            "and GGUF files can be read"
        )


def _read_header(file: Path) -> Iterator[_TensorInfo]:
    """Yield the header's entry of each tensor of a file. Raises ModelError if the file is unreadable or damaged."""
    try:
        with safe_open(file, framework="np"):  # opening checks the header: gaps, overlaps, sizes, types
            pass
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size), object_pairs_hook=_reject_duplicate_keys)
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror or first_line(error)}") from None
    except (SafetensorError, ValueError) as error:
        is_cut_off = "incomplete metadata" in str(error)  # the library's message for a truncated file
        reason = "it is cut off" if is_cut_off else first_line(error)
        raise ModelError(f"cannot read {file}: {reason}; fetch it again") from None
    for name, tensor in header.items():
        if name != "__metadata__":
            start, end = tensor["data_offsets"]
            yield _TensorInfo(file, name, tensor["dtype"], tuple(tensor["shape"]), 8 + size + start, end - start)


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict. Raises ValueError for a duplicate key.

    `safe_open` may have checked only one of two entries with the same key.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice in its header")
    return found


def _find_tensors(directory: Path) -> dict[str, _TensorInfo]:
    """Return every tensor of a directory by name: of the one whole file, or of shards, for which the index decides.

    Raises ModelError if there is no safetensors file, or if the index does not decide between two files.
    """
    whole = directory / WHOLE
    index = {} if whole.is_file() else _read_weight_map(directory)
    files = {directory / Path(name).name for name in index.values()} or set(directory.glob("*.safetensors"))
    files = {whole} if whole in files else files  # as transformers does, whatever lies beside it
    if not files:
        raise ModelError(f"{directory} has no *.safetensors file")
    found: dict[str, _TensorInfo] = {}
    for info in (info for file in sorted(files) for info in _read_header(file)):
        other, named = found.get(info.name), Path(index.get(info.name, "")).name
        if other is not None and named not in (other.file.name, info.file.name):
            raise ModelError(
                f"{directory}: tensor {shorten_repr(info.name)} is in {other.file.name} and in {info.file.name}: "
                "delete the file that is not the model's"
            )
        if other is None or named == info.file.name:
            found[info.name] = info
    return found


def _find_root_prefix(names: Iterable[str]) -> str:
    """Return the prefix of "embed_tokens" in tensor names: "model.", or a longer one in multimodal models."""
    embedding = "embed_tokens.weight"
    return next((name.removesuffix(embedding) for name in names if name.endswith(embedding)), "model.")


def _strip_root_prefix(name: str, root: str) -> str:
    """Return a tensor's name as text-only models have it: "model." in place of `root`."""
    if name.startswith(root) and not name.startswith(HEAD):
        return "model." + name.removeprefix(root)
    before, head, part = name.rpartition(HEAD)
    return head + part if before.endswith(".") else name


def _read_weight_map(directory: Path) -> Mapping[str, str]:
    """Return each tensor's file name, from the index; {} if there is no index. Raises ModelError if it is invalid."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return {}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) and len(name) <= MAX_NAME_LENGTH for name in weight_map.values()
    ):
        raise ModelError(f"{index} is not an index of weights: it has no weight_map of names and files")
    if not weight_map:
        raise ModelError(f"{index} is not an index of weights: its weight_map is empty")
    return weight_map
