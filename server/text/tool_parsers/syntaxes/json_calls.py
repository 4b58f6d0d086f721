"""Readers of calls whose arguments are a JSON object.

If the tool is one of the request, its arguments are passed on as they arrive; otherwise once they are complete.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from server.text.tool_parsers.calls import ARGUMENTS, NAMES, Calls, Syntax, split_call
from server.text.tool_parsers.source import NotACall, Reading, TextSource
from server.text.tool_parsers.values import load_json

# How a JSON object or a list goes on whose first object is a call, and the beginnings of such texts
_FIRST_KEY = re.compile(r'(\[\s*)?\{\s*"(name|type|function|parameters|arguments)"')
_BEFORE_FIRST_KEY = re.compile(r'(\[\s*)?(\{\s*("[a-z]*)?)?')
_DEEPSEEK_CALL = "<\uff5ctool\u2581call\u2581begin\uff5c>"
_DEEPSEEK_ENDS = ("<\uff5ctool\u2581call\u2581end\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>")
_KIMI_CALL = "<|tool_call_begin|>"
_KIMI_ENDS = ("<|tool_call_end|>", "<|tool_calls_section_end|>")
_MEMBERS = frozenset({*NAMES, *ARGUMENTS, "type", "id"})  # of a call


# ---------------------------------------------------------------- name and arguments in one object
def read_json(source: TextSource, calls: Calls) -> Reading[None]:
    """Read a JSON object with name and arguments, or a list of them."""
    yield from _read_objects(source, calls, only_known=False)


def read_json_objects(source: TextSource, calls: Calls) -> Reading[None]:
    """Read a JSON object with name and arguments, or a list of them, and further objects after it."""
    yield from read_json(source, calls)
    yield from source.skip_space()
    while source.slice(source.position, source.position + 1) == "{":
        yield from read_json(source, calls)
        yield from source.skip_space()


def read_bare_json(source: TextSource, calls: Calls) -> Reading[None]:
    """Read what `read_json` does where no marker is before it; all names must be those of tools."""
    yield from source.expect_beginning(_FIRST_KEY, _BEFORE_FIRST_KEY)
    yield from _read_objects(source, calls, only_known=True)


def read_only_json(source: TextSource, calls: Calls) -> Reading[None]:
    """Read calls without a marker that are all of the rest of a message, also in one Markdown block of code.

    Qwen2.5-Coder writes its calls so. Their names must be those of tools and their arguments fit the schemas: who asks
    for JSON gets text.
    """
    is_fenced = (yield from source.accept("```json", "```")) is not None
    yield from source.skip_space()
    yield from source.expect_beginning(_FIRST_KEY, _BEFORE_FIRST_KEY)
    yield from _expect_known_name(source, calls)
    found: list[tuple[Any, Any]] = []
    while source.slice(source.position, source.position + 1) in ("{", "["):
        value = load_json((yield from source.read_brackets()))
        for each in value if isinstance(value, list) else [value]:
            name, arguments = split_call(each)
            if not _has_only_members_of_calls(each) or not calls.fits(name, arguments):
                raise NotACall
            found.append((name, arguments))
        yield from source.skip_space()
    if is_fenced:
        yield from source.expect("```")
        yield from source.skip_space()
    if source.slice(source.position):
        raise NotACall
    calls.add_all(found)


def _expect_known_name(source: TextSource, calls: Calls) -> Reading[None]:
    """Read nothing. Raises NotACall as soon as a JSON object shows a name that no tool has, before its end."""
    start = source.position
    try:
        name = yield from _read_object_head(source, only_known=True)
    except NotACall:  # a list, or arguments before the name
        name = ""
    source.position = start
    if name and name not in calls.schemas:
        raise NotACall


def read_json_until(closing: str) -> Syntax:
    """Return the reader of objects or lists of them, one after another, up to a text."""

    def read(source: TextSource, calls: Calls) -> Reading[None]:
        found = None
        while found is None:
            yield from read_json(source, calls)
            yield from source.skip_space()
            found = yield from source.accept(closing)

    return read


def _read_objects(source: TextSource, calls: Calls, *, only_known: bool) -> Reading[None]:
    yield from source.skip_space()
    if (yield from source.accept("[")) is None:
        return (yield from _read_object(source, calls, only_known=only_known))
    return (yield from _read_list(source, calls, partial(_read_object, only_known=only_known)))


def _read_list(source: TextSource, calls: Calls, read_item: Syntax) -> Reading[None]:
    """Read the items of a list, of which at least one must be there, and the bracket that closes it."""
    while True:
        yield from source.skip_space()
        yield from read_item(source, calls)
        yield from source.skip_space()
        if (yield from source.expect(",", "]")) == "]":
            return source.keep()


def _read_object(source: TextSource, calls: Calls, *, only_known: bool) -> Reading[None]:
    """Read a JSON object with name and arguments, in this order if the arguments are to be passed on in parts.

    If it has to be `only_known`, its name is that of a tool, and it has no other members than a call has: a tool's
    definition, which a model may write as well, has a description.
    """
    start = source.position
    try:
        name = yield from _read_object_head(source, only_known=only_known)
    except NotACall:
        name = ""
    if name in calls.schemas:
        calls.begin(name)
        yield from source.read_brackets_in_parts(calls.extend)
        yield from source.skip_to_closing("}")
    else:
        source.position = start
        value = load_json((yield from source.read_brackets()))
        if only_known and not _has_only_members_of_calls(value):
            raise NotACall
        calls.add(*split_call(value), only_known=only_known)
    source.keep()


def _has_only_members_of_calls(value: Any) -> bool:
    if not isinstance(value, dict) or not value.keys() <= _MEMBERS:
        return False
    inner = value.get("function")
    return not isinstance(inner, dict) or _has_only_members_of_calls(inner)


def _read_object_head(source: TextSource, *, only_known: bool) -> Reading[str]:
    """Read a JSON object up to its arguments, which have to be an object, after texts; return the name among these."""
    name = ""
    yield from source.expect("{")
    while True:
        key = yield from _read_key(source)
        if key in ARGUMENTS:
            yield from source.expect("{")
            source.position -= 1
            return name
        if only_known and key not in _MEMBERS:
            raise NotACall
        value = yield from _read_string(source)
        name = value if key in NAMES else name
        yield from source.expect(",")


def _read_key(source: TextSource) -> Reading[str]:
    """Read the key of a member of a JSON object, the colon, and white space after it."""
    key = yield from _read_string(source)
    yield from source.expect(":")
    yield from source.skip_space()
    return key


def _read_string(source: TextSource) -> Reading[str]:
    """Read a JSON string without escape sequences, and white space around it."""
    yield from source.skip_space()
    yield from source.expect('"')
    text, _ = yield from source.read_until('"')
    if "\\" in text:
        raise NotACall
    yield from source.skip_space()
    return text


# ---------------------------------------------------------------- the arguments after the name
def read_named_objects(source: TextSource, calls: Calls) -> Reading[None]:
    """Read a list of JSON objects whose only key is the name, and whose value are the arguments."""
    yield from source.skip_space()
    yield from source.expect("[")
    yield from _read_list(source, calls, _read_named_object)


def _read_named_object(source: TextSource, calls: Calls) -> Reading[None]:
    yield from source.expect("{")
    name = yield from _read_key(source)
    yield from read_arguments(source, calls, name)
    yield from source.skip_space()
    yield from source.expect("}")
    source.keep()


def read_arguments(
    source: TextSource, calls: Calls, name: str, ends: tuple[str, ...] = (), following: tuple[str, ...] = ()
) -> Reading[None]:
    """Read the arguments of a call, a JSON object; for a name that is a tool's, they are passed on in parts.

    Malformed ones end at the first of the texts `ends`, within a string only if the text then ends or goes on with
    one of those `following`.
    """
    yield from source.skip_space()
    if name in calls.schemas and (yield from source.accept("{")) is not None:
        source.position -= 1
        calls.begin(name)
        yield from source.read_brackets_in_parts(calls.extend, ends, following)
    else:
        calls.add(name, load_json((yield from source.read_brackets())))
        source.keep()


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
    yield from read_arguments(source, calls, name.strip(), _DEEPSEEK_ENDS, (_DEEPSEEK_CALL, *_DEEPSEEK_ENDS))
    if is_block:
        yield from source.skip_space()
        yield from source.accept("```")


def read_kimi(source: TextSource, calls: Calls) -> Reading[None]:
    """Read a call of Kimi K2, whose id has the name in it: `functions.NAME:0`."""
    call_id, _ = yield from source.read_until("<|tool_call_argument_begin|>")
    name = call_id.strip().rpartition(":")[0] or call_id.strip()
    yield from read_arguments(source, calls, name.removeprefix("functions."), _KIMI_ENDS, (_KIMI_CALL, *_KIMI_ENDS))
