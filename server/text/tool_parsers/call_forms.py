"""The form of a family's tool calls as they are written: to begin a call in a prompt, and to constrain one.

`make_call_grammar` is for `tool_choice` "required", a named tool, and tools with `strict`: it returns a grammar in the
language of llguidance that admits nothing but calls whose arguments fit their schemas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from server.text.tool_parsers.calls import Schemas
from server.text.tool_parsers.values import find_types


@dataclass(frozen=True)
class CallForm:
    """How a family writes a call, or for `list` several: `before`, the call, `after`.

    object  a JSON object with the name and, under the key `arguments`, the arguments
    list    a list of such objects
    named   the name, `name_end`, the arguments in JSON
    tagged  the name, `name_end`, and for each argument the texts of `parameter`: before its key, before and after its
            value. Texts are written as they are, other values in JSON.
    python  a list of calls in Python
    """

    kind: Literal["object", "list", "named", "tagged", "python"]
    before: str
    after: str = ""
    name_end: str = ""
    arguments: str = "arguments"
    parameter: tuple[str, str, str] = ("", "", "")

    def begin(self, name: str | None) -> str:
        """Return the text with which a message calls a tool, up to its name; if that is given, up to the arguments."""
        if self.kind in ("object", "list"):
            key = "" if name is None else f'{name}", "{self.arguments}": '
            return f'{self.before}{"[" if self.kind == "list" else ""}{{"name": "{key}'
        return self.before if name is None else f"{self.before}{name}{self.name_end}"

    def write_list(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Return calls, objects with name and arguments, as text."""
        assert self.kind == "list", "only lists are written into prompts"
        listed = [{"name": call["name"], self.arguments: call["arguments"]} for call in calls]
        return self.before + json.dumps(listed, ensure_ascii=False) + self.after


def make_call_grammar(
    form: CallForm, schemas: Schemas, *, parallel: bool, token_id: Callable[[str], int | None], markers: Iterable[str]
) -> str | None:
    """Return a grammar of messages that are calls of these tools; None if the form has none.

    `token_id` returns the id of a marker that is a special token, which the grammar then names instead of its text.
    Without `parallel` there is one call.
    """
    if form.kind == "python":
        return None
    writer = _GrammarWriter(form, {marker: token_id(marker) for marker in markers})
    calls = " | ".join(writer.add_call(number, name, schema) for number, (name, schema) in enumerate(schemas.items()))
    if form.kind == "list":
        more = ' (", " call)*' if parallel else ""
        start = f"{writer.quote(form.before + '[')} call{more} {writer.quote(']' + form.after)}"
    else:
        start = "call (SPACE call)*" if parallel else "call"
    return "\n".join([f"start: {start}", f"call: {calls}", r"SPACE: /[ \n]*/", *writer.rules]) + "\n"


class _GrammarWriter:
    """Writes the rules of a grammar."""

    def __init__(self, form: CallForm, special: Mapping[str, int | None]) -> None:
        self.rules: list[str] = []
        self._form = form
        self._special = {text: token for text, token in special.items() if token is not None}

    def quote(self, text: str) -> str:
        """Return a text as strings of the grammar, and special tokens."""
        if not self._special:
            return json.dumps(text, ensure_ascii=False) if text else ""
        parts = re.split(f"({'|'.join(map(re.escape, sorted(self._special, key=len, reverse=True)))})", text)
        quoted = [
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        ]
        return " ".join(quoted)

    def add_call(self, number: int, name: str, schema: Mapping[str, Any]) -> str:
        """Add the rule of a tool's call; return its name."""
        form, rule = self._form, f"call_{number}"
        if form.kind == "tagged":
            return self._add_tagged_call(rule, name, schema)
        self._add_json(f"{rule}_arguments", {"type": "object", **schema})
        before, after = form.before + name + form.name_end, form.after
        if form.kind in ("object", "list"):
            before = f'{{"name": {json.dumps(name)}, "{form.arguments}": '
            before, after = (form.before + before, "}" + form.after) if form.kind == "object" else (before, "}")
        self.rules.append(f"{rule}: {self.quote(before)} {rule}_arguments {self.quote(after)}")
        return rule

    def _add_tagged_call(self, rule: str, name: str, schema: Mapping[str, Any]) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", ())
        parts = [self.quote(self._form.before + name + self._form.name_end)]
        for number, (key, each) in enumerate(properties.items()):
            parameter = self._add_parameter(f"{rule}_{number}", key, each, schema)
            parts.append(parameter if key in required else f"{parameter}?")
        self.rules.append(f"{rule}: {' '.join(parts)} {self.quote(self._form.after)}")
        return rule

    def _add_parameter(self, rule: str, key: str, each: Any, schema: Mapping[str, Any]) -> str:
        opening, key_end, closing = self._form.parameter
        if find_types(each, schema) <= {"string"}:
            stop = json.dumps(closing, ensure_ascii=False)
            self.rules.append(f"{rule}_value[suffix={stop}]: /(.|\\n)*/")
            self.rules.append(f"{rule}: {self.quote(opening + key + key_end)} {rule}_value")
        else:
            definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
            self._add_json(f"{rule}_value", {**definitions, **(each if isinstance(each, Mapping) else {})})
            self.rules.append(f"{rule}: {self.quote(opening + key + key_end)} {rule}_value {self.quote(closing)}")
        return rule

    def _add_json(self, rule: str, schema: Mapping[str, Any]) -> None:
        self.rules.append(f"{rule}: %json {json.dumps(schema, ensure_ascii=False)}")
