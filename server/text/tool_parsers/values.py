"""Arguments of tool calls: read from JSON or from text by the tool's schema, and written as JSON. Knows no format."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

from server.text.tool_parsers.source import NotACall

_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_JSON_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),  # before int, of which it is a subclass
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
)
MAX_PYTHON_LENGTH = 2**16  # characters of a value in Python's form; Python's parser takes much memory for long ones
_TRAILING_COMMA = re.compile(r'(?P<string>"(?:[^"\\]|\\.)*")|,(?P<end>\s*[}\]])')
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
_NAME = re.compile(r"[A-Za-z0-9_./:-]{1,128}")


def is_tool_name(name: object) -> bool:
    """Return whether this may be the name of a tool."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def load_json(text: str) -> Any:
    """Return the value of a JSON text, in whose strings there may be line breaks. Raises NotACall for other texts."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise NotACall from None


def _refuse_constant(_: str) -> NoReturn:
    raise ValueError  # NaN and infinities


def dump_json(value: Any) -> str:
    """Return a value as JSON that is valid UTF-8. Raises NotACall for values that JSON does not have."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise NotACall from None
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can only have as an escape sequence
        return json.dumps(value)
    return text


# ---------------------------------------------------------------- values by schema
def convert_text(text: str, key: str, schema: Mapping[str, Any], *, is_json: bool = False) -> Any:
    """Return the value that a text stands for as the parameter `key`, by the schema of a tool's parameters.

    A text that is not of the parameter's type stays a text. So does that of a parameter that is not in the schema,
    unless the call says that it `is_json`.
    """
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return convert_value(text, find_types(properties[key], schema))
    return convert_value(text, set()) if is_json else text


def convert_value(text: str, types: set[str]) -> Any:
    """Return the value of one of these JSON types that a text stands for; without types, of any."""
    if types == {"string"}:
        return text
    try:
        value = _PYTHON_WORDS[text.strip()] if text.strip() in _PYTHON_WORDS else load_json(text)
    except NotACall:
        return text if not types or "string" in types else _load_loosely(text, types)
    if _is_of(value, types):
        return value
    return text if "string" in types else value


def _load_loosely(text: str, types: set[str]) -> Any:
    """Return the object or array that a text in Python's form, or with a comma too many, stands for; else the text."""
    for load in (_load_python, _load_without_trailing_commas):
        with suppress(NotACall):
            value = load(text)
            if _get_type(value) in types & {"object", "array"}:
                return value
    return text


def _load_python(text: str) -> Any:
    if len(text) > MAX_PYTHON_LENGTH:
        raise NotACall
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        raise NotACall from None
    return load_json(dump_json(value))


def _load_without_trailing_commas(text: str) -> Any:
    return load_json(_TRAILING_COMMA.sub(lambda found: found["string"] or found["end"], text))


def convert_quoted_text(text: str, key: str, schema: Mapping[str, Any]) -> Any:
    """Return the value of a text that was marked as one: it stays a text unless the parameter cannot be one."""
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and "string" in find_types(properties.get(key), schema):
        return text
    return convert_text(text, key, schema)


def fits_schema(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> bool:
    """Return whether arguments have the keys and types of values that a tool's schema demands."""
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not all(key in arguments for key in required):
        return False
    if schema.get("additionalProperties", True) is False and not arguments.keys() <= properties.keys():
        return False
    types = {key: find_types(properties[key], schema) for key in arguments.keys() & properties.keys()}
    return all(_is_of(arguments[key], allowed) for key, allowed in types.items())


def _is_of(value: Any, types: set[str]) -> bool:
    """Return whether a value is of one of these JSON types; without types, of any."""
    found = _get_type(value)
    return not types or found in types or (found == "integer" and "number" in types)


def _get_type(value: Any) -> str:
    return next((name for kind, name in _JSON_TYPES if isinstance(value, kind)), "null")


def find_types(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that a schema names, in its alternatives and references, too; an empty set if none."""
    types: set[str] = set()
    todo, seen = [schema], set[int]()
    while todo:
        each = todo.pop()
        if not isinstance(each, Mapping) or id(each) in seen:
            continue
        seen.add(id(each))
        given = each.get("type")
        if named := {name for name in (given if isinstance(given, list) else [given]) if isinstance(name, str)}:
            types |= named
        elif options := list_options(each):
            types |= {_get_type(option) for option in options}
        elif isinstance(reference := each.get("$ref"), str):
            todo.append(resolve_reference(reference, root))
        else:
            todo += [part for key in _ALTERNATIVES if isinstance(parts := each.get(key), list) for part in parts]
    return types


def list_parameters(schema: Mapping[str, Any]) -> list[tuple[int, str, bool]]:
    """Return for each parameter its number, its name, and whether it is required."""
    required, properties = schema.get("required"), schema.get("properties")
    if not isinstance(properties, Mapping):
        return []
    return [(number, key, isinstance(required, list) and key in required) for number, key in enumerate(properties)]


def find_keyword(schema: Any, keyword: str, root: Mapping[str, Any]) -> Any:
    """Return the value of a keyword in a schema, or in the first alternative that has it; None if none has."""
    todo, seen = [schema], set[int]()
    while todo:
        each = todo.pop(0)
        if not isinstance(each, Mapping) or id(each) in seen:
            continue
        seen.add(id(each))
        if keyword in each:
            return each[keyword]
        if isinstance(reference := each.get("$ref"), str):
            todo.append(resolve_reference(reference, root))
        todo += [part for key in _ALTERNATIVES if isinstance(parts := each.get(key), list) for part in parts]
    return None


def list_options(schema: Any) -> list[Any]:
    """Return the values that `const` or `enum` of a schema lists; an empty list if it has neither."""
    if not isinstance(schema, Mapping):
        return []
    options = [schema["const"]] if "const" in schema else schema.get("enum")
    return options if isinstance(options, list) else []


def resolve_reference(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the part of a schema that a reference such as "#/$defs/Place" names; None if there is none."""
    found: Any = root
    for name in reference.removeprefix("#/").split("/"):
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found
