"""Splits the text of one message, as it arrives, into reasoning, content and tool calls.

A tool call is passed on once it is certain. After a marker, in formats with JSON, that is when the arguments of a tool
of the request begin, which follow in parts as they arrive; otherwise, when the call is complete. So the parts of a
message do not depend on where its text was cut. What begins like a call and is none stays text, of which not a
character is lost. Knows neither tokens nor requests.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from itertools import groupby
from typing import Literal, NamedTuple, TypeAlias

from server.text.tool_parsers.calls import Calls, Schemas, ToolCall, make_openai_id, merge_calls
from server.text.tool_parsers.reasoning import ReasoningFormat
from server.text.tool_parsers.source import NotACall, Reading, TextSource, measure_partial_marker
from server.text.tool_parsers.tool_format import ToolFormat

# Most characters that may be read a second time because they began like a call; after that the message is only text
MAX_REREAD = 2**18
Channel: TypeAlias = Literal["content", "reasoning"]


class MessageText(NamedTuple):
    """Text of a message."""

    channel: Channel
    text: str


MessagePart: TypeAlias = MessageText | ToolCall


class MessageDelta(NamedTuple):
    """The parts that a piece of text adds to a message, in the order in which the model writes them."""

    parts: tuple[MessagePart, ...] = ()

    @property
    def content(self) -> str:
        return self._join("content")

    @property
    def reasoning(self) -> str:
        return self._join("reasoning")

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple(part for part in self.parts if isinstance(part, ToolCall))

    def without(self, channel: Channel) -> MessageDelta:
        """Return the parts but for the texts of a channel."""
        return MessageDelta(tuple(part for part in self.parts if isinstance(part, ToolCall) or part.channel != channel))

    def _join(self, channel: Channel) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, MessageText) and part.channel == channel)


def join_parts(parts: Iterable[MessagePart]) -> tuple[MessagePart, ...]:
    """Return the parts of a message with one part for each run of text of one channel, or of parts of one call."""
    runs = groupby(parts, lambda part: part.channel if isinstance(part, MessageText) else part.number)
    return tuple(_join_run(list(run)) for _, run in runs)


def _join_run(run: Sequence[MessagePart]) -> MessagePart:
    if isinstance(run[0], MessageText):
        return run[0]._replace(text="".join(part.text for part in run if isinstance(part, MessageText)))
    return merge_calls(part for part in run if isinstance(part, ToolCall))[0]


class MessageParser:
    """The parser of one message. Call `push` for each piece of its text, and `finish` at the end."""

    def __init__(
        self,
        tools: ToolFormat | None = None,
        reasoning: ReasoningFormat | None = None,
        *,
        schemas: Schemas | None = None,
        parallel: bool = True,
        reasoning_is_open: bool = False,
        calls_come_first: bool = False,
        calls_only: bool = False,
    ) -> None:
        """Start a message. Without `tools` there are no calls in it, without `reasoning` no reasoning.

        `schemas` are those of the parameters of all tools. With `reasoning_is_open` it begins within reasoning. With
        `calls_come_first`, nothing is a call after the beginning of the content. With `calls_only`, nothing but calls
        can follow the reasoning, so that markers at the end of the message, also a part of one, are no content.
        """
        self.source = TextSource()
        self.tools = tools
        self.reasoning = reasoning
        self.calls = Calls(
            schemas or {},
            parallel=parallel,
            make_id=make_openai_id if tools is None else tools.make_id,
            on_call=lambda call: self._parts.append(call),
        )
        self.channel: Channel = "reasoning" if reasoning_is_open else "content"
        self.reasoning_spans: list[tuple[int, int]] = []  # first character and end of each part of the reasoning
        self._parts: list[MessagePart] = []  # that `push` has not returned yet
        self._space = ""  # white space that belongs to the message only if text of the same channel follows
        self._strips = reasoning_is_open  # whether white space that follows is left out
        self._has_content = False
        self._calls_come_first = calls_come_first
        self._calls_only = calls_only
        self._is_at_start = True  # whether the message has no content yet, or none after a call
        self._around = tuple({text for row in (tools, reasoning) if row is not None for text in row.around})
        self.budget = MAX_REREAD  # characters that may still be read a second time
        self._reading: Generator[None, None, None] = self.read()
        self._is_read = False

    def push(self, text: str) -> MessageDelta:
        """Add a piece of the message's text; return what is certain now."""
        if text:
            self.source.push(text)
            self._read_on()
        return self._take()

    def finish(self) -> MessageDelta:
        """Return the rest of the message; call it when no more text follows."""
        self.source.ended = True
        self._read_on()
        if self._space and not self._strips and not self.calls.count and self.channel == "content":
            self._parts.append(MessageText("content", self._space))
        delta = self._take()
        if self._calls_only and self._has_only_markers(delta.content):
            return delta.without("content")
        return delta

    def _has_only_markers(self, text: str) -> bool:
        """Return whether a text has nothing but markers and white space, the last marker perhaps in part."""
        rows = (row for row in (self.tools, self.reasoning) if row is not None)
        markers = {marker for row in rows for marker in row.markers}
        rest = text.strip()
        while not any(marker.startswith(rest) for marker in markers):
            if not (found := [marker for marker in markers if rest.startswith(marker)]):
                return False
            rest = rest.removeprefix(max(found, key=len)).lstrip()
        return True

    def _read_on(self) -> None:
        if not self._is_read:
            self._is_read = next(self._reading, self) is self

    def _take(self) -> MessageDelta:
        parts, self._parts = self._parts, []
        return MessageDelta(join_parts(parts) if len(parts) > 1 else tuple(parts))

    # ------------------------------------------------------------ reading
    def read(self) -> Reading[None]:
        """Read the message to its end."""
        if self.channel == "content" and self.reasoning is not None:
            yield from self._read_opening(self.reasoning)
        while True:
            closing = self.reasoning.closing if self.reasoning is not None and self.channel == "reasoning" else ()
            marker = yield from self.read_text((*closing, *self._get_call_markers(), *self._around))
            if marker is None:
                return
            if marker in closing:
                self.switch("content")
            elif marker not in self._around:
                yield from self._read_calls(marker)

    def _read_opening(self, reasoning: ReasoningFormat) -> Reading[None]:
        yield from self.source.skip_space()
        if (yield from self.source.accept(*reasoning.opening)) is not None:
            self.switch("reasoning")
            return
        self.add_text(self.source.slice(0, self.source.position))

    def _get_call_markers(self) -> tuple[str, ...]:
        """Return the markers with which a call may begin here."""
        if self.tools is None or self.budget < 0 or (self._calls_come_first and not self._is_at_start):
            return ()
        if self.channel == "reasoning":
            return self.tools.begins
        return (*self.tools.begins, *(self.tools.bare if self._is_at_start or not self.tools.bare_at_start else ()))

    def read_text(self, markers: tuple[str, ...]) -> Reading[str | None]:
        """Read text of the message up to the first of these markers, and return it; None if the message ends."""
        while True:
            if (found := self.source.find(markers)) is not None and not self.source.may_become(found[0], markers):
                at, marker = found
                self.take_text(at)
                self.source.position = at + len(marker)
                return marker
            rest = self.source.slice(self.source.position)
            held = 0 if self.source.ended else measure_partial_marker(rest, markers)
            self.take_text(self.source.position + len(rest) - held)
            self.source.forget_read()
            if self.source.ended:
                return None
            yield

    def _read_calls(self, marker: str) -> Reading[None]:
        """Read what follows a marker of calls; if it is no call, the marker is text, and what follows is read anew."""
        assert self.tools is not None, "only with tools there are such markers"
        start, count = self.source.position - len(marker), self.calls.count
        try:
            yield from self._read_call(self.tools, marker, start)
        except NotACall:
            if self.calls.count == count:
                self.budget -= max(self.source.position, self.source.furthest) - start
                self.source.position = self.source.furthest = start
                return self.take_text(start + len(marker))
            self.end_certain_call()
            if not self.tools.ends or (yield from self.source.accept(*self.tools.ends)) is None:
                return None
        self.switch("content")
        self._is_at_start = True
        while self.tools.ends:
            yield from self.source.skip_space()
            if (yield from self.source.accept(*self.tools.ends)) is None:
                break
        return None

    def end_certain_call(self) -> None:
        """End a call that goes on otherwise than calls do: what follows the last part of its arguments is text."""
        self.budget -= max(self.source.position, self.source.furthest) - self.source.kept
        self.source.position = self.source.furthest = self.source.kept
        self.switch("content")
        self._is_at_start = True

    def _read_call(self, tools: ToolFormat, marker: str, start: int) -> Reading[None]:
        if self._calls_come_first and not self._is_at_start:
            raise NotACall
        if marker in tools.begins:
            while tools.inner:
                yield from self.source.skip_space()
                if (yield from self.source.accept(*tools.inner)) is None:
                    break
            yield from tools.read(self.source, self.calls)
            return
        if tools.bare_at_start and not self._is_at_start:
            raise NotACall
        self.source.position = start
        yield from (tools.read_bare or tools.read)(self.source, self.calls)

    # ------------------------------------------------------------ what was read
    def take_text(self, end: int) -> None:
        """Read text of the channel, up to an index of the source."""
        start, self.source.position = self.source.position, end
        if self.channel == "reasoning" and end > start:
            first, behind = (self.source.num_forgotten + index for index in (start, end))
            if self.reasoning_spans and self.reasoning_spans[-1][1] == first:
                first, _ = self.reasoning_spans.pop()
            self.reasoning_spans.append((first, behind))
        self.add_text(self.source.slice(start, end))

    def add_text(self, text: str) -> None:
        """Add text of the channel, without white space at the beginning and the end of reasoning, and around calls."""
        if self._strips:
            text = text.lstrip()
        if not (body := text.rstrip()):
            self._space += text
            return
        self._parts.append(MessageText(self.channel, self._space + body))
        self._space = text[len(body) :]
        self._strips = False
        if self.channel == "content":
            self._is_at_start = False
            self._has_content = True

    def switch(self, channel: Channel) -> None:
        """Begin a new part of the message. White space between two parts of content stays."""
        if channel != self.channel or not self._has_content:
            self._space = ""
        self.channel = channel
        self._strips = True
