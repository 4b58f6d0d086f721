"""How the served model writes tool calls and reasoning, and the parsers of its messages.

The families' formats are chosen by settings, or by the model's chat templates. Knows no endpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from config.errors import SettingsError
from server.text.tool_parsers.call_forms import make_call_grammar
from server.text.tool_parsers.calls import Schemas
from server.text.tool_parsers.formats import ToolFormat, find_tool_format, list_tool_formats
from server.text.tool_parsers.harmony import HarmonyParser
from server.text.tool_parsers.message_parser import MessageParser
from server.text.tool_parsers.reasoning import ReasoningFormat, find_reasoning_format, list_reasoning_formats
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

    def make_grammar(self, schemas: Schemas, *, parallel: bool) -> str | None:
        """Return the grammar, in the language of llguidance, of messages that are calls of these tools.

        None: the family has none.
        """
        if self.tools is None or self.tools.form is None:
            return None
        find, markers = self.vocabulary.find_special_token, self.tools.markers
        return make_call_grammar(self.tools.form, schemas, parallel=parallel, token_id=find, markers=markers)

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
    begun: str = ""  # the beginning of the message, which the prompt ends with

    @property
    def vocabulary(self) -> Vocabulary:
        """Return the vocabulary that gives the messages' text."""
        return self.format.visible_reasoning if self.schemas is None else self.format.visible

    def make_parser(self, prompt: str) -> MessageParser:
        """Return the parser of a message that follows the prompt."""
        tools = None if self.schemas is None else self.format.tools
        reasoning = self.format.reasoning
        is_harmony = any(row is not None and row.harmony for row in (tools, reasoning))
        is_open = reasoning is not None and reasoning.is_open(prompt.removesuffix(self.begun))
        make = HarmonyParser if is_harmony else MessageParser
        parser = make(tools, reasoning, schemas=self.schemas, parallel=self.parallel, reasoning_is_open=is_open)
        parser.push(self.begun)
        return parser


def begin_call(format: MessageFormat, prompt: str, name: str | None) -> str | None:
    """Return the text with which a message begins that calls a tool, the one of this name if there is one.

    It ends the reasoning if the prompt has begun that. None: the family's format is not known well enough.
    """
    if format.tools is None or format.tools.form is None:
        return None
    return end_reasoning(format, prompt) + format.tools.form.begin(name)


def end_reasoning(format: MessageFormat, prompt: str) -> str:
    """Return the text that ends the reasoning that a prompt has begun; empty if it has begun none."""
    reasoning = format.reasoning
    is_open = reasoning is not None and not reasoning.harmony and reasoning.is_open(prompt)
    return f"\n{reasoning.closing[0]}\n\n" if reasoning is not None and is_open else ""
