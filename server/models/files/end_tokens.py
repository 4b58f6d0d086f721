"""Finds the tokens that end a model's texts, which several files name. Knows no tokenizer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from server.models.config_file import read_json, shorten_repr
from server.models.errors import ModelError
from server.text.model_files import get_token_text

log = logging.getLogger(__name__)


def read_eos_ids(directory: Path, vocab_size: int) -> frozenset[int]:
    """Return the valid token ids that end a text: those in eos_token_id, and the tokenizer's own.

    Fine-tunes end a turn with the latter and leave the ids of the model they were made of. Raises ModelError if
    eos_token_id has no numbers.
    """
    ends = [*_read_raw_eos_ids(directory), _find_tokenizer_end(directory)]
    return frozenset(end for end in ends if _is_token(end, vocab_size))


def warn_invalid_eos_ids(directory: Path, vocab_size: int) -> None:
    """Log a warning if eos_token_id has ids that are not tokens (-1, in broken fine-tunes): they are ignored."""
    if strange := [end for end in _read_raw_eos_ids(directory) if not _is_token(end, vocab_size)]:
        log.warning(
            "%s: eos_token_id has %s, which are not in the vocabulary of %d tokens: they are ignored",
            directory,
            shorten_repr(strange),
            vocab_size,
        )


def _read_raw_eos_ids(directory: Path) -> list[Any]:
    """Return eos_token_id as a list: that of generation_config.json, which often has more ids, or of config.json."""
    path = directory / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    eos = generation.get("eos_token_id")
    eos = read_json(directory / "config.json").get("eos_token_id") if eos is None else eos
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(i, int | float) for i in ids):
        raise ModelError(f"{directory}: eos_token_id is {shorten_repr(eos)}, and should be a number or several")
    return ids


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    """The part of tokenizer.json that is read here: the vocabulary is passed over, as it takes long to decode."""

    added_tokens: list[_AddedToken] = []


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]  # of Unigram a list, in the order of the ids


class _WholeTokenizerFile(msgspec.Struct):
    model: _Model


def _find_tokenizer_end(directory: Path) -> int | None:
    """Return the id of eos_token in tokenizer_config.json; None if the tokenizer has none."""
    path = directory / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    if (content := get_token_text(config.get("eos_token"))) is None:
        return None
    decoder = config.get("added_tokens_decoder")
    for id, token in decoder.items() if isinstance(decoder, dict) else ():
        if get_token_text(token) == content and id.isdecimal():
            return int(id)
    try:
        return _find_token(directory / "tokenizer.json", content)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # whoever loads the tokenizer says what is wrong


def _find_token(file: Path, content: str) -> int | None:
    """Return the id of a token in tokenizer.json. Raises OSError, and DecodeError for an unexpected form."""
    written = file.read_bytes()
    for token in msgspec.json.decode(written, type=_TokenizerFile).added_tokens:
        if token.content == content:
            return token.id
    vocabulary = msgspec.json.decode(written, type=_WholeTokenizerFile).model.vocab
    if isinstance(vocabulary, dict):
        return vocabulary.get(content)
    return next((id for id, (text, _) in enumerate(vocabulary) if text == content), None)


def _is_token(end: Any, vocab_size: int) -> bool:
    return type(end) is int and 0 <= end < vocab_size
