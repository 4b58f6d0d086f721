"""Where the decoder gets its weights from, by name; here, a Hugging Face directory's safetensors. Knows no layer.

How weights are kept is said here; quantised.py keeps them in fewer bits than they were read in.

Tensors are mapped, each by itself: one that is used as it lies on disk costs no copy on the host, and one that was
copied elsewhere no memory any more.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.quantised import Quantised
from server.models.config_file import read_json
from server.models.errors import ModelError
from server.models.mapping import mapped_bytes

READABLE = (torch.float32, torch.bfloat16, torch.float16)
TYPES = {  # by safetensors' names: those, and the ones that numbers of quantised weights come in
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U8": torch.uint8,
    "U32": torch.uint32,
}

Matrix = Tensor | Quantised  # [out, in]


class Format(NamedTuple):
    """Of matrices that are quantised while they are read."""

    bits: int
    group: int | None = None  # columns; None: a row


class Kept(NamedTuple):
    """How a model keeps its weights."""

    dtype: torch.dtype  # of what is not quantised
    format: Format | None = None  # to quantise matrices to; None: they are not
    as_stored: bool = False  # those that the checkpoint has quantised stay so; otherwise they are dequantised
    cache: Path | None = None  # the folder where quantised matrices wait for the next start; None: nowhere


class Weights(Protocol):
    """Tensors on demand, by the names that Hugging Face gives them, on the device to compute with.

    All raise ModelError if there is no tensor of that name, or none that can be read.
    """

    def __contains__(self, name: str) -> bool: ...

    def get(self, name: str) -> Tensor:
        """Of numbers that are not quantised, whatever the checkpoint has."""
        ...

    def embedding(self, name: str) -> Matrix:
        """A matrix whose rows are looked up; quantised only if the checkpoint has it so."""
        ...

    def matrix(self, name: str) -> Matrix:
        """A matrix that is multiplied with, as it is kept."""
        ...


class _Place(NamedTuple):
    """Where a tensor lies."""

    file: Path
    name: str  # in the file
    type: str
    shape: tuple[int, ...]
    start: int  # bytes from the file's beginning
    size: int


class Safetensors:
    """Implements `Weights` for a directory, as `dtype` on `device`."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ModelError if the directory holds no safetensors."""
        self._directory = directory
        self._dtype = dtype
        self._device = device
        found = {place.name: place for file in _files(directory) for place in _places(file)}
        root = _root_of(found)
        self._places = {_plain(name, root): place for name, place in found.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def get(self, name: str) -> Tensor:
        tensor = self.stored(name)
        if tensor.dtype not in READABLE:
            raise self._unreadable(name)
        return tensor.to(device=self._device, dtype=self._dtype)

    def embedding(self, name: str) -> Matrix:
        return self.get(name)

    def matrix(self, name: str) -> Matrix:
        return self.get(name)

    def stored(self, name: str) -> Tensor:
        """As it lies in its file. Raises ModelError if there is none, and for types that nothing here is kept in."""
        self.stored_name(name)
        place = self._places[name]
        if place.type not in TYPES:
            raise self._unreadable(name)
        dtype = TYPES[place.type]
        found = mapped_bytes(place.file, place.start, place.size)
        if place.start % dtype.itemsize:  # it is mapped, wherever it begins in the file
            found = found.clone()
        return found.view(dtype).view(place.shape)

    def stored_name(self, name: str) -> str:
        """What the files call it. Raises ModelError if they have no such tensor."""
        if name not in self._places:
            raise ModelError(f"{self._directory} has no tensor {name!r}; is the checkpoint complete?")
        return self._places[name].name

    def _unreadable(self, name: str) -> ModelError:
        place = self._places[name]
        return ModelError(
            f"{self._directory}: {place.name} is of type {place.type}: of quantised checkpoints, only MLX's and GGUF "
            "files can be read"
        )


def _places(file: Path) -> Iterator[_Place]:
    """Of all tensors of a file. Raises ModelError."""
    try:
        with safe_open(file, framework="np"):  # finds whatever is wrong with the header
            pass
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read {file}: {error}") from None
    for name, tensor in header.items():
        if name != "__metadata__":
            start, end = tensor["data_offsets"]
            yield _Place(file, name, tensor["dtype"], tuple(tensor["shape"]), 8 + size + start, end - start)


def _root_of(names: Iterable[str]) -> str:
    """What comes before "embed_tokens" in names: more than "model." where the decoder is part of a larger model."""
    embedding = "embed_tokens.weight"
    return next((name.removesuffix(embedding) for name in names if name.endswith(embedding)), "model.")


def _plain(name: str, root: str) -> str:
    """The name of a tensor as if the decoder were all there is."""
    if name.startswith(root):
        return "model." + name.removeprefix(root)
    before, head, part = name.rpartition("lm_head.")
    return head + part if before.endswith(".") else name


def _files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelError(f"{index} is no index of weights: it has no weight_map of names and files")
        return [directory / Path(name).name for name in sorted(set(weight_map.values()))]
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{directory} has no *.safetensors file")
    return files
