"""The declarations of a Metal source: which functions and variables there are, and where they begin and end.

Reads as much of C++ as that takes. What is inside a function is left as tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kernels.metal.emulator.tokens import Source

_SKIPPED = ("using", "typedef", "static_assert", "friend")
_TYPES = ("struct", "class", "union", "enum")
_NOT_NAMES = ("decltype", "alignas", "__attribute__", "noexcept", "sizeof")  # what may stand before another (


class DeclarationKind(Enum):
    FUNCTION = "function"  # with a body
    INSTANTIATION = "instantiation"  # template ... f<float>(...);
    VARIABLE = "variable"
    OTHER = "other"


@dataclass(frozen=True)
class Declaration:
    """Everything in indices of tokens; ranges end before their second one."""

    kind: DeclarationKind
    name: str
    begin: int
    end: int
    parameters: tuple[int, int]  # within the parentheses; empty if it has none
    body: tuple[int, int]  # within the braces
    member: bool  # of a struct
    template: bool

    def is_kernel(self, source: Source) -> bool:
        head = source.tokens[self.begin : self.parameters[0]]
        return self.kind is DeclarationKind.FUNCTION and any(token.text == "kernel" for token in head)


def declarations(source: Source) -> list[Declaration]:
    """All of them, those in namespaces and structs included. Raises SyntaxError."""
    reader = _Reader(source)
    reader.read(0, len(source.tokens), member=False)
    return reader.found


class _Head(NamedTuple):
    """A declaration up to its body, its value or its end."""

    stop: int  # where one of { = ; stands
    name: str  # of a function; "": it is none
    parameters: tuple[int, int]


class _Reader:
    def __init__(self, source: Source) -> None:
        self._source = source
        self.found: list[Declaration] = []

    def read(self, begin: int, end: int, *, member: bool) -> None:
        i = begin
        while i < end:
            text = self._text(i)
            if text == ";":
                i += 1
            elif text in ("public", "private", "protected"):
                i += 2
            elif text == "namespace" or self._source.is_at(i, "inline", "namespace"):
                i = self._namespace(i)
            elif text in _SKIPPED:
                i = self._semicolon(i) + 1
            else:
                i = self._declaration(i, member)

    def _text(self, i: int) -> str:
        return self._source.tokens[i].text if i < len(self._source.tokens) else ""

    def _namespace(self, i: int) -> int:
        while self._text(i) not in ("{", ";"):
            i += 1
        if self._text(i) == ";":  # an alias
            return i + 1
        last = self._source.close(i)
        self.read(i + 1, last, member=False)
        return last + 1

    def _declaration(self, begin: int, member: bool) -> int:
        """One that begins here; what it returns comes after it."""
        after = self._source.close_angle(begin + 1) + 1 if self._source.is_at(begin, "template", "<") else begin
        if self._text(after) in _SKIPPED:
            return self._semicolon(after) + 1
        head = self._head(after)
        stop = self._text(head.stop)
        if not head.name and any(self._text(i) in _TYPES for i in range(after, head.stop)):
            if stop == "{" and self._text(after) != "enum":
                self.read(head.stop + 1, self._source.close(head.stop), member=True)
            return self._semicolon(head.stop) + 1
        if head.name and stop == "{":
            last = self._source.close(head.stop)
            self._add(DeclarationKind.FUNCTION, head, begin, last + 1, (head.stop + 1, last), member)
            return last + 1
        end = self._semicolon(head.stop) + 1
        kind = DeclarationKind.OTHER if head.name else DeclarationKind.VARIABLE
        if self._text(begin) == "template" and after == begin:
            kind = DeclarationKind.INSTANTIATION
        self._add(kind, head, begin, end, (end, end), member)
        return end

    def _head(self, i: int) -> _Head:
        name, parameters = "", (i, i)
        while self._text(i) not in ("{", "=", ";"):
            text = self._text(i)
            if text == "operator":
                i = self._operator(i)
                name, parameters = "operator", (i + 1, self._source.close(i))
            elif text == "(" and not name and self._text(i - 1) not in _NOT_NAMES:
                name, parameters = self._name_before(i), (i + 1, self._source.close(i))
            if self._text(i) in ("(", "["):
                i = self._source.close(i)
            elif self._text(i) == "<":
                i = self._source.close_angle(i)
            i += 1
            if i >= len(self._source.tokens):
                raise SyntaxError(f"{self._source.where(i)}: a declaration has no end: is a ';' missing?")
        return _Head(i, name, parameters)

    def _semicolon(self, i: int) -> int:
        while self._text(i) != ";":
            i = self._source.close(i) + 1 if self._text(i) in ("(", "[", "{") else i + 1
            if i >= len(self._source.tokens):
                raise SyntaxError(f"{self._source.where(i)}: a declaration has no end: is a ';' missing?")
        return i

    def _operator(self, i: int) -> int:
        """The ( of its parameters."""
        if self._source.is_at(i + 1, "(", ")"):
            return i + 3
        while self._text(i) != "(":
            i += 1
        return i

    def _name_before(self, i: int) -> str:
        """The word before a ( or before the template arguments that stand there."""
        i, depth = i - 1, 0
        while self._text(i) == ">" or depth:
            depth += (self._text(i) == ">") - (self._text(i) == "<")
            i -= 1
        return self._text(i)

    def _add(
        self, kind: DeclarationKind, head: _Head, begin: int, end: int, body: tuple[int, int], member: bool
    ) -> None:
        template = self._source.is_at(begin, "template", "<")
        name = head.name or self._text(head.stop - 1)
        self.found.append(Declaration(kind, name, begin, end, head.parameters, body, member, template))
