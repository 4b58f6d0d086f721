"""Messages in gpt-oss's format, in which everything has a header that names its channel and its recipient.

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>content<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"x": 1}<|call|>

`<|start|>assistant` before the first header is the prompt's last part. The recipient may follow it at once:

    <|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>{"x": 1}<|call|>
"""

from __future__ import annotations

import re

from server.text.tool_parsers.message_parser import MessageParser
from server.text.tool_parsers.source import NotACall, Reading
from server.text.tool_parsers.syntaxes.json_calls import read_arguments

HEADERS = ("<|start|>", "<|channel|>")
ENDS = ("<|end|>", "<|call|>", "<|return|>")
TOOLS = "functions."  # before a tool's name
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser(MessageParser):
    """The parser of one message of gpt-oss."""

    def read(self) -> Reading[None]:
        """Read the message to its end."""
        yield from self._read_recipient()
        while True:
            marker = yield from self.read_text((*HEADERS, *ENDS) if self.budget >= 0 else ENDS)
            if marker is None:
                return
            if marker in HEADERS:
                yield from self._read_part(marker)

    def _read_recipient(self) -> Reading[None]:
        """Read the rest of a header that the prompt has begun, if it goes on with a recipient."""
        yield from self.source.skip_space()
        found = yield from self.source.accept("to=")
        self.source.position = 0
        if found is not None:
            yield from self._read_part("")

    def _read_part(self, marker: str) -> Reading[None]:
        """Read a header, and a call if it is one; other text is left to be read. What is no header is text."""
        start, count = self.source.position - len(marker), self.calls.count
        try:
            header, _ = yield from self.source.read_until("<|message|>")
            recipient = _RECIPIENT.search(header)
            if self.tools is not None and recipient is not None and recipient[1].startswith(TOOLS):
                self.switch("content")
                return (yield from read_arguments(self.source, self.calls, recipient[1].removeprefix(TOOLS)))
        except NotACall:
            if self.calls.count > count:
                return self.end_certain_call()
            self.budget -= max(self.source.position, self.source.furthest) - start
            self.source.position = self.source.furthest = start
            return self.take_text(start + len(marker))
        channel = _CHANNEL.search(marker + header)
        is_reasoning = channel is not None and channel[1] == "analysis" and self.reasoning is not None
        self.switch("reasoning" if is_reasoning else "content")
        return None
