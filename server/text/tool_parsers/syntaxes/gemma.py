"""The reader of Gemma's calls: `call:NAME{city:<|"|>Bern<|"|>,days:[1,2]}`.

Keys are bare, and texts stand between two quotes of several characters, in which nothing is escaped.
"""

from __future__ import annotations

from typing import Any

from server.text.tool_parsers.calls import Calls, Syntax
from server.text.tool_parsers.source import MAX_DEPTH, NotACall, Reading, TextSource
from server.text.tool_parsers.values import load_json

_WORDS = {"None": None, "True": True, "False": False}  # of Python, which some chat templates write
_SIGNS = frozenset("{}[],<>")  # of the notation; they are not in keys


def read_gemma(quote: str) -> Syntax:
    """Return the reader of a call whose texts stand between two such quotes."""

    def read(source: TextSource, calls: Calls) -> Reading[None]:
        yield from source.skip_space()
        yield from source.expect("call:")
        name, _ = yield from source.read_until("{")
        given = yield from _ValueReader(source, quote).read_members()
        calls.add(name.strip(), {key: calls.convert_quoted(name.strip(), key, value) for key, value in given.items()})

    return read


class _ValueReader:
    """Reads one value, and counts how deep it is nested."""

    def __init__(self, source: TextSource, quote: str) -> None:
        self._source = source
        self._quote = quote
        self._depth = 1

    def read_members(self) -> Reading[dict[str, Any]]:
        """Read the members of an object, and the bracket that closes it."""
        members: dict[str, Any] = {}
        while (yield from self._has_more("}", is_first=not members)):
            key = yield from self._read_key()
            members[key] = yield from self._read_value()
        return members

    def _read_items(self) -> Reading[list[Any]]:
        items: list[Any] = []
        while (yield from self._has_more("]", is_first=not items)):
            items.append((yield from self._read_value()))
        return items

    def _has_more(self, closing: str, *, is_first: bool) -> Reading[bool]:
        """Read the comma before another member or item, or the bracket after the last one; return which it was."""
        yield from self._source.skip_space()
        if (yield from self._source.accept(closing)) is not None:
            return False
        if not is_first:
            yield from self._source.expect(",")
            yield from self._source.skip_space()
        return True

    def _read_key(self) -> Reading[str]:
        """Read a key, which may stand between quotes, and the colon after it."""
        if (mark := (yield from self._source.accept(self._quote, '"'))) is None:
            key, _ = yield from self._source.read_until(":")
        else:
            key, _ = yield from self._source.read_until(mark)
            yield from self._source.skip_space()
            yield from self._source.expect(":")
        if not key.strip() or _SIGNS.intersection(key):
            raise NotACall
        return key.strip()

    def _read_value(self) -> Reading[Any]:
        yield from self._source.skip_space()
        opening = yield from self._source.accept(self._quote, "{", "[")
        if opening is None:
            return (yield from self._read_word())
        if opening == self._quote:
            return (yield from self._source.read_until(self._quote, limit=None))[0]
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotACall
        value = (yield from self.read_members()) if opening == "{" else (yield from self._read_items())
        self._depth -= 1
        return value

    def _read_word(self) -> Reading[Any]:
        """Read a value without quotes: a number, true, false or null; anything else is a text."""
        word, end = yield from self._source.read_until(",", "}", "]")
        self._source.position -= len(end)
        if not (word := word.strip()):
            raise NotACall
        if word in _WORDS:
            return _WORDS[word]
        try:
            return load_json(word)
        except NotACall:
            return word
