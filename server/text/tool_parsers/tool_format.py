"""What is known of a family's tool calls: the row of a table, and the form of its calls. Knows no family.

`call_rules.py` makes the rules of a grammar from the form; `message_parser.py` reads messages by the row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from server.text.tool_parsers.calls import Syntax, make_openai_id

ArgumentForm: TypeAlias = Literal["json", "tags", "python", "gemma", "elements"]


@dataclass(frozen=True)
class CallForm:
    """The text of a call, in which NAME and ARGUMENTS stand for its name and its arguments.

    If there is a text `between` calls, several calls form a list, which begins with `before` and ends with `after`.
    The arguments are written as

    json      a JSON object
    tags      `parameter` for each, with its KEY and its VALUE: texts as they are, other values in JSON
    python    key=value for each, with values in JSON, of which Python reads all but three words
    gemma     key:value for each: texts between two `mark`s, and objects and lists as in JSON, but with bare keys
    elements  an element for each, which may have others in it, whose tags follow the `mark`
    """

    call: str
    arguments: ArgumentForm = "json"
    before: str = ""
    between: str = ""
    after: str = ""
    parameter: str = ""
    mark: str = ""

    def split_call(self, name: str) -> tuple[str, str]:
        """Return the texts of a call of this tool before and after its arguments."""
        head, _, tail = self.call.partition("ARGUMENTS")
        return head.replace("NAME", name), tail

    def split_parameter(self, key: str) -> tuple[str, str]:
        """Return the texts of a parameter before and after its value."""
        head, _, tail = self.parameter.partition("VALUE")
        return head.replace("KEY", key), tail

    def find_marker(self, markers: Sequence[str]) -> str:
        """Return the marker with which a call or a list begins; an empty text if it begins with none."""
        return next((marker for marker in markers if (self.before + self.call).startswith(marker)), "")

    @property
    def is_plain_json(self) -> bool:
        """Whether calls begin as any JSON does, without a marker."""
        return (self.before + self.call).startswith(("{", "[{"))

    def write_list(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Return calls, objects with name and arguments, as text."""
        assert self.between, "only lists are written into prompts"
        return self.before + self.between.join(self._write_call(**call) for call in calls) + self.after

    def _write_call(self, name: str, arguments: Any) -> str:
        head, tail = self.split_call(name)
        return head + json.dumps(arguments, ensure_ascii=False) + tail


def make_list_form(call: str, before: str = "", after: str = "") -> CallForm:
    """Return the form of a list in brackets of such calls, whose arguments are in JSON."""
    return CallForm(call, before=f"{before}[", between=", ", after=f"]{after}")


@dataclass(frozen=True)
class ToolFormat:
    """How a family writes tool calls."""

    name: str
    in_template: tuple[tuple[str, ...], ...]  # its chat templates have all texts of one of these
    read: Syntax  # reads a call, or several, after a marker
    form: CallForm  # how a call is written
    begins: tuple[str, ...] = ()  # markers before a call
    inner: tuple[str, ...] = ()  # further markers that may follow those
    within: tuple[str, ...] = ()  # markers within a call
    ends: tuple[str, ...] = ()  # markers that may follow a call, and are no text of the message
    around: tuple[str, ...] = ()  # texts around the content, and no part of it
    bare: tuple[str, ...] = ()  # beginnings of calls without a marker
    read_bare: Syntax | None = None  # reads a call from such a beginning on; default: `read`
    bare_at_start: bool = False  # whether such a beginning counts only at the start of a message, or after a call
    make_id: Callable[[str, int], str] = make_openai_id
    writes_calls: bool = False  # whether calls are written for chat templates of the family that leave them out
    aliases: tuple[str, ...] = ()
    harmony: bool = False  # whether the whole message is in gpt-oss's format, which `harmony.py` reads

    @property
    def markers(self) -> tuple[str, ...]:
        """Return all markers; those that are special tokens must be in the text that is read."""
        return (*self.begins, *self.inner, *self.within, *self.ends, *self.bare)
