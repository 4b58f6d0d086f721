"""How the served model writes tool calls and reasoning, and the parsers of its messages.

The families' formats are chosen by settings, or by the model's chat templates. Knows no endpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from config.errors import SettingsError
from server.text.tool_parsers.calls import Schemas
from server.text.tool_parsers.formats import find_tool_format, list_tool_formats
from server.text.tool_parsers.harmony import HarmonyParser
from server.text.tool_parsers.message_grammar import MessageOutline, ReasoningState, make_message_grammar
from server.text.tool_parsers.message_parser import MessageParser
from server.text.tool_parsers.reasoning import ReasoningFormat, find_reasoning_format, list_reasoning_formats
from server.text.tool_parsers.tool_format import ToolFormat
from server.text.vocabulary import Vocabulary

T = TypeVar("T")
AUTO, OFF = "auto", "off"


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
        return self.vocabulary.with_visible({*markers, *self._reasoning_markers})

    @cached_property
    def visible_reasoning(self) -> Vocabulary:
        """Return the vocabulary in which only the markers of reasoning have text."""
        return self.vocabulary.with_visible(set(self._reasoning_markers))

    def make_grammar(self, message: MessageOutline) -> str | None:
        """Return the grammar, in llguidance's Lark, of such messages; None if calls cannot be told from other text."""
        return make_message_grammar(message, self.tools, self.reasoning, self.vocabulary.find_special_token)

    def find_reasoning_state(self, prompt: str) -> ReasoningState:
        """Return whether a message that follows the prompt is within reasoning, may begin with it, or has none."""
        if self.reasoning is None or prompt.rstrip().endswith(self.reasoning.closing):
            return "over"
        return "open" if self.reasoning.is_open(prompt) else "possible"

    @property
    def _reasoning_markers(self) -> tuple[str, ...]:
        return () if self.reasoning is None else self.reasoning.markers


def _choose(setting: str, value: str, rows: Mapping[str, T], found: T | None) -> T | None:
    """Return the row that the value of a setting means; `found` is the one that the chat templates show."""
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
    has_document: bool = False  # whether a message without calls is a document, in which nothing is a call

    @property
    def vocabulary(self) -> Vocabulary:
        """Return the vocabulary that gives the messages' text."""
        return self.format.visible_reasoning if self.schemas is None else self.format.visible

    def make_parser(self, prompt: str) -> MessageParser:
        """Return the parser of a message that follows the prompt."""
        tools = None if self.schemas is None else self.format.tools
        reasoning = self.format.reasoning
        is_harmony = any(row is not None and row.harmony for row in (tools, reasoning))
        make = HarmonyParser if is_harmony else MessageParser
        return make(
            tools,
            reasoning,
            schemas=self.schemas,
            parallel=self.parallel,
            reasoning_is_open=reasoning is not None and reasoning.is_open(prompt),
            calls_come_first=self.has_document,
        )
