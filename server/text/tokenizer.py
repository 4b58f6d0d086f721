"""The interface of tokenizers that API workers use, and `Tokenizer`, which does all work in this process.

The server uses `processes/sandbox.py` instead: the model's files may make encoding slow, so it runs in a process with
limits. Knows neither requests nor the engine.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from server.grammar.constraint import Constraint
from server.text.chat.template import ChatTemplate
from server.text.encoder import Encoder
from server.text.model_files import get_token_text, read_json_object, read_special_tokens
from server.text.processes.messages import Call, CheckGrammar, Decode, Encode, EncodeChat, Encoded, Infill
from server.text.vocabulary import Vocabulary

MAX_INLINE_LENGTH = 2000  # most characters encoded on the event loop: about 1 ms, in which other requests wait

Self = TypeVar("Self", bound="TokenizerBase")


class TokenizerBase(Vocabulary, ABC):
    """A tokenizer with its chat template, used on one event loop within `async with`.

    Encoding raises TextRefused for a text that cannot be encoded, TextUnavailable if a later attempt may succeed.
    `decode`, for a few ids, works without an event loop.
    """

    @abstractmethod
    async def answer(self, call: Call) -> Encoded:
        """Return the ids, the text or both that `call` (Encode, EncodeChat, Infill, Decode) asks for.

        Raises TextRefused for a text that cannot be encoded, TextUnavailable if a later attempt may succeed.
        """

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`; with `add_special_tokens`, between the special tokens that the model expects."""
        return (await self.answer(Encode(text, add_special_tokens))).ids

    async def encode_chat(self, chat: EncodeChat) -> Encoded:
        """Return the prompt that the chat template writes, and its ids."""
        return await self.answer(chat)

    async def encode_infill(self, prefix: str, suffix: str) -> list[int]:
        """Return the ids of a prompt after which the model writes the text between prefix and suffix."""
        return (await self.answer(Infill(prefix, suffix))).ids

    async def decode_many(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of any number of ids; unlike `decode` it does not block the event loop."""
        return (await self.answer(Decode(list(ids), skip_special_tokens))).text

    async def check_grammar(self, constraint: Constraint) -> str:
        """Return the Lark grammar of a constraint. Raises TextRefused if it is wrong or takes too long to compile."""
        return (await self.answer(CheckGrammar(constraint.kind, constraint.text))).text

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
        """Load the tokenizer of a model's directory. Raises SettingsError if there is none, or it cannot be used."""
        tokenizer = cls.__new__(cls)
        tokenizer._set_encoder(Encoder.from_directory(directory))
        return tokenizer

    def _set_encoder(self, encoder: Encoder) -> None:
        super().__init__(encoder.vocabulary_data)
        self.encoder = encoder
        self.backend = encoder.backend
        self.chat_template = encoder.chat_template

    async def answer(self, call: Call) -> Encoded:
        """Return the ids or the text that `call` (Encode, Decode, ...) asks for; long calls run in a thread."""
        if isinstance(call, Encode) and len(call.text) < MAX_INLINE_LENGTH:
            return self.encoder.answer(call)
        return await asyncio.to_thread(self.encoder.answer, call)


def truncate_prompt(ids: list[int], limit: int | None) -> list[int]:
    """Return the last `limit` tokens of a prompt (the field `truncate_prompt_tokens`); all of them if it is None."""
    assert limit is None or limit > 0, "nothing would be left"
    return ids if limit is None else ids[-limit:]


# Keys of tokenizer_config.json whose values are paths on the machine where the tokenizer was saved.
PATHS = ("vocab_file", "merges_file", "tokenizer_file", "name_or_path")
DEFAULT_TOKENIZER_CLASS = "PreTrainedTokenizerFast"  # for a tokenizer_config.json that names no class


def read_tokenizer_info(directory: Path) -> dict[str, Any]:
    """Return the contents of tokenizer_config.json, with tokens as strings, and the chat template.

    Raises SettingsError for files that are not of the expected form.
    """
    config = read_json_object(directory / "tokenizer_config.json")
    info = {"tokenizer_class": DEFAULT_TOKENIZER_CLASS} | {
        name: _replace_token_objects(value) for name, value in config.items() if name not in PATHS
    }
    info |= read_special_tokens(directory)
    template = ChatTemplate.from_directory(directory).source
    return info if template is None else info | {"chat_template": template}


def _replace_token_objects(value: Any) -> Any:
    """Return a JSON value in which each token that is an object is replaced by its text."""
    if isinstance(value, dict):
        content = get_token_text(value)
        return {name: _replace_token_objects(member) for name, member in value.items()} if content is None else content
    return [_replace_token_objects(item) for item in value] if isinstance(value, list) else value
