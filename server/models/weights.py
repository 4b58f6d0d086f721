"""Weights by name: what the decoder asks for (`Weights`), and a Hugging Face directory's safetensors. Knows no layer.

`WeightsConfig` says in which form weights are kept; quantized.py keeps them in fewer bits than the checkpoint has.

Each tensor is mapped by itself: one that is used as it lies on disk is not copied on the host, and the mapping of one
that was copied elsewhere is freed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.quantization import QuantizedTensor
from server.models.config import Dim
from server.models.config_file import read_json, shorten_repr
from server.models.errors import ModelError, first_line
from server.models.formats.mmap import map_bytes, read_bytes

MAX_NAME_LENGTH = 255  # characters; file systems have no longer ones
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SAFETENSORS_DTYPES = {  # by safetensors' names: those, and the ones that numbers of quantized weights come in
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U8": torch.uint8,
    "U32": torch.uint32,
}

Matrix = Tensor | QuantizedTensor  # [out, in]
Shape = Sequence[int]  # of the whole weight, as config.json gives it: `Dim`s, for the message if it is another


class WeightFormat(NamedTuple):
    """The format of matrices that are quantized while they are read."""

    bits: int
    group_size: int | None = None  # columns; None: a row


class WeightsConfig(NamedTuple):
    """How a model keeps its weights."""

    dtype: torch.dtype  # of what is not quantized
    format: WeightFormat | None = None  # to quantize matrices to; None: they are not
    as_stored: bool = False  # those that the checkpoint has quantized stay so; otherwise they are dequantized
    cache_dir: Path | None = None  # the folder where quantized matrices wait for the next start; None: nowhere


class Weights(Protocol):
    """Tensors on demand, by the names that Hugging Face gives them, on the device to compute with.

    All raise ModelError if the tensor is missing, has another shape, or cannot be read. The shape is compared before
    memory is taken, and has to be given: kernels read as far as the config says.
    """

    def __contains__(self, name: str) -> bool: ...

    def describe(self, name: str) -> str:
        """Return the file and the tensor in words, for error messages."""
        ...

    def get(self, name: str, shape: Shape) -> Tensor:
        """Return a tensor that is not quantized, whatever the checkpoint has; a vector's numbers are all finite."""
        ...

    def embedding(self, name: str, shape: Shape) -> Matrix:
        """Return a matrix whose rows are looked up; it is quantized only if the checkpoint has it so."""
        ...

    def matrix(self, name: str, shape: Shape) -> Matrix:
        """Return a matrix that is multiplied with, in the form in which it is kept."""
        ...


def check_shape(what: str, found: Shape, shape: Shape, by: str = "config.json") -> None:
    """Raise ModelError if a tensor is not of the shape that `by` gives it; `what` names its file and the tensor."""
    if tuple(found) != tuple(shape):
        words = ", ".join(dim.description for dim in shape if isinstance(dim, Dim))
        raise ModelError(
            f"{what} is {list(found)}, and by {by} it should be {list(shape)}" + (f" ({words})" if words else "")
        )


def check_finite(what: str, tensor: Tensor) -> Tensor:
    """Return a tensor whose numbers are all finite, if it is a vector. Raise ModelError if some of them are not.

    One such number in a norm or a bias spoils every answer. Matrices are not looked through: that would read them all.
    """
    if tensor.dim() == 1 and not tensor.isfinite().all():
        raise ModelError(f"{what} has numbers that are NaN or infinite in {tensor.dtype}; is the checkpoint damaged?")
    return tensor


class _Place(NamedTuple):
    """Where a tensor lies."""

    file: Path
    name: str  # in the file
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the file's beginning
    size: int


class Safetensors:
    """Implements `Weights` for a directory, as `dtype` on `device`."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device, *, mapped: bool = True) -> None:
        """Find all tensors, to map or to read into memory. Raises ModelError if the directory holds no safetensors."""
        self._load_bytes = map_bytes if mapped else read_bytes
        self._directory = directory
        self._dtype = dtype
        self._device = device
        found = _find_tensors(directory)
        root = _find_root_prefix(found)
        self._places = {_strip_root_prefix(name, root): place for name, place in found.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def get(self, name: str, shape: Shape) -> Tensor:
        what = self.describe(name)
        if SAFETENSORS_DTYPES.get(self._places[name].dtype) not in FLOAT_DTYPES:
            raise self._unsupported_dtype_error(name)
        check_shape(what, self._places[name].shape, shape)
        return check_finite(what, self.read_tensor(name).to(device=self._device, dtype=self._dtype))

    def embedding(self, name: str, shape: Shape) -> Matrix:
        return self.get(name, shape)

    def matrix(self, name: str, shape: Shape) -> Matrix:
        return self.get(name, shape)

    def read_tensor(self, name: str) -> Tensor:
        """Return a tensor as it lies in its file. Raises ModelError if there is none, or its type cannot be read."""
        self.get_stored_name(name)
        place = self._places[name]
        if place.dtype not in SAFETENSORS_DTYPES:
            raise self._unsupported_dtype_error(name)
        dtype = SAFETENSORS_DTYPES[place.dtype]
        found = self._load_bytes(place.file, place.start, place.size)
        if found.data_ptr() % dtype.itemsize:  # if it is mapped, wherever it begins in the file
            found = found.clone()
        return found.view(dtype).view(place.shape)

    def get_stored_name(self, name: str) -> str:
        """Return a tensor's name in its file. Raises ModelError if there is no such tensor."""
        if name not in self._places:
            raise ModelError(f"{self._directory} has no tensor {name!r}; is the checkpoint complete?")
        return self._places[name].name

    def describe(self, name: str) -> str:
        stored = self.get_stored_name(name)
        return f"{self._places[name].file}: tensor {shorten_repr(stored)}"

    def _unsupported_dtype_error(self, name: str) -> ModelError:
        place = self._places[name]
        return ModelError(
            f"{place.file}: {shorten_repr(place.name)} is of type {place.dtype}: of quantized checkpoints, only MLX's "
            "and GGUF files can be read"
        )


def _read_places(file: Path) -> Iterator[_Place]:
    """Yield where each tensor of a file lies. Raises ModelError."""
    try:
        with safe_open(file, framework="np"):  # finds what is wrong with the header: gaps, overlaps, sizes, types
            pass
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size), object_pairs_hook=_reject_duplicate_keys)
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror or first_line(error)}") from None
    except (SafetensorError, ValueError) as error:
        is_cut_off = "incomplete metadata" in str(error)  # the library's words for a file that ends too soon
        reason = "it is cut off" if is_cut_off else first_line(error)
        raise ModelError(f"cannot read {file}: {reason}; fetch it again") from None
    for name, tensor in header.items():
        if name != "__metadata__":
            start, end = tensor["data_offsets"]
            yield _Place(file, name, tensor["dtype"], tuple(tensor["shape"]), 8 + size + start, end - start)


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON whose keys differ; of two that are equal, safetensors may have checked the other."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice in its header")
    return found


def _find_tensors(directory: Path) -> dict[str, _Place]:
    """Return every tensor of a directory by name: from the file the index names, if several have one of that name."""
    index = _read_weight_map(directory)
    files = {directory / Path(name).name for name in index.values()} or set(directory.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{directory} has no *.safetensors file")
    found: dict[str, _Place] = {}
    for place in (place for file in sorted(files) for place in _read_places(file)):
        other, named = found.get(place.name), Path(index.get(place.name, "")).name
        if other is not None and named not in (other.file.name, place.file.name):
            raise ModelError(
                f"{directory}: tensor {shorten_repr(place.name)} is in {other.file.name} and in {place.file.name}: "
                "delete the file that is not the model's"
            )
        if other is None or named == place.file.name:
            found[place.name] = place
    return found


def _find_root_prefix(names: Iterable[str]) -> str:
    """Return what comes before "embed_tokens" in names; for multimodal models it is longer than "model."."""
    embedding = "embed_tokens.weight"
    return next((name.removesuffix(embedding) for name in names if name.endswith(embedding)), "model.")


def _strip_root_prefix(name: str, root: str) -> str:
    """Return a tensor's name without the part that multimodal models put before it."""
    if name.startswith(root):
        return "model." + name.removeprefix(root)
    before, head, part = name.rpartition("lm_head.")
    return head + part if before.endswith(".") else name


def _read_weight_map(directory: Path) -> Mapping[str, str]:
    """Return the file of each tensor, as the index says; empty if there is none. Raises ModelError."""
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
