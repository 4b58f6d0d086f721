"""Writes a GGUF file field by field, so that tests can write any field wrong."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STRING, ARRAY, UINT32 = 8, 9, 4
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass
class RawTensor:
    name: str
    dims: list[int]
    type: int
    offset: int


@dataclass
class RawGGUF:
    """The fields of a file; counts are those of the lists unless they are set."""

    metadata: list[tuple[str, int, Any]]  # key, type, value; of an array: its elements' type, and these
    tensors: list[RawTensor]
    data: bytes
    magic: bytes = b"GGUF"
    version: int = 3
    tensor_count: int | None = None
    entries: int | None = None
    alignment: int = field(default=32)

    def packed(self) -> bytes:
        entries = len(self.metadata) if self.entries is None else self.entries
        count = len(self.tensors) if self.tensor_count is None else self.tensor_count
        parts = [self.magic, struct.pack("<IQQ", self.version, count, entries)]
        for key, kind, value in self.metadata:
            parts += [_string(key), struct.pack("<I", kind), _value(kind, value)]
        for tensor in self.tensors:
            dims = struct.pack(f"<I{len(tensor.dims)}Q", len(tensor.dims), *tensor.dims)
            parts += [_string(tensor.name), dims, struct.pack("<IQ", tensor.type, tensor.offset)]
        head = b"".join(parts)
        return head + b"\0" * (-len(head) % self.alignment) + self.data

    def place_of(self, key: str) -> int:
        """Return the byte where the string `key` of the metadata begins, with its length before it."""
        return self.packed().index(_string(key))


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(kind: int, value: Any) -> bytes:
    if isinstance(value, bytes):  # as it is
        return value
    if kind == STRING:
        return _string(value)
    if kind == ARRAY:
        of, elements = value
        return struct.pack("<IQ", of, len(elements)) + b"".join(_value(of, element) for element in elements)
    return struct.pack(f"<{FORMATS[kind]}", value)


def parse(file: Path) -> RawGGUF:
    """Read a valid file."""
    data = file.read_bytes()
    place = 4

    def take(layout: str) -> Any:
        nonlocal place
        (value,) = struct.unpack_from(f"<{layout}", data, place)
        place += struct.calcsize(f"<{layout}")
        return value

    def string() -> str:
        nonlocal place
        size = take("Q")
        place += size
        return data[place - size : place].decode()

    def value(kind: int) -> Any:
        if kind == STRING:
            return string()
        if kind == ARRAY:
            of, count = take("I"), take("Q")
            return of, [value(of) for _ in range(count)]
        return take(FORMATS[kind])

    version, count, entries = take("I"), take("Q"), take("Q")
    metadata = []
    for _ in range(entries):
        key, kind = string(), take("I")
        metadata.append((key, kind, value(kind)))
    tensors = []
    for _ in range(count):
        name, dims = string(), [take("Q") for _ in range(take("I"))]
        tensors.append(RawTensor(name, dims, take("I"), take("Q")))
    place += -place % 32
    return RawGGUF(metadata, tensors, data[place:], version=version)
