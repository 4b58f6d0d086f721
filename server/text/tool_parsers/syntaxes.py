"""How families of models write tool calls: one reader for each way, which begins after the marker of a call.

A reader adds the calls it has read to `calls`, and raises NotACall where the text goes on otherwise. What follows the
last call that was added is then text of the message. `formats.py` has the markers, and says which family writes how.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

from server.text.tool_parsers.calls import ARGUMENTS, NAMES, Calls, split_call
from server.text.tool_parsers.source import NotACall, Reading, TextSource
from server.text.tool_parsers.values import load_json

Syntax: TypeAlias = Callable[[TextSource, Calls], Reading[None]]

# What may follow `{` in the JSON object of a call that has no marker before it
_FIRST_KEYS = re.compile(r'\{\s*"(name|type|function|parameters|arguments)"')
_LONGEST_BEGINNING = 64  # most characters of such a beginning


def read_json(source: TextSource, calls: Calls) -> Reading[None]:
    """Read a JSON object with name and arguments, or a list of them."""
    yield from source.skip_space()
    if (yield from source.accept("[")) is None:
        return (yield from _read_object(source, calls))
    while True:
        yield from source.skip_space()
        yield from _read_object(source, calls)
        yield from source.skip_space()
        if (yield from source.expect(",", "]")) == "]":
            return source.keep()


def _read_object(source: TextSource, calls: Calls, *, only_known: bool = False) -> Reading[None]:
    """Read a JSON object with name and arguments, in this order if the arguments are to be passed on in parts."""
    start = source.position
    try:
        name = yield from _read_object_head(source)
    except NotACall:
        name = ""
    if name in calls.schemas:
        calls.begin(name)
        yield from source.read_brackets_in_parts(calls.extend)
        yield from source.skip_to_closing("}")
    else:
        source.position = start
        value = load_json((yield from source.read_brackets()))
        calls.add(*split_call(value), only_known=only_known)
    source.keep()


def _read_object_head(source: TextSource) -> Reading[str]:
    """Read a JSON object up to its arguments, which have to be an object, after texts; return the name among these."""
    name = ""
    yield from source.expect("{")
    while True:
        key = yield from _read_string(source)
        yield from source.expect(":")
        yield from source.skip_space()
        if key in ARGUMENTS:
            yield from source.expect("{")
            source.position -= 1
            return name
        value = yield from _read_string(source)
        name = value if key in NAMES else name
        yield from source.expect(",")


def _read_string(source: TextSource) -> Reading[str]:
    """Read a JSON string without escape sequences, and white space around it."""
    yield from source.skip_space()
    yield from source.expect('"')
    text, _ = yield from source.read_until('"')
    if "\\" in text:
        raise NotACall
    yield from source.skip_space()
    return text


def read_arguments(source: TextSource, calls: Calls, name: str) -> Reading[None]:
    """Read the arguments of a call, a JSON object; for a name that is a tool's, they are passed on in parts."""
    yield from source.skip_space()
    if name in calls.schemas and (yield from source.accept("{")) is not None:
        source.position -= 1
        calls.begin(name)
        yield from source.read_brackets_in_parts(calls.extend)
    else:
        calls.add(name, load_json((yield from source.read_brackets())))


def read_bare_json(source: TextSource, calls: Calls) -> Reading[None]:
    """Read a JSON object with name and parameters that has no marker before it; its name must be that of a tool."""
    start = source.position
    while _FIRST_KEYS.match(head := source.slice(start, start + _LONGEST_BEGINNING)) is None:
        if len(head) == _LONGEST_BEGINNING or re.fullmatch(r'\{\s*("[a-z]*)?', head) is None:
            raise NotACall
        yield from source.wait()
    yield from _read_object(source, calls, only_known=True)


def read_name_and_json(name_end: str) -> Syntax:
    """Return the reader of a call whose name stands before `name_end` and its arguments, in JSON, after it."""

    def read(source: TextSource, calls: Calls) -> Reading[None]:
        name, _ = yield from source.read_until(name_end)
        yield from read_arguments(source, calls, name.strip())

    return read


def read_mistral(source: TextSource, calls: Calls) -> Reading[None]:
    """Read a list of JSON objects (up to version 7 of Mistral's tokenizers), or a name and its arguments in JSON."""
    yield from source.skip_space()
    if (yield from source.accept("[")) is not None:
        source.position -= 1
        return (yield from read_json(source, calls))
    name, marker = yield from source.read_until("[CALL_ID]", "[ARGS]", "{")
    if marker == "[CALL_ID]":
        yield from source.read_until("[ARGS]")
    if marker == "{":
        source.position -= 1
    return (yield from read_arguments(source, calls, name.strip()))


def read_deepseek(source: TextSource, calls: Calls) -> Reading[None]:
    """Read a call of DeepSeek's: V3 and R1 write the arguments as a block of code, V3.1 plainly."""
    name, _ = yield from source.read_until("<\uff5ctool\u2581sep\uff5c>")
    is_block = name.strip() == "function"
    if is_block:
        name, _ = yield from source.read_until("\n")
        yield from source.skip_space()
        yield from source.expect("```json", "```")
    yield from read_arguments(source, calls, name.strip())
    if is_block:
        yield from source.skip_space()
        yield from source.accept("```")


def read_kimi(source: TextSource, calls: Calls) -> Reading[None]:
    """Read a call of Kimi K2, whose id has the name in it: `functions.NAME:0`."""
    call_id, _ = yield from source.read_until("<|tool_call_argument_begin|>")
    name = call_id.strip().rpartition(":")[0] or call_id.strip()
    yield from read_arguments(source, calls, name.removeprefix("functions."))


def read_tagged(call: tuple[str, str, str], parameter: tuple[str, str, str]) -> Syntax:
    """Return the reader of a call in tags, such as <function=NAME><parameter=KEY>value</parameter></function>.

    `call` has the texts before a name, after it, and at the end of the call; `parameter` likewise those of a key.
    Values are text, and become what the tool's schema says. Models sometimes leave out the text that ends a value: the
    next parameter or the end of the call, at the start of a line, ends it, too.
    """
    opening, name_end, closing = call
    parameter_opening, key_end, parameter_closing = parameter
    value_ends = (parameter_closing, f"\n{parameter_opening}", f"\n{closing}")

    def read(source: TextSource, calls: Calls) -> Reading[None]:
        yield from source.skip_space()
        yield from source.expect(opening)
        name, _ = yield from source.read_until(name_end)
        arguments: dict[str, Any] = {}
        while True:
            yield from source.skip_space()
            if (yield from source.expect(parameter_opening, closing)) == closing:
                return calls.add(name.strip(), arguments)
            key, _ = yield from source.read_until(key_end)
            value, marker = yield from source.read_until(*value_ends, limit=None)
            source.position -= 0 if marker == parameter_closing else len(marker)
            key = key.partition('"')[0].strip()  # further attributes may follow
            arguments[key] = calls.convert(name.strip(), key, _strip_line_ends(value))

    return read


def read_glm(source: TextSource, calls: Calls) -> Reading[None]:
    """Read a call of GLM-4.5's: a name, and keys and values in tags."""
    name, marker = yield from source.read_until("\n", "<arg_key>", "</tool_call>")
    arguments: dict[str, Any] = {}
    while marker != "</tool_call>":
        if marker == "\n":
            yield from source.skip_space()
            marker = yield from source.expect("<arg_key>", "</tool_call>")
            continue
        key, _ = yield from source.read_until("</arg_key>")
        yield from source.skip_space()
        yield from source.expect("<arg_value>")
        value, _ = yield from source.read_until("</arg_value>", limit=None)
        arguments[key.strip()] = calls.convert(name.strip(), key.strip(), _strip_line_ends(value))
        marker = "\n"
    calls.add(name.strip(), arguments)


def _strip_line_ends(text: str) -> str:
    """Return a value without the line break after its opening tag, and the one before its closing tag."""
    return text.removeprefix("\n").removesuffix("\n")


def read_pythonic(*, marked: bool) -> Syntax:
    """Return the reader of a list of calls as in Python, `[f(x=1), g()]`.

    If there is no marker before it, all names must be those of tools.
    """

    def read(source: TextSource, calls: Calls) -> Reading[None]:
        if not marked:
            yield from _check_pythonic_beginning(source)
        yield from source.skip_space()
        parsed = _parse_python((yield from source.read_brackets(python=True)))
        calls.add_all([_read_python_call(each) for each in parsed], only_known=not marked)

    return read


def _check_pythonic_beginning(source: TextSource) -> Reading[None]:
    """Raise NotACall for a list that does not begin with a call, without waiting for its end."""
    start = source.position
    while re.match(r"\[\s*[\w.]+\(", head := source.slice(start, start + _LONGEST_BEGINNING)) is None:
        if len(head) == _LONGEST_BEGINNING or re.fullmatch(r"\[\s*[\w.]*", head) is None:
            raise NotACall
        yield from source.wait()


def _parse_python(text: str) -> list[ast.expr]:
    """Return the items of a list in Python, as syntax trees. Raises NotACall for other texts."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escape sequences that Python does not know
            parsed = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NotACall from None
    if not isinstance(parsed, ast.List) or not parsed.elts:
        raise NotACall
    return parsed.elts


def _read_python_call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise NotACall
    arguments = {keyword.arg: _read_python_value(keyword.value) for keyword in node.keywords if keyword.arg}
    if len(arguments) < len(node.keywords):
        raise NotACall
    return ast.unparse(node.func), arguments


_WORDS = {"true": True, "false": False, "null": None}  # of JSON, which models mix with Python's


def _read_python_value(node: ast.expr) -> Any:
    """Return the JSON value of a literal. Raises NotACall for other expressions."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_read_python_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_read_key(key): _read_python_value(value) for key, value in zip(keys, values, strict=True)}
    raise NotACall


def _read_key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise NotACall
