"""The rules of a grammar for the arguments of a tool call, by the schema of the tool and the form of the family.

llguidance makes those of JSON, by the whole schema. In tags, and in the notations of `notation_rules.py`, texts are not
held to patterns and lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.grammar.rules import GrammarRules, quote_string
from server.text.tool_parsers.notation_rules import ElementRules, GemmaRules
from server.text.tool_parsers.tool_format import CallForm
from server.text.tool_parsers.values import find_types, list_options, list_parameters


class ArgumentRules:
    """Adds the rules of arguments in one form to a grammar."""

    def __init__(self, rules: GrammarRules, form: CallForm) -> None:
        self._rules = rules
        self._form = form

    def add(self, rule: str, schema: Mapping[str, Any]) -> str:
        """Add the rules of a call's arguments; return how other rules refer to them. `rule` begins their names."""
        match self._form.arguments:
            case "json":
                return self._rules.add_json(f"{rule}_arguments", {"type": "object", **schema})
            case "tags":
                return self._add_tags(rule, schema)
            case "python":
                return self._add_keywords(rule, schema)
            case "gemma":
                return GemmaRules(self._rules, schema, rule, self._form.mark).add_members(rule, schema)
            case "elements":
                return ElementRules(self._rules, schema, rule, self._form.mark).add_members(rule, schema)

    def _add_tags(self, rule: str, schema: Mapping[str, Any]) -> str:
        parts = []
        for number, key, is_required in list_parameters(schema):
            parameter = self._add_tag(f"{rule}_{number}", key, schema)
            parts.append(parameter if is_required else f"{parameter}?")
        return " ".join(parts)

    def _add_tag(self, rule: str, key: str, schema: Mapping[str, Any]) -> str:
        head, tail = self._form.split_parameter(key)
        opening, each = self._rules.quote(head), schema["properties"][key]
        if texts := list_texts(each):
            choices = " | ".join(self._rules.quote(text + tail) for text in texts)
            return self._rules.add(rule, f"{opening} ({choices})")
        if find_types(each, schema) <= {"string"}:
            return self._rules.add(rule, f"{opening} {self._rules.add_text_until(f'{rule}_value', [tail])}")
        return self._rules.add(rule, f"{opening} {self._add_json_value(rule, each, schema)} {self._rules.quote(tail)}")

    def _add_keywords(self, rule: str, schema: Mapping[str, Any]) -> str:
        members = []
        for number, key, is_required in list_parameters(schema):
            if key.isidentifier():
                value = self._add_json_value(f"{rule}_{number}", schema["properties"][key], schema)
                members.append((f"{quote_string(f'{key}=')} {value}", is_required))
        return self._rules.add_members(rule, members, ", ")

    def _add_json_value(self, rule: str, each: Any, schema: Mapping[str, Any]) -> str:
        """Add the rule of a parameter's value in JSON."""
        definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        return self._rules.add_json(f"{rule}_value", {**definitions, **(each if isinstance(each, Mapping) else {})})


def list_texts(schema: Any) -> list[str]:
    """Return the texts that a schema lists as its values; an empty list if it may have others."""
    options = list_options(schema)
    return options if options and all(isinstance(option, str) for option in options) else []
