"""Splits Metal source into tokens, each with its file and line. Knows brackets, but nothing else of the language."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

_TOKEN = re.compile(
    r"""(?P<skip>\s+ | ^\#[^\n]* | //[^\n]* | /\*.*?\*/)
      | "(?:[^"\\]|\\.)*" | '(?:[^'\\]|\\.)*'
      | [A-Za-z_]\w*
      | \.?\d(?:[eEpP][+-]|[\w.])*
      | :: | -> | \+\+ | -- | && | \|\| | [-+*/%&|^=!<]= | \.\.\.
      | .""",
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)
_MARKER = re.compile(r'^# (\d+) "((?:[^"\\]|\\.)*)"[^\n]*$', re.MULTILINE)  # what a preprocessor leaves
_PAIRS = {"(": ")", "[": "]", "{": "}"}


class Token(NamedTuple):
    """A token: a word, a number, a string or an operator. `>>` and `>=` are two, as each `>` may close a template."""

    text: str
    start: int  # in the source
    end: int

    @property
    def is_word(self) -> bool:
        return self.text[0].isalpha() or self.text[0] == "_"


class Source:
    """A preprocessed Metal source: its text, its tokens, and their places in the original files."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = [
            Token(found.group(), found.start(), found.end())
            for found in _TOKEN.finditer(text)
            if found.lastgroup != "skip"
        ]
        markers = [(found.end() + 1, found[2], int(found[1])) for found in _MARKER.finditer(text)]
        self._markers = [(0, "program_source", 1), *markers]
        self._starts = [start for start, _, _ in self._markers]

    def location(self, index: int) -> str:
        """Return the place of a token in the original files, as file:line."""
        at = self.tokens[min(index, len(self.tokens) - 1)].start
        start, file, line = self._markers[bisect_right(self._starts, at) - 1]
        return f"{file}:{line + self.text.count(chr(10), start, at)}"

    def line_and_column(self, index: int) -> tuple[int, int]:
        """Return a token's line in its file, and its column after macros were expanded, both counted from 1."""
        at = self.tokens[index].start
        return int(self.location(index).rpartition(":")[2]), at - self.text.rfind("\n", 0, at)

    def slice(self, begin: int, end: int) -> str:
        """Return the text from token `begin` to the token before `end`."""
        return self.text[self.tokens[begin].start : self.tokens[end - 1].end] if begin < end else ""

    def is_at(self, index: int, *texts: str) -> bool:
        """Return whether the tokens from `index` on have these texts."""
        return [token.text for token in self.tokens[index : index + len(texts)]] == list(texts)

    def find_closing(self, index: int) -> int:
        """Return the index of the bracket that closes the one at `index`. Raises SyntaxError if it is never closed."""
        opening = self.tokens[index].text
        closing, depth = _PAIRS[opening], 0
        for i in range(index, len(self.tokens)):
            text = self.tokens[i].text
            depth += (text == opening) - (text == closing)
            if not depth:
                return i
        raise SyntaxError(f"{self.location(index)}: '{opening}' is never closed")

    def find_closing_angle(self, index: int) -> int:
        """Return the index of the `>` that closes the `<` at `index`. Raises SyntaxError if it is never closed."""
        depth, i = 0, index
        while i < len(self.tokens):
            text = self.tokens[i].text
            if text in _PAIRS:
                i = self.find_closing(i)
            depth += (text == "<") - (text == ">")
            if not depth:
                return i
            i += 1
        raise SyntaxError(f"{self.location(index)}: '<' is never closed")

    def split_at_commas(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the ranges between commas in tokens [begin, end); commas within brackets do not separate."""
        pieces, first, i = [], begin, begin
        while i < end:
            text = self.tokens[i].text
            if text in _PAIRS:
                i = self.find_closing(i)
            elif text == "<":
                i = self.find_closing_angle(i)
            elif text == ",":
                pieces.append((first, i))
                first = i + 1
            i += 1
        return [*pieces, (first, end)] if first < end else pieces

    def find_attributes(self, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield each attribute in [[a, b(c)]]: (its first token, its end, first token of the brackets, their end)."""
        i = begin
        while i < end - 1:
            if self.is_at(i, "[", "["):
                last = self.find_closing(i)
                for first, after in self.split_at_commas(i + 2, last - 1):
                    yield first, after, i, last + 1
                i = last
            i += 1
