"""A text that arrives in pieces, and readers of it that wait for the next piece. Knows no format of tool calls.

A reader is a generator: at each `yield` it waits until there is more text, or until the text has ended. So a format is
read by a few lines from top to bottom, each character is looked at once, and it makes no difference where the text was
cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from functools import cache
from typing import NoReturn, TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]

MAX_DEPTH = 128  # most brackets within brackets in a tool call
MAX_BEGINNING = 64  # most characters by which a call without a marker is known
MAX_HEAD = 512  # most characters before a marker that ends a name
_SPACE = re.compile(r"\s*")
_BRACKETS = {"{": "}", "[": "]", "(": ")"}
_JSON_SIGNS = re.compile(r'["\\{}\[\]]')
_PYTHON_SIGNS = re.compile(r"[\"'\\{}\[\]()]")


class NotACall(Exception):
    """The text does not go on as a tool call does."""


class TextSource:
    """A text that arrives in pieces, and the position up to which it was read."""

    def __init__(self) -> None:
        self.position = 0
        self.num_forgotten = 0  # number of characters before those that are kept
        self.furthest = 0  # up to where it was looked at
        self.kept = 0  # up to where it is a part of calls that are certain
        self.ended = False  # whether no more text follows
        self._text = ""

    def push(self, piece: str) -> None:
        """Add text, in place: nothing else may refer to the string, or a long call would be copied with each piece."""
        text, self._text = self._text, ""
        text += piece
        self._text = text

    def find(self, markers: tuple[str, ...]) -> tuple[int, str] | None:
        """Return the index of the first of these markers that was not read, and the marker; None if there is none."""
        return find_first(self._text, markers, self.position)

    def may_become(self, at: int, markers: Sequence[str]) -> bool:
        """Return whether the text from an index on may become one of these markers, of which it has a part."""
        rest = self.slice(at, at + max(map(len, markers)))
        return not self.ended and any(marker != rest and marker.startswith(rest) for marker in markers)

    def slice(self, start: int, end: int | None = None) -> str:
        return self._text[start:end]

    def forget_read(self) -> None:
        """Drop the text before the position, which becomes 0."""
        self._text = self._text[self.position :]
        self.num_forgotten += self.position
        self.position = self.furthest = self.kept = 0

    def wait(self) -> Reading[None]:
        """Wait for more text. Raises NotACall if there is none."""
        if self.ended:
            raise NotACall
        yield

    def skip_space(self) -> Reading[None]:
        """Read white space; waits for the first character after it, or for the end."""
        while True:
            found = _SPACE.match(self._text, self.position)
            assert found is not None, "the pattern also matches no character"
            self.position = found.end()
            if self.position < len(self._text) or self.ended:
                return
            yield

    def accept(self, *options: str) -> Reading[str | None]:
        """Read one of these strings if the text goes on with it, the longest one; return it, or None."""
        while self.may_become(self.position, options):
            yield
        rest = self.slice(self.position, self.position + max(map(len, options)))
        found = max((option for option in options if rest.startswith(option)), key=len, default=None)
        self.position += len(found or "")
        return found

    def expect(self, *options: str) -> Reading[str]:
        """Read one of these strings. Raises NotACall if the text goes on otherwise."""
        found = yield from self.accept(*options)
        if found is None:
            raise NotACall
        return found

    def expect_beginning(self, beginning: re.Pattern[str], part: re.Pattern[str]) -> Reading[None]:
        """Wait until the text goes on with a `beginning`, but do not read it.

        Raises NotACall as soon as what follows is not a `part` of such a beginning.
        """
        while beginning.match(head := self.slice(self.position, self.position + MAX_BEGINNING)) is None:
            if len(head) == MAX_BEGINNING or part.fullmatch(head) is None:
                raise NotACall
            yield from self.wait()

    def read_until(self, *markers: str, limit: int | None = MAX_HEAD) -> Reading[tuple[str, str]]:
        """Read up to the first of these markers, and the marker; return both.

        Raises NotACall if there are more than `limit` characters before it, or none of the markers at all.
        """
        searched = self.position
        longest = max(map(len, markers))
        end = None if limit is None else self.position + limit + longest
        while (found := find_first(self._text, markers, searched, end)) is None:
            self.furthest = len(self._text) if end is None else min(end, len(self._text))
            if end is not None and len(self._text) >= end:
                raise NotACall
            searched = max(searched, len(self._text) - longest + 1)
            yield from self.wait()
        at, marker = found
        before = self._text[self.position : at]
        self.position = at + len(marker)
        return before, marker

    def read_brackets(self, *, python: bool = False) -> Reading[str]:
        """Read and return a text from its opening bracket to the one that closes it.

        Brackets in strings do not count; the strings are those of JSON, or those of Python. Raises NotACall if the
        text does not begin with a bracket, or is not closed.
        """
        while self.position >= len(self._text):
            yield from self.wait()
        start, scan = self.position, BracketScan(_PYTHON_SIGNS if python else _JSON_SIGNS)
        if self._text[start] not in _BRACKETS:
            raise NotACall
        scan.at = start
        try:
            while (end := scan.find_end(self._text)) is None:
                yield from self.wait()
        finally:
            self.furthest = scan.at
        self.position = end
        return self._text[start:end]

    def keep(self) -> None:
        """Let what was read be a part of a call, whatever follows."""
        self.kept = self.position

    def read_brackets_in_parts(
        self, take: Callable[[str], None], ends: tuple[str, ...] = (), following: tuple[str, ...] = ()
    ) -> Reading[None]:
        """Read a JSON text as `read_brackets` does, but give it to `take` and keep it as it arrives.

        Raises NotACall, after the part before it, at a bracket that is wrong, at the first of the texts `ends`, and at
        the end of the text. Within a string such a text counts only if the text then ends or goes on with one of those
        `following`.
        """
        scan, escape = BracketScan(_JSON_SIGNS), StringEscaper()
        scan.at, end, searched = self.position, None, self.position
        while end is None:
            marker = find_first(self._text, ends, max(searched, self.position))
            held = measure_partial_marker(self._text, ends) if marker is None and not self.ended else 0
            behind = len(self._text) - held if marker is None else marker[0]
            try:
                end = scan.find_end(self._text, behind)
            finally:
                known = min(scan.at if end is not None or not scan.is_wrong else scan.at - 1, behind)
                take(escape.push(self._text[self.position : known]))
                self.position = known
                self.keep()
            if end is None and marker is not None:
                searched = marker[0] + len(marker[1])
                if not scan.is_in_string or (yield from self._ends_or_has(searched, following)):
                    raise NotACall
            elif end is None:
                yield from self.wait()

    def _ends_or_has(self, at: int, options: tuple[str, ...]) -> Reading[bool]:
        """Return whether nothing but white space follows an index, or one of these texts after it; read nothing."""
        while True:
            start = at + len(self._text[at:]) - len(self._text[at:].lstrip())
            if self.ended or not (start == len(self._text) or self.may_become(start, options)):
                return start == len(self._text) or self.slice(start).startswith(options)
            yield

    def skip_to_closing(self, bracket: str) -> Reading[None]:
        """Read up to the bracket that closes one that was opened before, and the bracket."""
        scan = BracketScan(_JSON_SIGNS, bracket)
        scan.at = self.position
        while (end := scan.find_end(self._text)) is None:
            yield from self.wait()
        self.position = end


class StringEscaper:
    """Escapes line breaks and the like within strings of a JSON text that arrives in pieces; models write them so."""

    _SIGNS = re.compile(r'\\.?|"|[\x00-\x1f]', re.DOTALL)

    def __init__(self) -> None:
        self._is_string = False
        self._is_escaped = False  # whether the last piece ended with a backslash

    def push(self, piece: str) -> str:
        """Return the next piece with such characters escaped."""
        first, self._is_escaped = (piece[:1] if self._is_escaped and piece else ""), self._is_escaped and not piece
        return first + self._SIGNS.sub(self._escape, piece[len(first) :])

    def _escape(self, found: re.Match[str]) -> str:
        sign = found[0]
        self._is_escaped = sign == "\\"
        if sign == '"':
            self._is_string = not self._is_string
        return json.dumps(sign)[1:-1] if self._is_string and sign < " " else sign


class BracketScan:
    """Finds the end of a text in brackets, and looks at each of its characters once."""

    def __init__(self, signs: re.Pattern[str], *opened: str) -> None:
        """Start before the text, or within brackets that the brackets `opened` will close."""
        self._signs = signs
        self._open = list(opened)  # the brackets that will close those that are open
        self.is_wrong = False  # whether the last bracket cannot be there
        self._quote = ""  # the quote that will end a string; empty outside of strings
        self.at = 0  # up to where the text was looked at

    @property
    def is_in_string(self) -> bool:
        return bool(self._quote)

    def find_end(self, text: str, behind: int | None = None) -> int | None:
        """Return the index after the closing bracket; None if it is not before `behind`, the end of the text if None.

        Raises NotACall for a wrong bracket.
        """
        behind = len(text) if behind is None else behind
        while (found := self._signs.search(text, self.at, behind)) is not None:
            sign, self.at = found[0], found.end()
            if sign == "\\":
                self.at += 1  # the character after it, which may have yet to come, has no meaning
            elif self._quote:
                self._quote = "" if sign == self._quote else self._quote
            elif sign in "\"'":
                self._quote = sign
            elif sign in _BRACKETS:
                if len(self._open) == MAX_DEPTH:
                    self._refuse()
                self._open.append(_BRACKETS[sign])
            elif not self._open or self._open.pop() != sign:
                self._refuse()
            elif not self._open:
                return self.at
        self.at = max(self.at, behind)
        return None

    def _refuse(self) -> NoReturn:
        self.is_wrong = True
        raise NotACall


def find_first(text: str, markers: tuple[str, ...], start: int = 0, end: int | None = None) -> tuple[int, str] | None:
    """Return the index of the first marker in text[start:end] and the marker, of several at one index the longest."""
    found = _make_pattern(markers).search(text, start, len(text) if end is None else end) if markers else None
    return None if found is None else (found.start(), found[0])


@cache
def _make_pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(marker) for marker in sorted(markers, key=len, reverse=True)))


def measure_partial_marker(text: str, markers: tuple[str, ...]) -> int:
    """Return the number of characters at the end of a text that may be the beginning of one of the markers."""
    longest = max(map(len, markers), default=0)
    for size in range(min(len(text), longest - 1), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers if len(marker) > size):
            return size
    return 0
