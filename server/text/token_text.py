"""The bytes that a single piece of a vocabulary stands for, and how OpenAI writes them.

A tokenizer's decoder works on whole texts, where bytes that are no UTF-8 are lost; what it does to a single piece is
done here instead. Knows no special tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a piece of vocabularies with byte fallback


def reader_of(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    """Return what turns a piece into its bytes, for the decoder that tokenizer.json describes."""
    steps = steps_of(decoder)
    kinds = {step["type"] for step in steps}
    replaced = [pair for step in steps if (pair := _replacement(step))]
    alphabet = _byte_alphabet() if "ByteLevel" in kinds else {}

    def read(piece: str) -> bytes:
        if "ByteFallback" in kinds and (byte := _BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        if alphabet and all(char in alphabet for char in piece):  # added tokens may have other characters
            return bytes(alphabet[char] for char in piece)
        for old, new in replaced:
            piece = piece.replace(old, new)
        return piece.encode()

    return read


def as_text(data: bytes) -> str:
    """Return bytes as text or, if they are not UTF-8, as "bytes:" with \\xe2 for those beyond ASCII, as OpenAI does."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + data.decode("ascii", "backslashreplace")


def steps_of(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return a decoder's description as a list of those that do something."""
    if decoder is None:
        return []
    return [step for part in decoder["decoders"] for step in steps_of(part)] if "decoders" in decoder else [decoder]


def _replacement(step: dict[str, Any]) -> tuple[str, str] | None:
    """Return the text that a step replaces, and the text it writes instead."""
    match step:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return old, new
        case {"type": "Metaspace", "replacement": str(old)}:
            return old, " "
        case {"type": "BPEDecoder", "suffix": str(old)}:
            return old, " "
    return None


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: a byte that Latin-1 prints is itself, the others are characters from U+0100 on."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
