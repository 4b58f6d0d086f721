"""What stands before the weights of a GGUF file: its metadata, and where each tensor lies. Knows no model and no numpy.

The gguf package reads this too, and dequantises the weights (gguf_weights.py); but it keeps several numpy arrays for
every string, which for Llama 3's vocabulary takes 20 s and 770 MB (here: 0.4 s); and the API process has no numpy.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from server.models.errors import ModelError

SUFFIX = ".gguf"
VERSIONS = (2, 3)
ALIGNMENT = 32  # of tensors, unless general.alignment says otherwise
FLOAT32 = 0  # a type of tensor
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class TensorInfo(NamedTuple):
    """A tensor as it lies in the file."""

    shape: tuple[int, ...]  # as torch has it: the last dimension is the dense one
    type: int  # one of gguf.GGMLQuantizationType
    offset: int  # bytes from the file's beginning


class Header(NamedTuple):
    """Everything in a file but the weights."""

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    def floats(self, name: str) -> list[float]:
        """A small float32 tensor: factors of RoPE. Raises ModelError."""
        tensor = self.tensors[name]
        with self.file.open("rb") as opened:
            opened.seek(tensor.offset)
            data = opened.read(4 * prod(tensor.shape))
        if tensor.type != FLOAT32 or len(data) < 4 * prod(tensor.shape):
            raise ModelError(f"{self.file}: tensor {name!r} is cut off, or not of type F32: fetch the file again")
        return list(struct.unpack(f"<{prod(tensor.shape)}f", data))


def read_header(file: Path) -> Header:
    """Raises ModelError."""
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _header(file, data)
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from None
    except (struct.error, ValueError, KeyError, OverflowError) as error:
        raise ModelError(f"{file} is damaged or cut off: fetch it again ({error})") from None


def _header(file: Path, data: mmap.mmap) -> Header:
    cursor = _Cursor(data)
    if data[:4] != b"GGUF":
        raise ModelError(f"{file} is no GGUF file")
    cursor.place = 4
    version = cursor.scalar("I")
    if version not in VERSIONS:
        raise ModelError(f"{file} is GGUF of version {version}; those of {VERSIONS} can be read, little-endian")
    tensor_count, entries = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(entries)}
    found = {cursor.string(): cursor.tensor() for _ in range(tensor_count)}
    alignment = metadata.get("general.alignment", ALIGNMENT)
    start = -(-cursor.place // alignment) * alignment
    return Header(file, metadata, {name: t._replace(offset=start + t.offset) for name, t in found.items()})


class _Cursor:
    """Reads one thing after another."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.place = 0

    def scalar(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self._data, self.place)
        self.place += struct.calcsize(f"<{kind}")
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        self._check(length)
        self.place += length
        return self._data[self.place - length : self.place].decode(errors="replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        return self._array() if kind == ARRAY else self.scalar(SCALARS[kind])

    def tensor(self) -> TensorInfo:
        """Its offset is yet counted from the first tensor."""
        dimensions = [self.scalar("Q") for _ in range(self.scalar("I"))]
        return TensorInfo(tuple(reversed(dimensions)), self.scalar("I"), self.scalar("Q"))

    def _array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        self._check(count)  # every element has a byte at least
        if kind in (STRING, ARRAY):
            return [self.value(kind) for _ in range(count)]
        layout = f"<{count}{SCALARS[kind]}"
        values = list(struct.unpack_from(layout, self._data, self.place))
        self.place += struct.calcsize(layout)
        return values

    def _check(self, length: int) -> None:
        if self.place + length > len(self._data):
            raise ValueError(f"it ends at byte {len(self._data)}, where {self.place + length} are needed")
