"""The rules of a grammar for values in the notation of Gemma's tool calls, by their schemas.

It is like JSON, but keys are bare and texts stand between two quotes of several characters, in which nothing is
escaped: `{city:<|"|>Bern<|"|>,days:[1,2]}`. Keys are sorted, as in Gemma's chat templates. What a schema says with
other words than those below is not held to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from server.grammar.rules import GrammarRules, quote_string
from server.text.tool_parsers.values import dump_json, list_options, list_parameters, resolve_reference

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_BARE_KEY = re.compile(r"[^\s:,{}\[\]<>\"']+")


class GemmaRules:
    """Adds the rules of values to a grammar. The names of its rules begin with `prefix` or with that of the value."""

    def __init__(self, rules: GrammarRules, quote: str, root: Mapping[str, Any], prefix: str) -> None:
        """`root` is the schema to whose parts references refer."""
        self._rules = rules
        self._quote = quote
        self._root = root
        self._prefix = prefix
        self._references: dict[str, str] = {}  # names of rules, by reference

    def add(self, rule: str, schema: Any) -> str:
        """Add the rule of the values that a schema accepts; return its name, which may be that of another rule."""
        if not isinstance(schema, Mapping):
            return self._add_any()
        if isinstance(reference := schema.get("$ref"), str):
            return self._add_reference(reference)
        if options := list_options(schema):
            return self._rules.add(rule, " | ".join(map(self._write, options)))
        alternatives = schema.get("anyOf") or schema.get("oneOf")
        if isinstance(alternatives, list):
            ways = [self.add(f"{rule}_{number}", each) for number, each in enumerate(alternatives)]
            return self._rules.add(rule, " | ".join(ways))
        types = schema.get("type", "object" if "properties" in schema else "")
        ways = [self._add_type(rule, name, schema) for name in (types if isinstance(types, list) else [types])]
        return self._rules.add(rule, " | ".join(ways))

    def _add_type(self, rule: str, name: Any, schema: Mapping[str, Any]) -> str:
        match name:
            case "string":
                return self._add_text()
            case "integer" | "number" | "boolean" | "null":
                bounds = {key: schema[key] for key in _BOUNDS if key in schema}
                return self._rules.add_json(f"{rule}_{name}", {"type": name, **bounds})
            case "array":
                return self._write_array(self.add(f"{rule}_item", schema.get("items")), schema)
            case "object" if schema.get("properties"):
                return self._write_object(rule, schema)
        return self._add_any()

    def _write_array(self, item: str, schema: Mapping[str, Any]) -> str:
        fewest, most = schema.get("minItems", 0), schema.get("maxItems", "")
        if most == 0:
            return quote_string("[]")
        more = f'("," {item}){{{max(fewest - 1, 0)},{most and most - 1}}}'
        return f'"[" {item} {more} "]"' if fewest else f'"[" ({item} {more})? "]"'

    def _write_object(self, rule: str, schema: Mapping[str, Any]) -> str:
        return f'"{{" {self.add_members(rule, schema)} "}}"'

    def add_members(self, rule: str, schema: Mapping[str, Any]) -> str:
        """Add the rules of an object's members, without its brackets; return how other rules refer to them."""
        members = []
        for number, key, is_required in sorted(list_parameters(schema), key=lambda each: each[1].lower()):
            if _BARE_KEY.fullmatch(key):
                value = self.add(f"{rule}_{number}", schema["properties"][key])
                members.append((f"{quote_string(f'{key}:')} {value}", is_required))
        return self._rules.add_members(rule, members, ",")

    def _add_reference(self, reference: str) -> str:
        """Add the rule of what a reference refers to, once: it may refer to itself."""
        if reference not in self._references:
            name = f"{self._prefix}_reference_{len(self._references)}"
            self._references[reference] = name
            self._rules.add(name, self.add(f"{name}_value", resolve_reference(reference, self._root)))
        return self._references[reference]

    def _add_text(self) -> str:
        quote = self._rules.quote(self._quote)
        return self._rules.add("quoted", f"{quote} {self._rules.add_text_until('quoted_rest', [self._quote])}")

    def _add_any(self) -> str:
        """Add the rule of any value."""
        number = self._rules.add_json("any_number", {"type": "number"})
        items, members = 'any ("," any)*', 'KEY ":" any ("," KEY ":" any)*'
        self._rules.add("KEY", f"/{_BARE_KEY.pattern}/")
        words = '"true" | "false" | "null"'
        nested = f'"[" ({items})? "]" | "{{" ({members})? "}}"'
        return self._rules.add("any", f"{self._add_text()} | {number} | {words} | {nested}")

    def _write(self, value: Any) -> str:
        """Return one value as strings of the grammar."""
        return self._rules.quote(write_gemma(value, self._quote))


def write_gemma(value: Any, quote: str) -> str:
    """Return a JSON value in Gemma's notation."""
    match value:
        case str(text):
            return f"{quote}{text}{quote}"
        case list(items):
            return f"[{','.join(write_gemma(item, quote) for item in items)}]"
        case dict(members):
            return f"{{{','.join(f'{key}:{write_gemma(each, quote)}' for key, each in members.items())}}}"
    return dump_json(value)
