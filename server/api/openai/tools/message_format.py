"""How the served model writes tool calls and reasoning, and how the messages of a request are split into them.

The families' formats are chosen by settings, or by the model's chat templates. Knows no endpoint.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from config.errors import SettingsError
from server.text.output import OutputToken
from server.text.tool_parsers.calls import Schemas
from server.text.tool_parsers.formats import find_tool_format, list_tool_formats
from server.text.tool_parsers.harmony import HarmonyParser
from server.text.tool_parsers.message_grammar import MessageOutline, ReasoningState, make_message_grammar
from server.text.tool_parsers.message_parser import MessageDelta, MessageParser, join_parts
from server.text.tool_parsers.reasoning import (
    HARMONY_MARKERS,
    ReasoningFormat,
    find_reasoning_format,
    list_reasoning_formats,
)
from server.text.tool_parsers.tool_format import ToolFormat
from server.text.vocabulary import Vocabulary

T = TypeVar("T")
AUTO, OFF = "auto", "off"
HARMONY_FINAL = "<|channel|>final<|message|>"  # before the content of a message of gpt-oss


@dataclass(frozen=True)
class MessageFormat:
    """How the served model writes tool calls and reasoning; None: it is not known, or not to be looked for."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    vocabulary: Vocabulary

    @classmethod
    def choose(cls, vocabulary: Vocabulary, tool_call_parser: str, reasoning_parser: str) -> MessageFormat:
        """Return the formats that the settings name; for `auto`, those that the model's chat templates show.

        Raises SettingsError for an unknown name.
        """
        source = vocabulary.template_source
        tools, reasoning = list_tool_formats(), list_reasoning_formats()
        return cls(
            _choose("tool_call_parser", tool_call_parser, tools, find_tool_format(source)),
            _choose("reasoning_parser", reasoning_parser, reasoning, find_reasoning_format(source)),
            vocabulary,
        )

    @cached_property
    def visible(self) -> Vocabulary:
        """Return the vocabulary in which markers of tool calls and reasoning have text even if they are special."""
        markers = self.tools.markers if self.tools is not None else ()
        return self.vocabulary.with_visible({*markers, *self.reasoning_markers})

    @cached_property
    def visible_reasoning(self) -> Vocabulary:
        """Return the vocabulary in which only the markers of reasoning have text."""
        return self.vocabulary.with_visible(set(self.reasoning_markers))

    def make_grammar(self, message: MessageOutline) -> str | None:
        """Return the Lark grammar of a message of the model; None if calls cannot be told from other text."""
        return make_message_grammar(message, self.tools, self.reasoning, self.vocabulary.find_special_token)

    def find_reasoning_state(self, prompt: str) -> ReasoningState:
        """Return whether a message that follows the prompt is within reasoning, may begin with it, or has none."""
        if self.reasoning is None or prompt.rstrip().endswith(self.reasoning.closing):
            return "over"
        return "open" if self.reasoning.is_open(prompt) else "possible"

    @property
    def reasoning_markers(self) -> tuple[str, ...]:
        """Return the texts that begin and end reasoning."""
        return () if self.reasoning is None else self.reasoning.markers


def _choose(setting: str, value: str, rows: Mapping[str, T], found: T | None) -> T | None:
    """Return the row that the value of a setting names; `found` is the row that the chat templates show."""
    if value == AUTO:
        return found
    if value == OFF:
        return None
    if value not in rows:
        raise SettingsError(f"{setting}: {value!r} is not one of {', '.join((AUTO, OFF, *rows))}")
    return rows[value]


@dataclass(frozen=True)
class MessageParsing:
    """How the messages of one request are split into content, reasoning and tool calls."""

    format: MessageFormat
    schemas: Schemas | None  # of the tools that the model may call; None: calls are text
    parallel: bool = True  # whether a message may have several calls
    include_reasoning: bool = True
    constrains_content: bool = False  # whether a grammar constrains the content, in which nothing is a call then
    calls_only: bool = False  # whether a grammar admits nothing but calls after the reasoning

    @property
    def vocabulary(self) -> Vocabulary:
        """Return the vocabulary that decodes the messages: the markers to look for have text in it."""
        return self.format.visible_reasoning if self.schemas is None else self.format.visible

    @property
    def _tools(self) -> ToolFormat | None:
        return None if self.schemas is None else self.format.tools

    @property
    def _is_harmony(self) -> bool:
        return any(row is not None and row.harmony for row in (self._tools, self.format.reasoning))

    def make_parser(self, prompt: str) -> MessageParser:
        """Return the parser of a message that follows the prompt."""
        reasoning = self.format.reasoning
        if self.constrains_content and self.format.find_reasoning_state(prompt) == "over":
            reasoning = None  # the grammar allows none, so what looks like reasoning is content
        make = HarmonyParser if self._is_harmony else MessageParser
        return make(
            self._tools,
            reasoning,
            schemas=self.schemas,
            parallel=self.parallel,
            reasoning_is_open=reasoning is not None and reasoning.is_open(prompt),
            calls_come_first=self.constrains_content,
            calls_only=self.calls_only,
        )

    def make_splitter(self, prompt: str) -> MessageSplitter:
        """Return what splits the message that follows the prompt."""
        return MessageSplitter(self.make_parser(prompt), includes_reasoning=self.include_reasoning)

    def find_misread(self, contents: Iterable[str], prompt: str) -> str | None:
        """Return the first of these contents that a parser would not return unchanged; None if there is none.

        Such a content has a text that the model's family uses as a marker of reasoning, of calls or of message parts.
        """
        markers = set(HARMONY_MARKERS if self._is_harmony else self.format.reasoning_markers)
        if self._tools is not None:
            markers |= {*self._tools.begins, *self._tools.bare}
        before = self._get_text_before_content(prompt)
        for content in contents:
            if any(marker in content for marker in markers):
                parser = self.make_parser(prompt)
                read = parser.push(before + content).content + parser.finish().content
                if read.strip() != content.strip():
                    return content
        return None

    def _get_text_before_content(self, prompt: str) -> str:
        """Return the shortest text that a message has before its content."""
        if self._is_harmony:
            return HARMONY_FINAL
        reasoning = self.format.reasoning
        return reasoning.closing[0] if reasoning is not None and reasoning.is_open(prompt) else ""


class MessageSplitter:
    """Splits one message as it arrives, and counts the tokens of its reasoning."""

    def __init__(self, parser: MessageParser, *, includes_reasoning: bool) -> None:
        """Split by `parser`; the reasoning is left out unless it `includes_reasoning`."""
        self._parser = parser
        self._includes_reasoning = includes_reasoning
        self._offsets: list[int] = []  # of the tokens, in the text

    def push(self, text: str, tokens: Sequence[OutputToken], *, ends: bool) -> MessageDelta:
        """Add text, and the tokens that begin in it; return what is certain then: with `ends`, the whole rest."""
        self._offsets += [token.offset for token in tokens] if self._parser.reasoning is not None else []
        parts = self._parser.push(text).parts
        if ends:
            parts = join_parts((*parts, *self._parser.finish().parts))
        delta = MessageDelta(parts)
        return delta if self._includes_reasoning else delta.without("reasoning")

    @property
    def has_calls(self) -> bool:
        return self._parser.calls.count > 0

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of tokens so far that were reasoning, without the markers around it, as in vLLM."""
        spans = self._parser.reasoning_spans
        return sum(bisect_left(self._offsets, end) - bisect_left(self._offsets, start) for start, end in spans)
