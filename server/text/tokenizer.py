"""Text to token ids and back, as API workers use it: `Tokenizer` does all of it in this process.

The server uses `sandbox.py` instead, which leaves to a process with limits what the model's own files may make slow.
Knows neither requests nor the engine.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from server.text.chat import ChatTemplate
from server.text.encoder import Encoder
from server.text.model_files import get_token_text, read_json_object, read_special_tokens
from server.text.processes.messages import Call, Decode, Encode, EncodeChat, Encoded, Infill
from server.text.vocabulary import Vocabulary

MAX_INLINE_LENGTH = 2000  # characters; encoding them takes about a millisecond, more would hold up other requests

Self = TypeVar("Self", bound="TokenizerBase")


class TokenizerBase(Vocabulary, ABC):
    """Encodes texts and conversations, and decodes. Encoding raises TextRefused and TextUnavailable.

    It is used within `async with`, on one event loop; decoding a few ids needs neither.
    """

    @abstractmethod
    async def answer(self, call: Call) -> Encoded:
        """Return the result of a call. Raises TextRefused, TextUnavailable."""

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`, with the special tokens the model expects around it."""
        return (await self.answer(Encode(text, add_special_tokens))).ids

    async def encode_chat(self, chat: EncodeChat) -> Encoded:
        """Return the prompt that the chat template writes, and its ids."""
        return await self.answer(chat)

    async def encode_infill(self, prefix: str, suffix: str) -> list[int]:
        """Return the ids of a prompt after which the model writes what stands between the two."""
        return (await self.answer(Infill(prefix, suffix))).ids

    async def decode_many(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return what `decode` does, of any number of ids: without holding up the event loop."""
        return (await self.answer(Decode(list(ids), skip_special_tokens))).text

    async def __aenter__(self: Self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None


class Tokenizer(TokenizerBase):
    """A model's tokenizer in this process, without limits: for tests and evaluations, where the model is trusted."""

    def __init__(self, backend: tokenizers.Tokenizer, chat: ChatTemplate | None = None) -> None:
        self._set_encoder(Encoder(backend, chat))

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Load the directory's tokenizer. Raises SettingsError if there is none that can be used."""
        tokenizer = cls.__new__(cls)
        tokenizer._set_encoder(Encoder.from_directory(directory))
        return tokenizer

    def _set_encoder(self, encoder: Encoder) -> None:
        super().__init__(encoder.vocabulary_data)
        self.encoder = encoder
        self.backend = encoder.backend
        self.chat_template = encoder.chat_template

    async def answer(self, call: Call) -> Encoded:
        """Return the result of a call; what may take long is done in a thread."""
        if isinstance(call, Encode) and len(call.text) < MAX_INLINE_LENGTH:
            return self.encoder.answer(call)
        return await asyncio.to_thread(self.encoder.answer, call)


def truncate_prompt(ids: list[int], limit: int | None) -> list[int]:
    """Return the last `limit` tokens of a prompt, as `truncate_prompt_tokens` asks for; without a limit all of them."""
    assert limit is None or limit > 0, "nothing would be left"
    return ids if limit is None else ids[-limit:]


PATHS = ("vocab_file", "merges_file", "tokenizer_file", "name_or_path")  # on the machine where the tokenizer was saved
DEFAULT_TOKENIZER_CLASS = "PreTrainedTokenizerFast"  # of a tokenizer.json that has no other


def read_tokenizer_info(directory: Path) -> dict[str, Any]:
    """Return what tokenizer_config.json has, tokens as texts, and the chat template. Raises SettingsError."""
    config = read_json_object(directory / "tokenizer_config.json")
    info = {"tokenizer_class": DEFAULT_TOKENIZER_CLASS} | {
        name: _replace_token_objects(value) for name, value in config.items() if name not in PATHS
    }
    info |= read_special_tokens(directory)
    template = ChatTemplate.from_directory(directory).source
    return info if template is None else info | {"chat_template": template}


def _replace_token_objects(value: Any) -> Any:
    """Return a value with the text of each token that is written as an object."""
    if isinstance(value, dict):
        content = get_token_text(value)
        return {name: _replace_token_objects(member) for name, member in value.items()} if content is None else content
    return [_replace_token_objects(item) for item in value] if isinstance(value, list) else value
