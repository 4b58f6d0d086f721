"""Reads the header of a GGUF file: its metadata, and the shape, type and offset of each tensor. Imports no numpy.

A model may be in several files, NAME-00001-of-00003.gguf and so on, of which the first has the metadata.

The gguf package, which gguf_weights.py uses to dequantize weights, has a reader, too. But it keeps several numpy
arrays for every string, which for Llama 3's vocabulary takes 20 s and 770 MB (0.4 s with this module); and API
processes do not import numpy.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from server.models.errors import ModelError

SUFFIX = ".gguf"
PART = re.compile(rf"(?P<name>.+)-\d{{5}}-of-(?P<count>\d{{5}}){re.escape(SUFFIX)}")
VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes: tensors begin at multiples of this if the file has no general.alignment
FLOAT32 = 0  # GGML's tensor type F32
TOKENIZER = "tokenizer."  # the names of what describes the tokenizer begin with this
STRING, ARRAY = 8, 9  # type numbers of metadata values that are strings and arrays; SCALARS has the others
# Bounds far beyond any model: a header of this size takes a few hundred megabytes as Python objects.
MAX_HEADER_BYTES = 1 << 26
# Maximum number of elements in all arrays of a file; a vocabulary of 262,144 tokens and its merges has 1.3 million
MAX_ARRAY_ELEMENTS = 1 << 22
MAX_DIMENSIONS = 4  # ggml's limit
MAX_ALIGNMENT = 1 << 16
# Type numbers of metadata values -> format characters of the module `struct`.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class TensorInfo(NamedTuple):
    """A tensor's entry in the header of a GGUF file."""

    shape: tuple[int, ...]  # sizes in torch's order: the last dimension is contiguous
    type: int  # one of gguf.GGMLQuantizationType
    offset: int  # bytes from the start of the file
    file: Path  # that has its bytes


class GGUFHeader(NamedTuple):
    """The contents of a GGUF file, or of all parts of one, except for the weights."""

    file: Path  # the first part
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    def read_floats(self, name: str, count: int) -> list[float]:
        """Return the `count` numbers of a small float32 tensor (RoPE factors). Raises ModelError if it is different."""
        tensor = self.tensors[name]
        if tensor.type != FLOAT32 or tensor.shape != (count,):
            raise ModelError(f"{self.file}: tensor {name!r} should be {count} numbers of type F32")
        with tensor.file.open("rb") as opened:
            opened.seek(min(tensor.offset, 2**62))
            data = opened.read(4 * count)
        if len(data) < 4 * count:
            raise ModelError(f"{tensor.file} is cut off before the end of tensor {name!r}: fetch it again")
        return list(struct.unpack(f"<{count}f", data))


def list_parts(file: Path) -> list[Path]:
    """Return all parts of the model that a GGUF file belongs to, in order, whether they exist or not."""
    match = PART.fullmatch(file.name)
    if match is None or not int(match["count"]):
        return [file]
    return [
        file.with_name(f"{match['name']}-{i:05}-of-{match['count']}{SUFFIX}") for i in range(1, int(match["count"]) + 1)
    ]


def read_header(file: Path, *, vocabulary: bool = True) -> GGUFHeader:
    """Return the header of a GGUF file, with the tensors of all parts of its model.

    Without `vocabulary` the arrays of the tokenizer are passed over, and None is in their place: they take most of the
    time and memory. Raises ModelError if a part is missing, unreadable, damaged or no GGUF file.
    """
    first, *others = list_parts(file)
    header = _read_header(first, vocabulary=vocabulary)
    parts = header.metadata.get("split.count", 1) or 1
    if parts != 1 + len(others):
        raise ModelError(
            f"{first} is one part of {parts}: keep the names of all parts as they were, such as "
            f"NAME-00001-of-{parts:05}{SUFFIX}, in one directory"
        )
    tensors = {**header.tensors}
    for other in others:
        for name, info in _read_header(other, vocabulary=False).tensors.items():
            if name in tensors:
                raise ModelError(f"{other} and {tensors[name].file} both have a tensor {name!r}: fetch them again")
            tensors[name] = info
    return header._replace(tensors=tensors)


def _read_header(file: Path, *, vocabulary: bool) -> GGUFHeader:
    """Return the header of one file. Raises ModelError if the file is unreadable, damaged or no GGUF file."""
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse_header(file, data, vocabulary=vocabulary)
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from None
    except KeyError as error:
        raise ModelError(f"{file} is damaged or cut off: fetch it again (there is no type {error} of values)") from None
    except (struct.error, ValueError, OverflowError) as error:
        raise ModelError(f"{file} is damaged or cut off: fetch it again ({error})") from None


def _parse_header(file: Path, data: mmap.mmap, *, vocabulary: bool) -> GGUFHeader:
    cursor = _Cursor(data, file)
    if data[:4] != b"GGUF":
        raise ModelError(f"{file} is not a GGUF file")
    cursor.position = 4
    version = cursor.read_scalar("I")
    if version not in VERSIONS:
        raise ModelError(f"{file} is GGUF of version {version}; versions {VERSIONS}, little-endian, can be read")
    tensor_count, entries = cursor.read_scalar("Q"), cursor.read_scalar("Q")

    def read_value(name: str) -> Any:
        kind = cursor.read_scalar("I")
        if kind == ARRAY and name.startswith(TOKENIZER) and not vocabulary:
            return cursor.skip_array()
        return cursor.read_value(kind)

    metadata = _read_named(cursor, entries, read_value)
    found = _read_named(cursor, tensor_count, lambda _: cursor.read_tensor_info())
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is not a power of two from 8 to {MAX_ALIGNMENT}")
    if name := next((name for name, tensor in found.items() if tensor.offset % alignment), None):
        raise ValueError(f"tensor {name!r} does not begin at a multiple of {alignment} bytes")
    start = -(-cursor.position // alignment) * alignment
    return GGUFHeader(file, metadata, {name: t._replace(offset=start + t.offset) for name, t in found.items()})


def _read_named(cursor: _Cursor, count: int, read: Callable[[str], Any]) -> dict[str, Any]:
    """Return `count` entries by name; each is stored as its name, then a value, which `read` reads, given the name.

    Raises ValueError if two have the same name.
    """
    found: dict[str, Any] = {}
    for _ in range(count):
        name = cursor.read_string()
        if name in found:
            raise ValueError(f"{name[:80]!r} occurs twice")
        found[name] = read(name)
    return found


class _Cursor:
    """A position in a GGUF file's bytes, from which values are read one after another."""

    def __init__(self, data: mmap.mmap, file: Path) -> None:
        self._data, self._file = data, file
        self._elements = 0  # number of elements in all arrays read so far
        self.position = 0

    def read_scalar(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self._data, self.position)
        self.position += struct.calcsize(f"<{kind}")
        return value

    def read_string(self) -> str:
        length = self.read_scalar("Q")
        self._check_bounds(length)
        self.position += length
        return self._data[self.position - length : self.position].decode(errors="replace")

    def read_value(self, kind: int) -> Any:
        if kind == STRING:
            return self.read_string()
        return self.read_array() if kind == ARRAY else self.read_scalar(SCALARS[kind])

    def read_tensor_info(self) -> TensorInfo:
        """Read a tensor's entry; its offset is in bytes from the first tensor, not yet from the start of the file."""
        count = self.read_scalar("I")
        if count > MAX_DIMENSIONS:
            raise ValueError(f"a tensor has {count} dimensions, more than {MAX_DIMENSIONS}")
        dimensions = [self.read_scalar("Q") for _ in range(count)]
        return TensorInfo(tuple(reversed(dimensions)), self.read_scalar("I"), self.read_scalar("Q"), self._file)

    def read_array(self) -> list[Any]:
        kind, count = self._begin_array()
        if kind == STRING:
            return [self._data[begin:end].decode(errors="replace") for begin, end in self._iter_strings(count)]
        layout = f"<{count}{SCALARS[kind]}"
        values = list(struct.unpack_from(layout, self._data, self.position))
        self.position += struct.calcsize(layout)
        return values

    def skip_array(self) -> None:
        """Move behind an array, with the checks of reading it."""
        kind, count = self._begin_array()
        if kind == STRING:
            for _ in self._iter_strings(count):
                pass
        else:
            self._check_bounds(size := struct.calcsize(f"<{count}{SCALARS[kind]}"))
            self.position += size

    def _begin_array(self) -> tuple[int, int]:
        """Read the type of an array's elements and their number."""
        kind, count = self.read_scalar("I"), self.read_scalar("Q")
        self._check_bounds(count)  # each element has at least one byte: a wrong count must not fill memory
        self._elements += count
        if self._elements > MAX_ARRAY_ELEMENTS:
            raise ValueError(f"its arrays have more than {MAX_ARRAY_ELEMENTS} elements")
        if kind == ARRAY:
            raise ValueError("its metadata has an array of arrays, which is not supported")
        return kind, count

    def _iter_strings(self, count: int) -> Iterator[tuple[int, int]]:
        """Move behind as many strings, and yield where each begins and ends: most of the work of reading a header."""
        data, end, unpack_from = self._data, self.position, struct.Struct("<Q").unpack_from
        limit = min(len(data), MAX_HEADER_BYTES)
        for _ in range(count):
            (length,) = unpack_from(data, end)
            begin, end = end + 8, end + 8 + length
            if end > limit:
                self._check_bounds(end - self.position)
            yield begin, end
        self.position = end

    def _check_bounds(self, length: int) -> None:
        if self.position + length > len(self._data):
            raise ValueError(f"the file has {len(self._data)} bytes, and its header needs {self.position + length}")
        if self.position + length > MAX_HEADER_BYTES:
            raise ValueError(f"its header is longer than {MAX_HEADER_BYTES} bytes")
