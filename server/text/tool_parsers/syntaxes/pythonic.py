"""Readers of calls as in Python, `f(x=1)`. The values are literals; nothing is executed."""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any

from server.text.tool_parsers.calls import Calls, Syntax
from server.text.tool_parsers.source import NotACall, Reading, TextSource
from server.text.tool_parsers.syntaxes.json_calls import read_bare_json

# How a list of calls goes on, and the beginnings of such texts
_FIRST_CALL = re.compile(r"\[\s*[\w.]+\(")
_BEFORE_FIRST_CALL = re.compile(r"\[\s*[\w.]*")
_STRING = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_WORDS = {"true": True, "false": False, "null": None}  # of JSON, which models mix with Python's


def read_pythonic(source: TextSource, calls: Calls) -> Reading[None]:
    """Read a list of calls, `[f(x=1), g()]`."""
    yield from _read_list(source, calls, only_known=False)


def read_bare_pythonic(source: TextSource, calls: Calls) -> Reading[None]:
    """Read a list of calls where no marker is before it; all names must be those of tools."""
    yield from source.expect_beginning(_FIRST_CALL, _BEFORE_FIRST_CALL)
    yield from _read_list(source, calls, only_known=True)


def read_bare_llama4(source: TextSource, calls: Calls) -> Reading[None]:
    """Read what `read_bare_pythonic` or `read_bare_json` does: Llama 4 writes either."""
    read = read_bare_json if source.slice(source.position, source.position + 1) == "{" else read_bare_pythonic
    yield from read(source, calls)


def read_pythonic_until(closing: str) -> Syntax:
    """Return the reader of calls, one after another, up to a text."""

    def read(source: TextSource, calls: Calls) -> Reading[None]:
        found = None
        while found is None:
            yield from source.skip_space()
            name, _ = yield from source.read_until("(")
            source.position -= 1
            arguments = yield from source.read_brackets(python=True)
            calls.add(*_read_call(_parse(name + arguments)))
            source.keep()
            yield from source.skip_space()
            found = yield from source.accept(closing)

    return read


def _read_list(source: TextSource, calls: Calls, *, only_known: bool) -> Reading[None]:
    yield from source.skip_space()
    parsed = _parse((yield from source.read_brackets(python=True)))
    if not isinstance(parsed, ast.List) or not parsed.elts:
        raise NotACall
    calls.add_all([_read_call(each) for each in parsed.elts], only_known=only_known)


def _parse(text: str) -> ast.expr:
    """Return an expression as syntax tree. Raises NotACall for other texts."""
    try:
        return _parse_expression(text)
    except NotACall:
        return _parse_expression(_STRING.sub(_escape_line_breaks, text))


def _parse_expression(text: str) -> ast.expr:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escape sequences that Python does not know
            return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NotACall from None


def _escape_line_breaks(string: re.Match[str]) -> str:
    return string[0].replace("\n", "\\n")


def _read_call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call) or node.args:
        raise NotACall
    arguments = {keyword.arg: _read_value(keyword.value) for keyword in node.keywords if keyword.arg}
    if len(arguments) < len(node.keywords):
        raise NotACall
    return _read_name(node.func), arguments


def _read_name(node: ast.expr) -> str:
    """Return a name, which may have dots in it."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise NotACall
    return ".".join([node.id, *reversed(parts)])


def _read_value(node: ast.expr) -> Any:
    """Return the JSON value of a literal. Raises NotACall for other expressions."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_read_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_read_key(key): _read_value(value) for key, value in zip(keys, values, strict=True)}
    raise NotACall


def _read_key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise NotACall
