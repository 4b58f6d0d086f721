"""Encodes texts and conversations with a model's tokenizer and chat templates, one call after another.

Wraps the `tokenizers` library, and reads the model's files as transformers does. A call may take any time and memory,
as the model's files decide; `sandbox_process.py` runs it within limits. Knows neither requests nor the engine.
"""

from __future__ import annotations

from pathlib import Path

import tokenizers

from config.errors import SettingsError
from server.text.chat import ChatTemplate
from server.text.errors import readable
from server.text.infill import infill_prompt
from server.text.messages import Call, Decode, Encode, EncodeChat, Encoded, Infill
from server.text.model_files import NAMES, content_of, library_errors, read_object
from server.text.vocabulary import Vocabulary, vocabulary_of


class Encoder:
    """A model's tokenizer and chat templates. Owns `backend`: its truncation and padding are switched off."""

    def __init__(self, backend: tokenizers.Tokenizer, chat: ChatTemplate | None = None) -> None:
        """Wrap a tokenizer. Raises SettingsError for one that cannot decode in bounded time."""
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.chat = chat or ChatTemplate({}, {})
        self.data = vocabulary_of(backend)
        self.vocabulary = Vocabulary(self.data)

    @classmethod
    def from_directory(cls, directory: Path) -> Encoder:
        """Load the directory's tokenizer. Raises SettingsError if there is none that can be used."""
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise SettingsError(f"model: {directory} has no tokenizer.json; is it the directory of a model?")
        chat = ChatTemplate.from_directory(directory)
        with library_errors(f"model: {file} is not a tokenizer this server can read"):
            backend = tokenizers.Tokenizer.from_file(str(file))
            for name in ("tokenizer_config.json", "special_tokens_map.json"):
                _mark_special_tokens(backend, directory / name)
            return cls(backend, chat)

    def answer(self, call: Call) -> Encoded:
        """Return the result of a call. Raises TextRefused."""
        match call:
            case Encode(text, special):
                return Encoded(self.encode(text, add_special_tokens=special))
            case EncodeChat():
                return self._chat(call)
            case Infill(prefix, suffix):
                return Encoded(infill_prompt(self, prefix, suffix))
            case Decode(ids, skip):
                return Encoded(text=self.vocabulary.decode(ids, skip_special_tokens=skip))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of `text`, with the special tokens the model expects around it. Raises TokenizerError."""
        try:  # not `encode`: that one holds the interpreter's lock, and with it the event loop, where there is one
            return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:
            raise readable(error) from None

    def _chat(self, call: EncodeChat) -> Encoded:
        text = self.chat.render_all(
            call.messages,
            call.longest,
            add_generation_prompt=call.add_generation_prompt,
            continue_final_message=call.continue_final_message,
            **call.variables,
        )
        return Encoded(self.encode(text, add_special_tokens=call.add_special_tokens), text)


def _mark_special_tokens(backend: tokenizers.Tokenizer, file: Path) -> None:
    """Mark the tokens that `file` calls special, as some tokenizer.json do not. Raises SettingsError."""
    config = read_object(file)
    further, added = config.get("additional_special_tokens") or [], config.get("added_tokens_decoder") or {}
    if not isinstance(further, list):
        raise SettingsError(f"model: {file}: additional_special_tokens should be a list of tokens")
    if not isinstance(added, dict) or not all(isinstance(token, dict) for token in added.values()):
        raise SettingsError(f"model: {file}: added_tokens_decoder should have an object for each id")
    named = [*(config.get(name) for name in NAMES), *further]
    named += [token for token in added.values() if token.get("special")]
    special = {content for token in named if (content := content_of(token)) is not None}
    known = sorted(content for content in special if backend.token_to_id(content) is not None)  # never a new token
    backend.add_special_tokens(known)
