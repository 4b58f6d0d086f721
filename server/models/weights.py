"""Where the decoder gets its weights from, by name; here, a Hugging Face directory's safetensors. Knows no layer.

How weights are kept is said here; quantised.py keeps them in fewer bits than they were read in.

Files are mapped, so a tensor that is used as it lies on disk costs no copy on the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.quantised import Quantised
from server.models.config_file import read_json
from server.models.errors import ModelError

READABLE = (torch.float32, torch.bfloat16, torch.float16)


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


class Safetensors:
    """Implements `Weights` for a directory, as `dtype` on `device`."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ModelError if the directory holds no safetensors."""
        self._directory = directory
        self._dtype = dtype
        self._device = device
        self._files = {file: self._open(file) for file in _files(directory)}
        stored = {name: file for file, tensors in self._files.items() for name in tensors.keys()}  # noqa: SIM118
        root = _root_of(stored)
        self._where: dict[str, tuple[Path, str]] = {_plain(name, root): (file, name) for name, file in stored.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def get(self, name: str) -> Tensor:
        tensor = self.stored(name)
        if tensor.dtype not in READABLE:
            raise ModelError(
                f"{self._directory}: {self.stored_name(name)} is {tensor.dtype}: of quantised checkpoints, only MLX's "
                "and GGUF files can be read"
            )
        return tensor.to(device=self._device, dtype=self._dtype)

    def embedding(self, name: str) -> Matrix:
        return self.get(name)

    def matrix(self, name: str) -> Matrix:
        return self.get(name)

    def stored(self, name: str) -> Tensor:
        """As it lies in its file, of whatever dtype. Raises ModelError if there is none."""
        stored = self.stored_name(name)
        found: Tensor = self._files[self._where[name][0]].get_tensor(stored)
        aligned = found.data_ptr() % found.element_size() == 0  # it is mapped, wherever it begins in the file
        return found if aligned else found.clone()

    def stored_name(self, name: str) -> str:
        """What the files call it. Raises ModelError if they have no such tensor."""
        if name not in self._where:
            raise ModelError(f"{self._directory} has no tensor {name!r}; is the checkpoint complete?")
        return self._where[name][1]

    def _open(self, file: Path) -> safe_open:
        try:
            return safe_open(file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read {file}: {error}") from None


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
