"""The reader of calls in tags, whose arguments are texts that become what the tool's schema says."""

from __future__ import annotations

from typing import Any, NamedTuple

from server.text.tool_parsers.calls import Calls, Syntax
from server.text.tool_parsers.source import MAX_HEAD, Reading, TextSource

_WHITE_SPACE = (" ", "\n")
_CDATA = ("<![CDATA[", "]]>")


class _Tags(NamedTuple):
    """The texts around the parts of a call."""

    opening: str
    name_ends: tuple[str, ...]
    parameter: str  # before a key
    key_end: str
    value: str  # before a value, after white space
    value_end: str
    closing: str
    cdata: bool  # whether a value may be marked as CDATA of XML

    @property
    def value_ends(self) -> tuple[str, ...]:
        """Return the texts that end a value: its own, and what follows that at the start of a line."""
        return self.value_end, f"\n{self.parameter}", f"\n{self.closing}"


def read_tagged(call: str, parameter: str, *, cdata: bool = False) -> Syntax:
    """Return the reader of calls of a form such as <function=NAME>ARGUMENTS</function>.

    `parameter` is the form of an argument, such as <parameter=KEY>VALUE</parameter>. A space after NAME, or between KEY
    and VALUE, stands for any white space. Models sometimes leave out the text that ends a value: the next parameter or
    the end of the call, at the start of a line, ends it, too.
    """
    tags = _split_forms(call, parameter, cdata)

    def read(source: TextSource, calls: Calls) -> Reading[None]:
        yield from source.skip_space()
        yield from source.expect(tags.opening)
        head = yield from _read_up_to(source, tags.name_ends, (tags.parameter, tags.closing))
        name = head.partition('"')[0].strip()  # further attributes may follow
        arguments: dict[str, Any] = {}
        yield from source.skip_space()
        while (yield from source.expect(tags.parameter, tags.closing)) == tags.parameter:
            key, _ = yield from source.read_until(tags.key_end)
            key = key.partition('"')[0].strip()
            value = yield from _read_value(source, tags)
            arguments[key] = calls.convert(name, key, value)
            yield from source.skip_space()
        calls.add(name, arguments)

    return read


def _split_forms(call: str, parameter: str, cdata: bool) -> _Tags:
    """Return the texts between the places of the forms."""
    opening, _, rest = call.partition("NAME")
    name_end, _, closing = rest.partition("ARGUMENTS")
    parameter_opening, _, rest = parameter.partition("KEY")
    key_end, _, value_end = rest.partition("VALUE")
    key_end, _, value = key_end.partition(" ")
    name_ends = (name_end,) if name_end != " " else (*_WHITE_SPACE, parameter_opening, closing)
    return _Tags(opening, name_ends, parameter_opening, key_end, value, value_end, closing, cdata)


def _read_value(source: TextSource, tags: _Tags) -> Reading[str]:
    """Read a value and its end, without a line break after its opening tag and one before its closing tag."""
    if tags.value:
        yield from source.skip_space()
        yield from source.expect(tags.value)
    if tags.cdata and (yield from source.accept(_CDATA[0])) is not None:
        text, _ = yield from source.read_until(_CDATA[1], limit=None)
        yield from source.skip_space()
        yield from source.expect(tags.value_end)
        return text
    text = yield from _read_up_to(source, tags.value_ends, tags.value_ends[1:], limit=None)
    return text.removeprefix("\n").removesuffix("\n")


def _read_up_to(
    source: TextSource, ends: tuple[str, ...], left: tuple[str, ...], *, limit: int | None = MAX_HEAD
) -> Reading[str]:
    """Read up to one of these ends, and also the end itself unless it is among those that are `left` to be read."""
    text, end = yield from source.read_until(*ends, limit=limit)
    if end in left:
        source.position -= len(end)
    return text
