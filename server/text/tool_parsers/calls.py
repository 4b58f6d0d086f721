"""Collects the tool calls that a reader finds, as names and arguments in JSON. Knows no format.

A call is found whole, or in parts: then it is certain as soon as its arguments begin, and the parts of these follow.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from server.text.tool_parsers.source import NotACall, Reading, TextSource
from server.text.tool_parsers.values import (
    convert_quoted_text,
    convert_text,
    dump_json,
    fits_schema,
    is_tool_name,
    load_json,
)

Schemas = Mapping[str, Mapping[str, Any]]  # by a tool's name, the JSON schema of its parameters
ALPHANUMERIC = string.ascii_letters + string.digits
NAMES = ("name", "tool_name", "function")  # keys of the tool's name
ARGUMENTS = ("arguments", "parameters")  # keys of a call's arguments


class ToolCall(NamedTuple):
    """A call of a tool, or a part of one: only the first part has the id and the name.

    The message with its result names the id. `number` counts the message's calls from 0. `arguments` are JSON.
    """

    id: str
    number: int
    name: str
    arguments: str


def merge_calls(parts: Iterable[ToolCall]) -> tuple[ToolCall, ...]:
    """Return one call for each number; it is still a part if its first one is not among `parts`."""
    by_number: dict[int, list[ToolCall]] = {}
    for part in parts:
        by_number.setdefault(part.number, []).append(part)
    return tuple(each[0]._replace(arguments="".join(part.arguments for part in each)) for each in by_number.values())


def make_openai_id(name: str, index: int) -> str:
    return f"call_{secrets.token_hex(12)}"


def make_mistral_id(name: str, index: int) -> str:
    """Return nine letters and digits: Mistral's chat templates refuse other ids."""
    return "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))


def make_kimi_id(name: str, index: int) -> str:
    """Return an id with the tool's name, which Kimi's chat template takes from it."""
    return f"functions.{name}:{index}"


class Calls:
    """The tool calls of one message that were found so far."""

    def __init__(
        self,
        schemas: Schemas,
        *,
        parallel: bool = True,
        make_id: Callable[[str, int], str] = make_openai_id,
        on_call: Callable[[ToolCall], None],
    ) -> None:
        """Start with no call. Each, or each part, is given to `on_call`; without `parallel` only the first one is."""
        self.count = 0
        self.schemas = schemas
        self._parallel = parallel
        self._make_id = make_id
        self._on_call = on_call

    def add(self, name: Any, arguments: Any, *, only_known: bool = False) -> None:
        """Add a call. Raises NotACall for what cannot be one; with `only_known`, also for a name that no tool has."""
        self.add_all([(name, arguments)], only_known=only_known)

    def add_all(self, calls: Sequence[tuple[Any, Any]], *, only_known: bool = False) -> None:
        """Add several calls, pairs of name and arguments, or none of them if one raises NotACall."""
        made = []
        for name, arguments in calls:
            if not is_tool_name(name) or (only_known and name not in self.schemas):
                raise NotACall
            made.append((name, dump_json(_read_arguments(arguments))))
        for name, text in made:
            self._begin(name, text)

    def begin(self, name: str) -> None:
        """Add a call whose arguments `extend` adds in parts."""
        self._begin(name, "")

    def extend(self, arguments: str) -> None:
        """Add more JSON to the arguments of the call that was begun last."""
        if arguments and (self._parallel or self.count == 1):
            self._on_call(ToolCall("", self.count - 1, "", arguments))

    def _begin(self, name: str, arguments: str) -> None:
        if self._parallel or not self.count:
            self._on_call(ToolCall(self._make_id(name, self.count), self.count, name, arguments))
        self.count += 1

    def fits(self, name: Any, arguments: Any) -> bool:
        """Return whether these are the name of a tool and arguments whose keys and types its schema accepts.

        Raises NotACall for what cannot be arguments.
        """
        schema = self.schemas.get(name) if isinstance(name, str) else None
        return schema is not None and fits_schema(_read_arguments(arguments), schema)

    def find_other_parameters(self, name: str, without: Collection[str]) -> set[str] | None:
        """Return the names of a tool's parameters, but for some; None if its schema does not name any."""
        properties = self.schemas.get(name, {}).get("properties")
        return properties.keys() - without if isinstance(properties, Mapping) and properties else None

    def convert_quoted(self, name: str, key: str, value: Any) -> Any:
        """Return the value of a parameter of a tool whose texts are marked as such."""
        return convert_quoted_text(value, key, self.schemas.get(name, {})) if isinstance(value, str) else value

    def convert(self, name: str, key: str, text: str, *, is_json: bool = False) -> Any:
        """Return the value that a text stands for as a parameter of a tool, by its schema.

        A parameter that is not in the schema is a text, or JSON if the call says so.
        """
        return convert_text(text, key, self.schemas.get(name, {}), is_json=is_json)


Syntax: TypeAlias = Callable[[TextSource, Calls], Reading[None]]  # a reader of calls


def _read_arguments(arguments: Any) -> dict[str, Any]:
    """Return the arguments of a call as an object; some models write the object as JSON in a string, or null."""
    value = load_json(arguments or "{}") if isinstance(arguments, str) else arguments
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise NotACall
    return value


def split_call(value: Any) -> tuple[Any, Any]:
    """Return (name, arguments) of a call that is a JSON object. Raises NotACall for another value."""
    if not isinstance(value, dict):
        raise NotACall
    if isinstance(inner := value.get("function"), dict):
        return split_call(inner)
    name = next((value[key] for key in NAMES if key in value), None)
    return name, next((value[key] for key in ARGUMENTS if key in value), None)
