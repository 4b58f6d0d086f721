"""The reader of MiniMax M3's calls, in elements that are named as the parameters are, and may have others in them.

    ]<]minimax[>[<invoke name="NAME">]<]minimax[>[<city>Bern]<]minimax[>[</city>]<]minimax[>[</invoke>

Each tag follows a mark, a special token, so that a text may have any tags in it. Lists have elements `item`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from server.text.tool_parsers.calls import Calls, Syntax
from server.text.tool_parsers.source import MAX_DEPTH, NotACall, Reading, TextSource
from server.text.tool_parsers.values import convert_value, find_keyword, find_types

Content: TypeAlias = "str | Elements"
Elements: TypeAlias = "list[tuple[str, Content]]"  # names, and what is in them


def read_elements(mark: str) -> Syntax:
    """Return the reader of a call whose tags follow this mark."""

    def read(source: TextSource, calls: Calls) -> Reading[None]:
        yield from source.skip_space()
        yield from source.expect(f'{mark}<invoke name="')
        name, _ = yield from source.read_until('">')
        content = yield from _read_content(source, mark, "invoke")
        if isinstance(content, str) and content.strip():
            raise NotACall
        schema = calls.schemas.get(name.strip(), {})
        elements = [] if isinstance(content, str) else content
        calls.add(name.strip(), _convert_elements(elements, schema, schema))

    return read


def _read_content(source: TextSource, mark: str, name: str, depth: int = 1) -> Reading[Content]:
    """Read what is in an element, and its closing tag."""
    text, _ = yield from source.read_until(mark, limit=None)
    elements: Elements = []
    yield from source.skip_space()
    while (yield from source.accept(f"</{name}>")) is None:
        yield from source.expect("<")
        inner, _ = yield from source.read_until(">")
        if inner.startswith("/") or depth == MAX_DEPTH or text.strip():
            raise NotACall
        elements.append((inner, (yield from _read_content(source, mark, inner, depth + 1))))
        yield from source.skip_space()
        yield from source.expect(mark)
        yield from source.skip_space()
    return elements or text


def _convert(content: Content, schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the value of what is in an element, as its schema says."""
    types = find_types(schema, root)
    if isinstance(content, str):
        if not content.strip() and types and not types & {"string", "null"}:
            return [] if "array" in types else {} if "object" in types else content
        return convert_value(content, types)
    if "array" in types or (not types and all(name == "item" for name, _ in content)):
        return [_convert(item, find_keyword(schema, "items", root), root) for _, item in content]
    return _convert_elements(content, schema, root)


def _convert_elements(elements: Elements, schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object whose members are these elements."""
    properties = find_keyword(schema, "properties", root)
    known = properties if isinstance(properties, Mapping) else {}
    return {name: _convert(content, known.get(name), root) for name, content in elements}
