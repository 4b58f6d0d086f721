"""Encodes texts and conversations with a model's tokenizer and chat templates, one call after another.

Wraps the `tokenizers` library, and reads the model's files as transformers does. Depending on these files a call may
take any time and memory; `processes/sandbox_process.py` sets limits. Knows neither requests nor the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import tokenizers

from config.errors import SettingsError
from server.text.added_tokens import add_tokens
from server.text.chat.special_texts import SpecialTexts
from server.text.chat.template import RESERVED, ChatTemplate
from server.text.errors import InfillError, wrap_tokenizer_error
from server.text.model_files import convert_library_errors, explain_missing_tokenizer
from server.text.processes.messages import Call, ChatDefaults, CheckGrammar, Decode, Encode, EncodeChat, Encoded, Infill
from server.text.vocabulary import Vocabulary, extract_vocabulary

if TYPE_CHECKING:
    from server.grammar.matcher import GrammarChecker

PREFIX, SUFFIX = "{prefix}", "{suffix}"

FIM_FORMATS = (  # fill-in-the-middle prompts of several models: prefix and suffix between special tokens
    ("<|fim_prefix|>", PREFIX, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>"),  # Qwen Coder, CodeGemma
    ("<fim_prefix>", PREFIX, "<fim_suffix>", SUFFIX, "<fim_middle>"),  # StarCoder, Granite, StableCode
    ("<fim-prefix>", PREFIX, "<fim-suffix>", SUFFIX, "<fim-middle>"),  # SantaCoder
    ("<|code_prefix|>", PREFIX, "<|code_suffix|>", SUFFIX, "<|code_middle|>"),  # GLM
    (
        "<\uff5cfim\u2581begin\uff5c>",
        PREFIX,
        "<\uff5cfim\u2581hole\uff5c>",
        SUFFIX,
        "<\uff5cfim\u2581end\uff5c>",
    ),  # DeepSeek
    ("\u2581<PRE>", PREFIX, "\u2581<SUF>", SUFFIX, "\u2581<MID>"),  # Code Llama
    ("<PRE>", PREFIX, "<SUF>", SUFFIX, "<MID>"),
    ("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX),  # Codestral
)


def make_infill_prompt(encoder: Encoder, prefix: str, suffix: str) -> list[int]:
    """Return a prompt that the model continues with the text between prefix and suffix.

    Raises InfillError if the model has no tokens for such prompts.
    """
    for form in FIM_FORMATS:
        if marks := _find_mark_ids(encoder, form):
            break
    else:
        raise InfillError("the model has no tokens to fill in the middle: leave suffix out, or use a model for code")
    before = encoder.encode(prefix, add_special_tokens=False)
    parts = marks | {PREFIX: before, SUFFIX: encoder.encode_continuations([suffix])[0]}
    return encoder.outer_tokens[0] + [token for part in form for token in parts[part]]


def _find_mark_ids(encoder: Encoder, form: tuple[str, ...]) -> dict[str, list[int]]:
    """Return the ids of a fill-in-the-middle format's special tokens by name; empty if the model lacks one."""
    marks = [part for part in form if part not in (PREFIX, SUFFIX)]
    ids = {mark: [token] for mark in marks if (token := encoder.backend.token_to_id(mark)) is not None}
    return ids if len(ids) == len(marks) else {}


class Encoder:
    """A model's tokenizer and chat templates. Switches off the truncation and padding of its `backend`."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat: ChatTemplate | None = None,
        defaults: ChatDefaults = ChatDefaults(),  # noqa: B008, as it is immutable
    ) -> None:
        """Wrap a tokenizer.

        Raises SettingsError for a tokenizer whose decoder may take any time, and for reserved names of variables.
        """
        if reserved := sorted(RESERVED & defaults.default_chat_template_kwargs.keys()):
            raise SettingsError(f"default_chat_template_kwargs: {', '.join(reserved)} cannot be a variable of its own")
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.chat_template = chat or ChatTemplate({}, {})
        self.vocabulary_data = msgspec.structs.replace(
            extract_vocabulary(backend), template_source=self.chat_template.sources
        )
        self.vocabulary = Vocabulary(self.vocabulary_data)
        self._default_variables = defaults.default_chat_template_kwargs
        self._special_texts = SpecialTexts(backend) if defaults.split_special_tokens else None

    @classmethod
    def from_directory(cls, directory: Path, defaults: ChatDefaults = ChatDefaults()) -> Encoder:  # noqa: B008
        """Load the tokenizer of a model's directory. Raises SettingsError if there is none, or it cannot be used."""
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise SettingsError(f"model: {directory} has no tokenizer.json{explain_missing_tokenizer(directory)}")
        chat = ChatTemplate.from_directory(directory)
        with convert_library_errors(f"model: {file} is not a tokenizer this server can read"):
            backend = tokenizers.Tokenizer.from_file(str(file))
            add_tokens(backend, directory)
            return cls(backend, chat, defaults)

    def answer(self, call: Call) -> Encoded:
        """Return the ids or text that `call` (Encode, ...) asks for. Raises TextRefused if there are none."""
        match call:
            case Encode(text, special):
                return Encoded(self.encode(text, add_special_tokens=special))
            case EncodeChat():
                return self._encode_chat(call)
            case Infill(prefix, suffix):
                return Encoded(make_infill_prompt(self, prefix, suffix))
            case Decode(ids, skip):
                return Encoded(text=self.vocabulary.decode(ids, skip_special_tokens=skip))
            case CheckGrammar(kind, text):
                return Encoded(text=self._grammar_checker.check(kind, text))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of `text`, with the model's special tokens around it if `add_special_tokens` is set.

        Raises TokenizerError if the library fails.
        """
        return self._encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def _encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        try:  # also of one text in a batch, as `encode` of the library holds the GIL and so stops the event loop
            found = self.backend.encode_batch_fast([*texts], add_special_tokens=add_special_tokens)
        except BaseException as error:
            raise wrap_tokenizer_error(error) from None
        return [each.ids for each in found]

    def encode_continuations(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts that continue others, without the space that SentencePiece puts before a text."""
        break_ids = self._line_break
        if not break_ids or not self.vocabulary.token_bytes(break_ids[0]).startswith(b" "):
            return self._encode_batch(texts, add_special_tokens=False)
        behind = self._encode_batch([f"\n{text}" for text in texts], add_special_tokens=False)
        cut = [ids[len(break_ids) :] if ids[: len(break_ids)] == break_ids else None for ids in behind]
        return [
            ids if ids is not None else self.encode(text, add_special_tokens=False)
            for ids, text in zip(cut, texts, strict=True)
        ]

    @cached_property
    def outer_tokens(self) -> tuple[list[int], list[int]]:
        """The ids of the special tokens that the tokenizer puts before and after every text."""
        plain, whole = [self.encode("a", add_special_tokens=special) for special in (False, True)]
        start = next(i for i in range(len(whole) + 1) if whole[i : i + len(plain)] == plain)
        return whole[:start], whole[start + len(plain) :]

    @cached_property
    def _line_break(self) -> list[int]:
        return self.encode("\n", add_special_tokens=False)

    @cached_property
    def _grammar_checker(self) -> GrammarChecker:
        from server.grammar.matcher import GrammarChecker  # llguidance takes 50 ms and 8 MB to import

        return GrammarChecker(self.vocabulary)

    def _encode_chat(self, call: EncodeChat) -> Encoded:
        if self._special_texts is None:
            text = self._render(call)
            return Encoded(self.encode(text, add_special_tokens=call.add_special_tokens), text)
        marker = self._special_texts.begin()
        marked = msgspec.structs.replace(
            call,
            messages=marker.mark(call.messages),
            tools=marker.mark(call.tools),
            documents=marker.mark(call.documents),
            variables=marker.mark(call.variables),
        )
        longest = call.max_length + marker.num_added_characters
        first, *others = marker.split(self._render(msgspec.structs.replace(marked, max_length=longest)))
        begin, end = self.outer_tokens if call.add_special_tokens else ([], [])
        ids = [self.encode(first, add_special_tokens=False), *self.encode_continuations(others)]
        return Encoded([*begin, *chain.from_iterable(ids), *end], "".join([first, *others]))

    def _render(self, call: EncodeChat) -> str:
        return self.chat_template.render_strict(
            call.messages,
            call.max_length,
            add_generation_prompt=call.add_generation_prompt,
            continue_final_message=call.continue_final_message,
            tools=call.tools,
            documents=call.documents,
            **self._default_variables | call.variables,
        )
