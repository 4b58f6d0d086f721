"""Text to token ids and back, as the model's directory defines it.

Wraps the `tokenizers` library, and reads the model's files as transformers does. Knows neither requests nor the engine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from config.settings import SettingsError

LONG_TEXT = 2000  # characters; encoding them takes about a millisecond, more would hold up other requests


class Tokenizer:
    """A model's tokenizer. Owns `backend`, the library's own: its truncation and padding are switched off."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self._special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Raises SettingsError when the directory holds no tokenizer that can be used."""
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise SettingsError(f"model: {directory} has no tokenizer.json; is it the directory of a model?")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise SettingsError(f"model: {file} is no tokenizer this server can read: {error}") from None
        _mark_special_tokens(backend, _json(directory / "tokenizer_config.json"))
        _mark_special_tokens(backend, _json(directory / "special_tokens_map.json"))
        return cls(backend)

    async def encode(self, text: str) -> list[int]:
        """Ids of `text` with the special tokens the model expects around it. A long text is encoded in a thread."""
        if len(text) < LONG_TEXT:
            return self._encode(text)
        return await asyncio.to_thread(self._encode, text)

    def _encode(self, text: str) -> list[int]:
        # Not `encode`: that one holds the interpreter's lock, and with it the event loop.
        return self.backend.encode_batch_fast([text])[0].ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; special tokens have none."""
        return self.backend.decode(ids, skip_special_tokens=True)

    def has_text(self, token: int) -> bool:
        """False for special tokens and for ids outside the vocabulary: leaving them out changes no text."""
        return token not in self._special and self.backend.id_to_token(token) is not None


def _json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise SettingsError(f"model: {file} is no JSON: {error}") from None
    return values if isinstance(values, dict) else {}


def _content(token: Any) -> str | None:
    """A token is written as a string or as {"content": ...}."""
    return token.get("content") if isinstance(token, dict) else token


def _mark_special_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Some tokenizer.json leave it to the files beside them to say which tokens are special."""
    named = [config.get(f"{name}_token") for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")]
    named += config.get("additional_special_tokens") or []
    named += [token for token in (config.get("added_tokens_decoder") or {}).values() if token.get("special")]
    special = {content for token in named if isinstance(content := _content(token), str)}
    known = sorted(content for content in special if backend.token_to_id(content) is not None)  # never a new token
    backend.add_special_tokens(known)
