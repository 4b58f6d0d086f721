"""Reads what precedes the weights of a GGUF file: metadata, and where each tensor lies. Knows no model and no numpy.

The gguf package reads this too, and dequantizes the weights (gguf_weights.py); but it keeps several numpy arrays for
every string, which for Llama 3's vocabulary takes 20 s and 770 MB (here: 0.4 s); and the API process has no numpy.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from server.models.errors import ModelError

SUFFIX = ".gguf"
VERSIONS = (2, 3)
ALIGNMENT = 32  # of tensors, unless general.alignment says otherwise
FLOAT32 = 0  # a type of tensor
STRING, ARRAY = 8, 9
# Bounds far beyond any model: a header of these makes some hundred megabytes of Python objects.
MOST_BYTES = 1 << 26  # of the header
MOST_ELEMENTS = 1 << 22  # of all arrays together; a vocabulary of 262,144 tokens has 1.3 million with its merges
MOST_DIMENSIONS = 4  # as ggml has it
MOST_ALIGNMENT = 1 << 16
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

    def floats(self, name: str, count: int) -> list[float]:
        """Return a small float32 tensor of `count` numbers: factors of RoPE. Raises ModelError."""
        tensor = self.tensors[name]
        if tensor.type != FLOAT32 or tensor.shape != (count,):
            raise ModelError(f"{self.file}: tensor {name!r} should be {count} numbers of type F32")
        with self.file.open("rb") as opened:
            opened.seek(min(tensor.offset, 2**62))
            data = opened.read(4 * count)
        if len(data) < 4 * count:
            raise ModelError(f"{self.file} is cut off before the end of tensor {name!r}: fetch it again")
        return list(struct.unpack(f"<{count}f", data))


def read_header(file: Path) -> Header:
    """Return the header of a file. Raises ModelError."""
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _header(file, data)
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from None
    except KeyError as error:
        raise ModelError(f"{file} is damaged or cut off: fetch it again (there is no type {error} of values)") from None
    except (struct.error, ValueError, OverflowError) as error:
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
    metadata = _by_name(cursor, entries, lambda: cursor.value(cursor.scalar("I")))
    found = _by_name(cursor, tensor_count, cursor.tensor)
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or not 8 <= alignment <= MOST_ALIGNMENT or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is not a power of two from 8 to {MOST_ALIGNMENT}")
    if name := next((name for name, tensor in found.items() if tensor.offset % alignment), None):
        raise ValueError(f"tensor {name!r} does not begin at a multiple of {alignment} bytes")
    start = -(-cursor.place // alignment) * alignment
    return Header(file, metadata, {name: t._replace(offset=start + t.offset) for name, t in found.items()})


def _by_name(cursor: _Cursor, count: int, read: Callable[[], Any]) -> dict[str, Any]:
    """Read `count` things, each with its name before it. Raises ValueError if two have the same name."""
    found: dict[str, Any] = {}
    for _ in range(count):
        name = cursor.string()
        if name in found:
            raise ValueError(f"{name[:80]!r} occurs twice")
        found[name] = read()
    return found


class _Cursor:
    """Reads one thing after another."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._elements = 0  # of all arrays read so far
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
        """Read a tensor's entry; its offset is still counted from the first tensor."""
        count = self.scalar("I")
        if count > MOST_DIMENSIONS:
            raise ValueError(f"a tensor has {count} dimensions")
        dimensions = [self.scalar("Q") for _ in range(count)]
        return TensorInfo(tuple(reversed(dimensions)), self.scalar("I"), self.scalar("Q"))

    def _array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        self._check(count)  # every element has a byte at least
        self._elements += count
        if self._elements > MOST_ELEMENTS:
            raise ValueError(f"its arrays have more than {MOST_ELEMENTS} elements")
        if kind == STRING:
            return [self.string() for _ in range(count)]
        if kind == ARRAY:
            raise ValueError("an array of arrays, which no model has")
        layout = f"<{count}{SCALARS[kind]}"
        values = list(struct.unpack_from(layout, self._data, self.place))
        self.place += struct.calcsize(layout)
        return values

    def _check(self, length: int) -> None:
        if self.place + length > len(self._data):
            raise ValueError(f"it ends at byte {len(self._data)}, where {self.place + length} are needed")
        if self.place + length > MOST_BYTES:
            raise ValueError(f"what stands before its weights is longer than {MOST_BYTES} bytes")
