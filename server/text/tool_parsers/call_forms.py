"""The form of a family's tool calls as they are written, and the rules of a grammar that admits nothing but such calls.

The arguments of a call are by the schema of its tool. `message_grammar.py` puts calls into the grammar of a message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from server.grammar.rules import GrammarRules, quote_string
from server.text.tool_parsers.calls import Schemas
from server.text.tool_parsers.values import find_types

SPACE = r"/[ \n]{0,4}/"  # between calls
_JSON_PARTS = re.compile(r'"[^"]*"|.')


@dataclass(frozen=True)
class CallForm:
    """How a family writes a call, or for `list` several: `before`, the call, `after`.

    object  a JSON object with the name and, under the key `arguments`, the arguments
    list    a list of such objects
    named   the name, `name_end`, the arguments in JSON
    tagged  the name, `name_end`, and for each argument the texts of `parameter`: before its key, before and after its
            value. Texts are written as they are, other values in JSON.
    python  a list of calls in Python, whose values are written in JSON, of which Python reads all but three words
    """

    kind: Literal["object", "list", "named", "tagged", "python"]
    before: str
    after: str = ""
    name_end: str = ""
    arguments: str = "arguments"
    name: str = '"name"'  # the key of the name, and what an object has before it
    parameter: tuple[str, str, str] = ("", "", "")

    def write_list(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Return calls, objects with name and arguments, as text."""
        assert self.kind == "list", "only lists are written into prompts"
        listed = [{"name": call["name"], self.arguments: call["arguments"]} for call in calls]
        return self.before + json.dumps(listed, ensure_ascii=False) + self.after


class CallRules:
    """Adds the rules of calls of these tools to a grammar."""

    def __init__(self, rules: GrammarRules, form: CallForm, schemas: Schemas, *, parallel: bool) -> None:
        """Without `parallel` there is one call."""
        self._rules = rules
        self._form = form
        self._schemas = schemas
        self._parallel = parallel

    def add_calls(self) -> str:
        """Add the rule of a message that is calls, and nothing else."""
        form = self._form
        if form.kind in ("list", "python"):
            return self._rules.add("calls", self._write_list(form.before))
        calls = " | ".join(self._add_call(*each, form.before) for each in self._number_tools())
        one = self._rules.add("call", calls)
        return self._rules.add("calls", f"{one} ({self._rules.add('SPACE', SPACE)} {one})*" if self._parallel else one)

    def add_text_with_calls(self, marker: str) -> str:
        """Add the rule of a text in which each `marker` begins a call; if it is empty, what comes before the arguments.

        In the latter case a tool's name is a part of what begins its call.
        """
        rest = self._form.before[len(marker) :]
        if self._form.kind in ("list", "python"):
            one = self._rules.add("call", f"{self._rules.add_text_until('before', [marker])} {self._write_list(rest)}")
        else:
            calls = " | ".join(self._add_call(*each, rest, marker) for each in self._number_tools())
            one = self._rules.add("call", calls)
        return self._rules.add("text", f"{one}{'*' if self._parallel else '?'} {self._rules.add_text()}")

    def _number_tools(self) -> list[tuple[str, str, Mapping[str, Any]]]:
        """Return for each tool the name of its rule, its own name and its schema."""
        return [(f"call_{number}", name, schema) for number, (name, schema) in enumerate(self._schemas.items())]

    def _write_list(self, before: str) -> str:
        calls = self._rules.add("item", " | ".join(self._add_call(*each, "") for each in self._number_tools()))
        more = f" ({quote_string(', ')} {calls})*" if self._parallel else ""
        opening, closing = self._rules.quote(before + "["), self._rules.quote("]" + self._form.after)
        return f"{opening} {calls}{more} {closing}"

    def _add_call(self, rule: str, name: str, schema: Mapping[str, Any], before: str, marker: str | None = None) -> str:
        """Add the rule of a call, or of an item of a list; with `marker`, of a text and a call that begins with it."""
        match self._form.kind:
            case "python":
                head, body = f"{name}(", self._add_python_arguments(rule, schema)
                after = ")"
            case "tagged":
                head, body = before + name + self._form.name_end, self._add_tagged_arguments(rule, schema)
                after = self._form.after
            case "named":
                head, body = before + name + self._form.name_end, self._add_arguments(rule, schema)
                after = self._form.after
            case _:
                head = f'{before}{{{self._form.name}: {json.dumps(name)}, "{self._form.arguments}": '
                body, after = self._add_arguments(rule, schema), "}"
                after += self._form.after if self._form.kind == "object" else ""
        text = ""
        if marker is not None:
            head, marker = ("", head) if not marker else (head, marker)
            text = self._rules.add_text_until("before" if head else f"{rule}_before", [marker])
        return self._rules.add(rule, f"{text} {self._quote_head(head)} {body} {self._rules.quote(after)}".strip())

    def _quote_head(self, head: str) -> str:
        """Return what comes before the arguments; without a marker, its brackets and strings are those of any JSON."""
        if self._form.kind == "object" and head.startswith("{"):
            return " ".join(quote_string(part) for part in _JSON_PARTS.findall(head))
        return self._rules.quote(head)

    def _add_arguments(self, rule: str, schema: Mapping[str, Any]) -> str:
        return self._rules.add_json(f"{rule}_arguments", {"type": "object", **schema})

    # ------------------------------------------------------------ arguments that are no JSON object
    def _add_tagged_arguments(self, rule: str, schema: Mapping[str, Any]) -> str:
        parts = []
        for number, key, is_required in _list_parameters(schema):
            parameter = self._add_tagged_parameter(f"{rule}_{number}", key, schema)
            parts.append(parameter if is_required else f"{parameter}?")
        return " ".join(parts)

    def _add_tagged_parameter(self, rule: str, key: str, schema: Mapping[str, Any]) -> str:
        opening, key_end, closing = self._form.parameter
        head, each = self._rules.quote(opening + key + key_end), schema["properties"][key]
        if texts := _list_texts(each):
            choices = " | ".join(self._rules.quote(text + closing) for text in texts)
            return self._rules.add(rule, f"{head} ({choices})")
        if find_types(each, schema) <= {"string"}:
            return self._rules.add(rule, f"{head} {self._rules.add_text_until(f'{rule}_value', [closing])}")
        return self._rules.add(rule, f"{head} {self._add_value(rule, each, schema)} {self._rules.quote(closing)}")

    def _add_python_arguments(self, rule: str, schema: Mapping[str, Any]) -> str:
        """Add the rules of keyword arguments, in the order of the schema; return how others refer to them.

        Each rule is of the arguments from one on, as commas stand only between them.
        """
        following, must_follow = "", False
        for number, key, is_required in reversed(_list_parameters(schema)):
            if not key.isidentifier():
                continue
            value = self._add_value(f"{rule}_{number}", schema["properties"][key], schema)
            more = f" {quote_string(', ')} {following}" if following else ""
            way = f"{quote_string(f'{key}=')} {value}" + (more if must_follow or not more else f" ({more})?")
            skipped = f" | {following}" if following and not is_required else ""
            following = self._rules.add(f"{rule}_from_{number}", way + skipped)
            must_follow |= is_required
        return following if must_follow or not following else f"{following}?"

    def _add_value(self, rule: str, each: Any, schema: Mapping[str, Any]) -> str:
        """Add the rule of a parameter's value in JSON."""
        definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        return self._rules.add_json(f"{rule}_value", {**definitions, **(each if isinstance(each, Mapping) else {})})


def _list_parameters(schema: Mapping[str, Any]) -> list[tuple[int, str, bool]]:
    """Return for each parameter its number, its name, and whether it is required."""
    required = schema.get("required", ())
    return [(number, key, key in required) for number, key in enumerate(schema.get("properties", {}))]


def _list_texts(schema: Any) -> list[str]:
    """Return the texts that are the only values of a parameter; none if it has others."""
    if not isinstance(schema, Mapping):
        return []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) and all(isinstance(value, str) for value in values) else []
