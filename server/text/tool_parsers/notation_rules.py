"""The rules of a grammar for values in notations other than JSON, by their schemas.

Keywords of a schema that are not read below have no effect; `docs/guide/tools.md` lists those that have one.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from server.grammar.rules import GrammarRules, quote_string
from server.text.tool_parsers.values import dump_json, list_options, list_parameters, resolve_reference

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
MAX_NESTING = 64  # most schemas within schemas of which rules are made; JSON that is nested deeper is refused
MAX_ITEMS = 1000  # most items that are counted
_BARE_KEY = re.compile(r"[^\s:,{}\[\]<>\"']+")


class NotationRules(ABC):
    """Adds the rules of values in one notation to a grammar."""

    def __init__(self, rules: GrammarRules, root: Mapping[str, Any], prefix: str) -> None:
        """`root` is the schema to whose parts references refer; `prefix` begins the names of the rules of those."""
        self.rules = rules
        self.root = root
        self._prefix = prefix
        self._references: dict[str, str] = {}  # names of rules, by reference
        self._depth = 0

    def add(self, rule: str, schema: Any) -> str:
        """Add the rule of the values that a schema accepts; return its name, which may be that of another rule."""
        if not isinstance(schema, Mapping) or self._depth == MAX_NESTING:
            return self.add_any(rule, schema if isinstance(schema, Mapping) else {})
        self._depth += 1
        name = self._add_known(rule, schema)
        self._depth -= 1
        return name

    def _add_known(self, rule: str, schema: Mapping[str, Any]) -> str:
        if isinstance(reference := schema.get("$ref"), str):
            return self._add_reference(reference)
        if options := list_options(schema):
            return self.rules.add(rule, " | ".join(map(self.write, options)))
        any_of = schema.get("anyOf") or schema.get("oneOf")
        if isinstance(any_of, list) and any_of:
            alternatives = [self.add(f"{rule}_{number}", each) for number, each in enumerate(any_of)]
            return self.rules.add(rule, " | ".join(alternatives))
        types = schema.get("type") or ("object" if "properties" in schema else "")
        alternatives = [self._add_type(rule, name, schema) for name in (types if isinstance(types, list) else [types])]
        return self.rules.add(rule, " | ".join(alternatives))

    def _add_type(self, rule: str, name: Any, schema: Mapping[str, Any]) -> str:
        match name:
            case "string":
                return self.add_text()
            case "integer" | "number" | "boolean" | "null":
                bounds = {key: schema[key] for key in _BOUNDS if key in schema}
                return self.write_word(self.rules.add_json(f"{rule}_{name}", {"type": name, **bounds}))
            case "array" if (most := _read_count(schema, "maxItems")) != 0:
                fewest = _read_count(schema, "minItems") or 0
                most = most if most is None or most >= fewest else None
                return self.write_array(self.add(f"{rule}_item", schema.get("items")), fewest, most)
            case "object" if list_parameters(schema):
                return self.write_object(self.add_members(rule, schema))
        return self.add_any(f"{rule}_any", {**schema, "type": name} if name else schema)

    def _add_reference(self, reference: str) -> str:
        """Add the rule of what a reference refers to, once: it may refer to itself."""
        if reference not in self._references:
            name = f"{self._prefix}_reference_{len(self._references)}"
            self._references[reference] = name
            self.rules.add(name, self.add(f"{name}_value", resolve_reference(reference, self.root)))
        return self._references[reference]

    @abstractmethod
    def add_members(self, rule: str, schema: Mapping[str, Any]) -> str:
        """Add the rules of an object's members, without its brackets; return how other rules refer to them."""

    @abstractmethod
    def add_text(self) -> str:
        """Add the rule of a text."""

    @abstractmethod
    def add_any(self, rule: str, schema: Mapping[str, Any]) -> str:
        """Add the rule of a value of which little is known."""

    @abstractmethod
    def write_word(self, word: str) -> str:
        """Return the rule of a number, true, false or null, given its rule in JSON."""

    @abstractmethod
    def write_array(self, item: str, fewest: int, most: int | None) -> str:
        """Return the rule of a list of such items, given their fewest and most; `most` is None if there is no limit."""

    @abstractmethod
    def write_object(self, members: str) -> str:
        """Return the rule of an object with these members."""

    @abstractmethod
    def write(self, value: Any) -> str:
        """Return one value as strings of the grammar."""


def _read_count(schema: Mapping[str, Any], key: str) -> int | None:
    """Return a number of items; None if the schema has none that can be counted."""
    count = schema.get(key)
    return count if isinstance(count, int) and 0 <= count <= MAX_ITEMS else None


class GemmaRules(NotationRules):
    """Values as in JSON, but with bare keys, and texts between two quotes of several characters without any escapes.

    An object is `{city:<|"|>Bern<|"|>,days:[1,2]}`. Keys are sorted, as in Gemma's chat templates.
    """

    def __init__(self, rules: GrammarRules, root: Mapping[str, Any], prefix: str, quote: str) -> None:
        super().__init__(rules, root, prefix)
        self._quote = quote

    def add_members(self, rule: str, schema: Mapping[str, Any]) -> str:
        members = []
        for number, key, is_required in sorted(list_parameters(schema), key=lambda each: each[1].lower()):
            if _BARE_KEY.fullmatch(key):
                value = self.add(f"{rule}_{number}", schema["properties"][key])
                members.append((f"{quote_string(f'{key}:')} {value}", is_required))
        return self.rules.add_members(rule, members, ",")

    def add_text(self) -> str:
        quote = self.rules.quote(self._quote)
        return self.rules.add("quoted", f"{quote} {self.rules.add_text_until('quoted_rest', [self._quote])}")

    def add_any(self, rule: str, schema: Mapping[str, Any]) -> str:
        number = self.rules.add_json("any_number", {"type": "number"})
        items, members = 'any ("," any)*', 'KEY ":" any ("," KEY ":" any)*'
        self.rules.add("KEY", f"/{_BARE_KEY.pattern}/")
        words = '"true" | "false" | "null"'
        nested = f'"[" ({items})? "]" | "{{" ({members})? "}}"'
        return self.rules.add("any", f"{self.add_text()} | {number} | {words} | {nested}")

    def write_word(self, word: str) -> str:
        return word

    def write_array(self, item: str, fewest: int, most: int | None) -> str:
        more = f'("," {item}){{{max(fewest - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" {item} {more} "]"' if fewest else f'"[" ({item} {more})? "]"'

    def write_object(self, members: str) -> str:
        return f'"{{" {members} "}}"'

    def write(self, value: Any) -> str:
        return self.rules.quote(_write_gemma(value, self._quote))


def _write_gemma(value: Any, quote: str) -> str:
    match value:
        case str(text):
            return f"{quote}{text}{quote}"
        case list(items):
            return f"[{','.join(_write_gemma(item, quote) for item in items)}]"
        case dict(members):
            return f"{{{','.join(f'{key}:{_write_gemma(each, quote)}' for key, each in members.items())}}}"
    return dump_json(value)


class ElementRules(NotationRules):
    """Values in elements, each of whose tags follows a mark: `MARK<city>Bern MARK</city>`.

    The rule of a value includes the mark after it, as only that ends a text. Lists have elements `item`. A value of
    which little is known is in JSON.
    """

    def __init__(self, rules: GrammarRules, root: Mapping[str, Any], prefix: str, mark: str) -> None:
        super().__init__(rules, root, prefix)
        self._mark = mark

    def add_members(self, rule: str, schema: Mapping[str, Any]) -> str:
        members = []
        for number, key, is_required in list_parameters(schema):
            if _BARE_KEY.fullmatch(key):
                value = self.add(f"{rule}_{number}", schema["properties"][key])
                members.append(self._write_element(key, value) + ("" if is_required else "?"))
        return " ".join(members)

    def add_text(self) -> str:
        return self.rules.add_text_until("marked", [self._mark])

    def add_any(self, rule: str, schema: Mapping[str, Any]) -> str:
        definitions = {name: self.root[name] for name in ("$defs", "definitions") if name in self.root}
        return self.write_word(self.rules.add_json(rule, {**definitions, **schema}))

    def write_word(self, word: str) -> str:
        return f"{word} {self.rules.quote(self._mark)}"

    def write_array(self, item: str, fewest: int, most: int | None) -> str:
        count = f"{{{fewest},{'' if most is None else most}}}"
        return f"{self._write_element('item', item)}{count} {self.rules.quote(self._mark)}"

    def write_object(self, members: str) -> str:
        return f"{members} {self.rules.quote(self._mark)}"

    def write(self, value: Any) -> str:
        return self.rules.quote((value if isinstance(value, str) else dump_json(value)) + self._mark)

    def _write_element(self, name: str, value: str) -> str:
        return f"({self.rules.quote(f'{self._mark}<{name}>')} {value} {quote_string(f'</{name}>')})"
