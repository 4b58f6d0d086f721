"""The reader of calls in tags, whose arguments are texts that become what the tool's schema says."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, NamedTuple

from server.text.tool_parsers.calls import Calls, Syntax
from server.text.tool_parsers.source import Reading, TextSource

_WHITE_SPACE = (" ", "\n")
_CDATA = ("<![CDATA[", "]]>")
_JSON_ATTRIBUTE = re.compile(r'\s(string="false"|type="(?!string"))')  # DeepSeek's, GigaChat's and Kimi K3's


class _Tags(NamedTuple):
    """The texts around the parts of a call."""

    opening: str
    name_ends: tuple[str, ...]
    parameter: str  # before a key
    key_end: str
    value: str  # before a value, after white space
    value_end: str
    closing: str
    outer: tuple[str, ...] = ()  # after the last call
    cdata: bool = False  # whether a value may be marked as CDATA of XML
    own_lines: bool = False  # whether a value stands on lines of its own

    @property
    def ends(self) -> tuple[str, ...]:
        """Return the texts that end a call; all but the first are no part of it."""
        return self.closing, *self.outer


def read_tagged(
    call: str, parameter: str, *, outer: tuple[str, ...] = (), cdata: bool = False, own_lines: bool = False
) -> Syntax:
    """Return the reader of calls of a form such as <function=NAME>ARGUMENTS</function>.

    `parameter` is the form of an argument, such as <parameter=KEY>VALUE</parameter>. A space after NAME, or between KEY
    and VALUE, stands for any white space. With `own_lines` the line breaks around a value are no part of it. After
    KEY there may be an attribute string="false", or a type other than "string": the value is JSON if the tool's schema
    does not have the parameter.

    Models sometimes leave out the text that ends a value or a call: the next of the tool's parameters or the end of the
    call, at the start of a line, ends a value, too, and the texts `outer`, which follow the last call, end a call after
    a value.
    """
    tags = _split_forms(call, parameter)._replace(outer=outer, cdata=cdata, own_lines=own_lines)

    def read(source: TextSource, calls: Calls) -> Reading[None]:
        yield from source.skip_space()
        yield from source.expect(tags.opening)
        head, end = yield from source.read_until(*tags.name_ends)
        source.position -= len(end) if end in (tags.parameter, tags.closing) else 0
        name = _clean(head)
        arguments: dict[str, Any] = {}
        yield from source.skip_space()
        while (found := (yield from source.expect(tags.parameter, *tags.ends))) == tags.parameter:
            head, _ = yield from source.read_until(tags.key_end)
            key = _clean(head)
            value = yield from _read_value(source, tags, calls.find_other_parameters(name, without={*arguments, key}))
            arguments[key] = calls.convert(name, key, value, is_json=_is_json(head))
            yield from source.skip_space()
        if found != tags.closing:
            source.position -= len(found)
        calls.add(name, arguments)

    return read


def _clean(text: str) -> str:
    return text.partition('"')[0].strip()  # further attributes may follow


def _is_json(head: str) -> bool:
    """Return whether the attributes after a key say that its value is JSON."""
    return _JSON_ATTRIBUTE.search(head.partition('"')[2]) is not None


def _split_forms(call: str, parameter: str) -> _Tags:
    """Return the texts between the places of the forms."""
    opening, _, rest = call.partition("NAME")
    name_end, _, closing = rest.partition("ARGUMENTS")
    parameter_opening, _, rest = parameter.partition("KEY")
    key_end, _, value_end = rest.partition("VALUE")
    key_end, _, value = key_end.partition(" ")
    name_ends = (name_end,) if name_end != " " else (*_WHITE_SPACE, parameter_opening, closing)
    return _Tags(opening, name_ends, parameter_opening, key_end, value, value_end, closing)


def _read_value(source: TextSource, tags: _Tags, others: Collection[str] | None) -> Reading[str]:
    """Read a value, and its own end; an end that begins what follows is left to be read.

    `others` are the parameters that may follow; None if any may.
    """
    if tags.value:
        yield from source.skip_space()
        yield from source.expect(tags.value)
    if tags.cdata and (yield from source.accept(_CDATA[0])) is not None:
        text, _ = yield from source.read_until(_CDATA[1], limit=None)
        yield from source.skip_space()
        yield from source.expect(tags.value_end)
        return text
    text, left = "", (f"\n{tags.parameter}", f"\n{tags.closing}")
    while True:
        part, end = yield from source.read_until(tags.value_end, *left, limit=None)
        text += part
        if end != left[0] or (yield from _is_parameter(source, tags, others)):
            break
        text += end
    source.position -= len(end) if end in left else 0
    return text.removeprefix("\n").removesuffix("\n") if tags.own_lines else text


def _is_parameter(source: TextSource, tags: _Tags, others: Collection[str] | None) -> Reading[bool]:
    """Return whether one of these parameters follows its opening text, and read nothing."""
    if others is None:
        return True
    start = source.position
    key, end = yield from source.read_until(tags.key_end, "\n", limit=None)
    source.position = start
    return end == tags.key_end and _clean(key) in others
