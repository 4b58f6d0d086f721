"""Text to token ids and back, as the model's directory defines it.

Wraps the `tokenizers` library, and reads the model's files as transformers does; `chat` makes conversations texts.
Knows neither requests nor the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from config.errors import SettingsError
from server.text.chat import ChatTemplate
from server.text.model_files import NAMES, content_of, read_object
from server.text.token_text import as_text, reader_of

LONG_TEXT = 2000  # characters; encoding them takes about a millisecond, more would hold up other requests


class Tokenizer:
    """A model's tokenizer. Owns `backend`, the library's own: its truncation and padding are switched off."""

    def __init__(self, backend: tokenizers.Tokenizer, chat: ChatTemplate | None = None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.chat = chat or ChatTemplate({}, {})
        self._read = reader_of(backend)
        self._special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        ids = backend.get_vocab().values()
        self._end = max(ids, default=-1) + 1
        self._holes = set(range(self._end)).difference(ids)  # ids that are no tokens
        self._silent = self._holes | self._special

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
        _mark_special_tokens(backend, read_object(directory / "tokenizer_config.json"))
        _mark_special_tokens(backend, read_object(directory / "special_tokens_map.json"))
        return cls(backend, ChatTemplate.from_directory(directory))

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`, with the special tokens the model expects around it. A long text is encoded in a thread."""
        if len(text) < LONG_TEXT:
            return self._encode(text, add_special_tokens)
        return await asyncio.to_thread(self._encode, text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Not `encode`: that one holds the interpreter's lock, and with it the event loop.
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; special tokens are left out, or spelled as they are. Ids that are no tokens have no text."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    @property
    def vocab_size(self) -> int:
        """How many tokens there are; a model may have room for more."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def has_text(self, token: int, *, skip_special_tokens: bool = True) -> bool:
        """False for ids outside the vocabulary, and for special tokens if skipped: leaving them out changes no text."""
        return 0 <= token < self._end and token not in (self._silent if skip_special_tokens else self._holes)

    def piece(self, token: int) -> str:
        """A token as the vocabulary writes it, such as "\u0120hello"; empty for an id that is no token."""
        return self.backend.id_to_token(token) or ""

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to a text, as UTF-8 or a part of it; a special token as it is spelled.

        Together the tokens of a text are its bytes, but for what the tokenizer itself adds: special tokens, and the
        space that SentencePiece puts before a text (and decoding takes away again).
        """
        piece = self.piece(token)
        return piece.encode() if token in self._special else self._read(piece)

    def token_string(self, token: int) -> str:
        """The same as OpenAI writes it in log-probabilities: text, or "bytes:\\xe2\\x80" if it is none alone."""
        return as_text(self.token_bytes(token))


def keep_last(ids: list[int], limit: int | None) -> list[int]:
    """The last `limit` tokens of a prompt, as `truncate_prompt_tokens` asks for; all of them without a limit."""
    assert limit is None or limit > 0, "nothing would be left"
    return ids if limit is None else ids[-limit:]


def _mark_special_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Some tokenizer.json leave it to the files beside them to say which tokens are special."""
    named = [config.get(name) for name in NAMES]
    named += config.get("additional_special_tokens") or []
    named += [token for token in (config.get("added_tokens_decoder") or {}).values() if token.get("special")]
    special = {content for token in named if (content := content_of(token)) is not None}
    known = sorted(content for content in special if backend.token_to_id(content) is not None)  # never a new token
    backend.add_special_tokens(known)
