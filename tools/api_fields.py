"""`python -m tools.api_fields`: writes the tables of request fields into docs/reference/api.md.

They are made from the models of the bodies, in the form that these have in `/openapi.json`. A field's description is
its meaning, and what follows "; default: " in it is its default.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from server.api.http.json_body import Body, RefusingValidator
from server.api.openai.chat import ChatRequest
from server.api.openai.completions import CompletionRequest
from server.api.openai.conversation import Message, Rendering
from server.api.openai.request_models import CacheRequest, GenerationRequest, SamplingRequest
from server.api.openai.response_items.input import ResponseRequest
from server.api.openai.structured.models import StructuredRequest
from server.api.openai.tokenize import DetokenizeRequest, TokenizeRequest
from server.api.openai.tools.definitions import Tool

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "api.md"
PLACE = re.compile(r"(<!-- fields: (\w+) -->\n).*?(<!-- end of fields -->)", re.DOTALL)
DEFAULT_MARK = "; default: "
TABLES: Mapping[str, tuple[type[Body], ...]] = {  # models whose own fields are in a table, by its name on the page
    "completions": (CompletionRequest,),
    "chats": (ChatRequest, Rendering),
    "messages": (Message,),
    "tools": (Tool,),
    "responses": (ResponseRequest,),
    "generation": (GenerationRequest,),
    "sampling": (SamplingRequest,),
    "structured": (StructuredRequest,),
    "cache": (CacheRequest,),
    "tokenize": (TokenizeRequest,),
    "detokenize": (DetokenizeRequest,),
}
WITHOUT_EFFECT = "ignored"  # the table of fields whose values are ignored
ONE_VALUE = "refused"  # the table of fields that take only the value which they have by default
BODIES: Mapping[str, type[Body]] = {  # whose fields are in these two tables
    "completions": CompletionRequest,
    "chats": ChatRequest,
    "responses": ResponseRequest,
}
SECTIONS = {  # fields about which a section of the page says more
    "explain": "explain",
    "include_reasoning": "reasoning",
    "kv_cache": "choosing-an-instance",
    "kv_cache_priority": "priorities",
    "kv_cache_reference": "comparisons",
    "logprobs": "log-probabilities",
    "messages": "messages",
    "priority": "priorities",
    "prompt": "limits-of-prompts",
    "prompt_cache_key": "conversations",
    "prompt_logprobs": "log-probabilities",
    "response_format": "structured-output",
    "speculative_config": "speculation",
    "structured_outputs": "structured-output",
    "tools": "tools",
}
BOUNDS = {"gt": "above", "exclusiveMinimum": "above", "minimum": "from", "exclusiveMaximum": "below", "maximum": "to"}
LARGE = 2**31  # larger bounds are left out


def main(arguments: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(prog="python -m tools.api_fields", description=__doc__).parse_args(arguments)
    PAGE.write_text(fill_tables(PAGE.read_text()))


def fill_tables(page: str) -> str:
    """Return the page with new tables in the places that it has for them."""
    return PLACE.sub(lambda place: f"{place[1]}{format_table(place[2])}{place[3]}", page)


def format_table(name: str) -> str:
    """Return the table of this name in Markdown."""
    if name in (WITHOUT_EFFECT, ONE_VALUE):
        return _format_rows(("field", "of", "type" if name == WITHOUT_EFFECT else "only value"), _join_bodies(name))
    rows = (row for model in TABLES[name] for row in _iter_rows(model, inspect.get_annotations(model)))
    return _format_rows(("field", "type", "default", "meaning"), rows)


def _format_rows(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _iter_rows(model: type[Body], names: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each of these fields of a model that has an effect, and for each field of the objects in it."""
    schema = model.model_json_schema()
    for name in names:
        if name not in model.model_fields or _find_table(model, name) is not None:
            continue
        key = _get_key(model, name)
        field: Mapping[str, Any] = schema["properties"][key]
        meaning, _, default = field.get("description", "").partition(DEFAULT_MARK)
        if key in schema.get("required", ()):
            default = "required"
        elif not default and field.get("default") not in (None, ""):
            default = _format_value(field["default"])
        section = None if model.path_prefix else SECTIONS.get(key)
        shown = f"`{model.path_prefix}{key}`"
        yield f"[{shown}](#{section})" if section else shown, describe_type(field), default, meaning
        nested = _find_model(model.model_fields[name].annotation)
        if nested is not None and (nested,) not in TABLES.values():
            yield from _iter_rows(nested, nested.model_fields)


def _join_bodies(table: str) -> Iterator[tuple[str, ...]]:
    """Yield a row for each field of one of the two tables of all bodies: its name, the bodies, type or value."""
    found: dict[tuple[str, str], list[str]] = {}
    for body, model in BODIES.items():
        for row in _iter_fields_of(table, model):
            found.setdefault(row, []).append(body)
    for (name, last), bodies in sorted(found.items()):
        yield f"`{name}`", "all" if len(bodies) == len(BODIES) else ", ".join(bodies), last


def _iter_fields_of(table: str, model: type[Body]) -> Iterator[tuple[str, str]]:
    """Yield the fields that a model, and the objects in it, have for such a table: the name, and the type or value."""
    schema = model.model_json_schema()
    for name, field in model.model_fields.items():
        key = _get_key(model, name)
        if _find_table(model, name) == table:
            shown: Mapping[str, Any] = schema["properties"][key]
            last = describe_type(shown) if table == WITHOUT_EFFECT else _format_value(shown.get("default"))
            yield model.path_prefix + key, last
        elif (nested := _find_model(field.annotation)) is not None:
            yield from _iter_fields_of(table, nested)


def _find_table(model: type[Body], name: str) -> str | None:
    """Return which of the two tables of all bodies has a field; None if it has an effect."""
    if _get_key(model, name) in model.no_effect_fields:
        return WITHOUT_EFFECT
    is_refusing = any(isinstance(mark, RefusingValidator) for mark in model.model_fields[name].metadata)
    return ONE_VALUE if is_refusing else None


def _get_key(model: type[Body], name: str) -> str:
    """Return the name of a field in JSON."""
    return model.model_fields[name].alias or name


def _find_model(annotation: Any) -> type[Body] | None:
    """Return the model of the objects that a field takes; None if it takes no objects with a model."""
    if inspect.isclass(annotation) and issubclass(annotation, Body):
        return annotation
    return next((found for each in get_args(annotation) if (found := _find_model(each)) is not None), None)


def describe_type(field: Mapping[str, Any]) -> str:
    """Return the type and the bounds of a field in words, such as "integer, from 1 to 128", of its JSON Schema."""
    kinds = list(_iter_kinds(field))
    words = dict.fromkeys(filter(None, map(_describe_kind, kinds)))
    bounds = dict.fromkeys(filter(None, map(_describe_bounds, kinds)))
    return ", ".join(filter(None, (" or ".join(words), *bounds)))


def _iter_kinds(field: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and its alternatives, but null."""
    if field.get("type") != "null":
        yield field
    for each in field.get("anyOf", ()):
        yield from _iter_kinds(each)


def _describe_kind(kind: Mapping[str, Any]) -> str:
    if values := kind.get("enum", [kind["const"]] if "const" in kind else []):
        return " or ".join(map(_format_value, values))
    if "$ref" in kind:
        return "object"
    if kind.get("type") != "array":
        return str(kind.get("type", ""))
    items = list(filter(None, map(_describe_items, _iter_kinds(kind["items"]))))
    return f"list of {' or '.join(items)}" if items else "list"


def _describe_items(item: Mapping[str, Any]) -> str:
    kind = _describe_kind(item)
    return kind.replace("list", "lists", 1) if kind.startswith("list") else kind and f"{kind}s"


def _describe_bounds(kind: Mapping[str, Any]) -> str:
    words = [f"{word} {kind[name]:,}" for name, word in BOUNDS.items() if name in kind and abs(kind[name]) < LARGE]
    for least, most, unit in (("minLength", "maxLength", "characters"), ("minItems", "maxItems", "items")):
        if most in kind:
            words.append(f"up to {kind[most]:,} {unit}")
        elif kind.get(least):
            words.append("not empty")
    return " ".join(words)


def _format_value(value: Any) -> str:
    """Return a value as it is written in JSON."""
    return f"`{json.dumps(value)}`"


if __name__ == "__main__":
    main()
