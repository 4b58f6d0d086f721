"""Finds the declarations of a Metal source: its functions and variables, and where they begin and end.

Parses only as much of C++ as that takes; what is inside a function stays a list of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from metal_emulator.tokens import Source

_SKIPPED_KEYWORDS = ("using", "typedef", "static_assert", "friend")
_TYPE_KEYWORDS = ("struct", "class", "union", "enum")
# Words that may stand before a parenthesis and are not the names of functions.
_NOT_NAMES = ("decltype", "alignas", "__attribute__", "noexcept", "sizeof")


class DeclarationKind(Enum):
    FUNCTION = "function"  # with a body
    INSTANTIATION = "instantiation"  # template ... f<float>(...);
    VARIABLE = "variable"
    OTHER = "other"


@dataclass(frozen=True)
class Declaration:
    """A declaration; its places are indices of tokens, and ranges exclude their end."""

    kind: DeclarationKind
    name: str
    begin: int
    end: int
    parameters: tuple[int, int]  # range within the parentheses; empty if there are none
    body: tuple[int, int]  # within the braces
    struct: int | None  # index of the token { of the struct whose member it is; None: it is not a member
    is_template: bool

    @property
    def is_member(self) -> bool:
        return self.struct is not None

    def is_kernel(self, source: Source) -> bool:
        head = source.tokens[self.begin : self.parameters[0]]
        return self.kind is DeclarationKind.FUNCTION and any(token.text == "kernel" for token in head)


def find_declarations(source: Source) -> list[Declaration]:
    """Return all declarations, also those in namespaces and structs. Raises SyntaxError if one has no end."""
    reader = _Reader(source)
    reader.read(0, len(source.tokens), struct=None)
    return reader.declarations


class _Head(NamedTuple):
    """The beginning of a declaration, up to its body, its value or its end."""

    stop: int  # index of the token {, = or ; that ends it
    name: str  # name of a function; "" for other declarations
    parameters: tuple[int, int]


class _Reader:
    def __init__(self, source: Source) -> None:
        self._source = source
        self.declarations: list[Declaration] = []

    def read(self, begin: int, end: int, *, struct: int | None) -> None:
        i = begin
        while i < end:
            text = self._text_at(i)
            if text == ";":
                i += 1
            elif text in ("public", "private", "protected"):
                i += 2
            elif text == "namespace" or self._source.is_at(i, "inline", "namespace"):
                i = self._read_namespace(i)
            elif text in _SKIPPED_KEYWORDS:
                i = self._find_semicolon(i) + 1
            else:
                i = self._read_declaration(i, struct)

    def _text_at(self, i: int) -> str:
        return self._source.tokens[i].text if i < len(self._source.tokens) else ""

    def _read_namespace(self, i: int) -> int:
        while self._text_at(i) not in ("{", ";"):
            i += 1
        if self._text_at(i) == ";":  # an alias
            return i + 1
        last = self._source.find_closing(i)
        self.read(i + 1, last, struct=None)
        return last + 1

    def _read_declaration(self, begin: int, struct: int | None) -> int:
        """Read the declaration that begins at token `begin`; return the index after it."""
        after = self._source.find_closing_angle(begin + 1) + 1 if self._source.is_at(begin, "template", "<") else begin
        if self._text_at(after) in _SKIPPED_KEYWORDS:
            return self._find_semicolon(after) + 1
        head = self._read_head(after)
        stop = self._text_at(head.stop)
        if not head.name and any(self._text_at(i) in _TYPE_KEYWORDS for i in range(after, head.stop)):
            if stop == "{" and self._text_at(after) != "enum":
                self.read(head.stop + 1, self._source.find_closing(head.stop), struct=head.stop)
            return self._find_semicolon(head.stop) + 1
        if head.name and stop == "{":
            last = self._source.find_closing(head.stop)
            self._add(DeclarationKind.FUNCTION, head, begin, last + 1, (head.stop + 1, last), struct)
            return last + 1
        end = self._find_semicolon(head.stop) + 1
        kind = DeclarationKind.OTHER if head.name else DeclarationKind.VARIABLE
        if self._text_at(begin) == "template" and after == begin:
            kind = DeclarationKind.INSTANTIATION
        self._add(kind, head, begin, end, (end, end), struct)
        return end

    def _read_head(self, i: int) -> _Head:
        name, parameters = "", (i, i)
        while self._text_at(i) not in ("{", "=", ";"):
            text = self._text_at(i)
            if text == "operator":
                i = self._find_operator_paren(i)
                name, parameters = "operator", (i + 1, self._source.find_closing(i))
            elif text == "(" and not name and self._text_at(i - 1) not in _NOT_NAMES:
                name, parameters = self._name_before(i), (i + 1, self._source.find_closing(i))
            if self._text_at(i) in ("(", "["):
                i = self._source.find_closing(i)
            elif self._text_at(i) == "<":
                i = self._source.find_closing_angle(i)
            i += 1
            if i >= len(self._source.tokens):
                raise SyntaxError(f"{self._source.location(i)}: a declaration has no end: is a ';' missing?")
        return _Head(i, name, parameters)

    def _find_semicolon(self, i: int) -> int:
        while self._text_at(i) != ";":
            i = self._source.find_closing(i) + 1 if self._text_at(i) in ("(", "[", "{") else i + 1
            if i >= len(self._source.tokens):
                raise SyntaxError(f"{self._source.location(i)}: a declaration has no end: is a ';' missing?")
        return i

    def _find_operator_paren(self, i: int) -> int:
        """Return the index of the ( before the parameters of an operator, whose word `operator` is token i."""
        if self._source.is_at(i + 1, "(", ")"):
            return i + 3
        while self._text_at(i) != "(":
            i += 1
        return i

    def _name_before(self, i: int) -> str:
        """Return the name before the ( at token i, skipping template arguments between them."""
        i, depth = i - 1, 0
        while self._text_at(i) == ">" or depth:
            depth += (self._text_at(i) == ">") - (self._text_at(i) == "<")
            i -= 1
        return self._text_at(i)

    def _add(
        self, kind: DeclarationKind, head: _Head, begin: int, end: int, body: tuple[int, int], struct: int | None
    ) -> None:
        template = self._source.is_at(begin, "template", "<")
        name = head.name or self._text_at(head.stop - 1)
        self.declarations.append(Declaration(kind, name, begin, end, head.parameters, body, struct, template))
