"""Computes how many characters one token can stand for, so that the API can refuse too long texts unencoded.

There is such a number only if the tokenizer drops no part of a text. Knows neither requests nor the context's length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

COMPOSED = 4  # most characters that Unicode composes into one: its longest canonical decomposition
# By kind of normalizer: most characters that it replaces by one; kinds that are not listed may drop any number
NORMALIZERS = {
    "NFC": COMPOSED,
    "NFKC": COMPOSED,
    "NFD": 1,
    "NFKD": 1,
    "Lowercase": 1,
    "Prepend": 1,
    "ByteLevel": 1,
}
# Kinds of pre-tokenizers that drop no character; UnicodeScripts is not among them, as it drops spaces
PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Digits"}
CUTTING = {"Split", "Punctuation"}  # pre-tokenizers that drop no character unless their behavior is "Removed"
BYTES = {f"<0x{byte:02X}>" for byte in range(256)}  # the tokens of a vocabulary with byte fallback


def compute_max_chars_per_token(backend: tokenizers.Tokenizer) -> int | None:
    """Return the largest number of characters that one token stands for; None if there is no such number."""
    shrinks = math.prod(map(_get_shrinkage, _read_parts(backend.normalizer, "normalizers")))
    vocabulary = backend.get_vocab()
    keeps_all = (
        math.isfinite(shrinks)
        and all(map(_keeps_text, _read_parts(backend.pre_tokenizer, "pretokenizers")))
        and not any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
        and _knows_every_character(backend, vocabulary)
    )
    return int(shrinks) * max(map(len, vocabulary), default=1) if keeps_all else None


def _read_parts(component: Any, within: str) -> list[dict[str, Any]]:
    """Return the settings of a tokenizer's component; for a sequence, those of its parts, under the key `within`."""
    return [] if component is None else list(_flatten_parts(json.loads(component.__getstate__()), within))


def _flatten_parts(component: dict[str, Any], within: str) -> Iterable[dict[str, Any]]:
    if component["type"] != "Sequence":
        return [component]
    return [part for inner in component[within] for part in _flatten_parts(inner, within)]


def _get_shrinkage(normalizer: dict[str, Any]) -> float:
    """Return the largest number of characters that a normalizer turns into one; infinity if it may drop any number."""
    match normalizer:
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if content:
            return 1 if len(content) >= len(pattern) else len(pattern)
    return NORMALIZERS.get(normalizer["type"], math.inf)


def _keeps_text(pre_tokenizer: dict[str, Any]) -> bool:
    kind = pre_tokenizer["type"]
    return kind in PRE_TOKENIZERS or (kind in CUTTING and pre_tokenizer["behavior"] != "Removed")


def _knows_every_character(backend: tokenizers.Tokenizer, vocabulary: dict[str, int]) -> bool:
    """Return whether the model encodes every character, and never several unknown ones as one token."""
    model = backend.model
    if not isinstance(model, models.BPE):  # in other kinds of models a whole unknown word is one token
        return False
    if model.byte_fallback and vocabulary.keys() >= BYTES:
        return True
    if model.unk_token is not None and not model.fuse_unk:
        return model.unk_token in vocabulary
    parts = _read_parts(backend.normalizer, "normalizers") + _read_parts(backend.pre_tokenizer, "pretokenizers")
    of_bytes = any(part["type"] == "ByteLevel" for part in parts)
    return of_bytes and vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
