"""Adapts a client's JSON schema to what llguidance reads, so that no text is written that the schema refuses.

llguidance reads all numbers as float64, turns bounds of integers into int64, refuses formats that it does not know
(which are annotations by the standard), members that are null (which Go and C# write for what is empty), keywords that
restrict nothing and lengths written as 2.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from config.wording import format_value
from server.grammar.schema_numbers import SchemaError, adapt_bounds, check_exact
from server.grammar.schema_references import Resource, Resources, enter_resource, escape_reference, find_targets

MAX_DEPTH = 128  # most objects and arrays within each other in a schema; llguidance reads hardly more
# The formats that llguidance knows
FORMATS = frozenset(
    {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)

OF_NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
OF_LISTS = frozenset({"anyOf", "allOf", "oneOf", "prefixItems"})
OF_SCHEMAS = frozenset({"items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains"})
CONTAINERS = frozenset({"$defs", "definitions"})  # what no reference points at in them may be anything
MAY_BE_NULL = frozenset({"const", "default", "example", "examples"})  # members whose null is a value
LENGTHS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"})

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})

Note = Callable[[str], None]


def adapt_schema(schema: Any, note_ignored: Note = lambda _: None) -> Any:
    """Return the adapted schema, an object or a boolean; `note_ignored` gets each format that has no effect.

    Bounds that float64 or int64 cannot hold are moved inwards, which leaves out a few numbers or those beyond 64 bits.
    Raises SchemaError for a schema that is nested too deeply, has a type that JSON does not have or null for a schema,
    and for numbers that would not be written as they are.
    """
    check_depth(schema)
    return _Adapter(schema, note_ignored).adapt()


def check_depth(schema: Any) -> None:
    """Raise SchemaError for a schema that is nested too deeply to be written as JSON, however full the stack is."""
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH + 1):
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return
        level = [value for each in level for value in (each.values() if isinstance(each, dict) else each)]
    raise SchemaError("the schema is nested too deeply; move parts of it into $defs")


class _Place(NamedTuple):
    """A schema within the document, the keys that lead there, and the resources around it."""

    schema: Any
    path: tuple[str, ...]
    resources: Resources


class _Adapter:
    """Adapts all schemas of a document: those that keywords hold, and what references (`$ref`) point at."""

    def __init__(self, schema: Any, note_ignored: Note) -> None:
        self._document = _copy(schema)  # adapted in place
        self._note_ignored = note_ignored
        self._adapted: dict[int, Any] = {}  # the schemas that were adapted, by their id()
        self._values: dict[int, Any] = {}  # objects and arrays in values of const and enum, by their id()
        self._named: dict[str, Resource] = {}  # by their URI
        self._references: list[tuple[str, _Place]] = []  # each with the schema that has it
        self._found: set[tuple[str, int]] = set()  # references, each with the id() of the resource around it

    def adapt(self) -> Any:
        """Return the document, adapted."""
        self._adapt_from(_Place(self._document, (), (Resource(self._document, (), ""),)))
        for reference, place in self._references:  # the list grows
            for target in find_targets(reference, place.resources, self._named):
                _check_schema(target.schema, target.path)
                self._adapt_from(_Place(*target))
        if self._adapted.keys() & self._values.keys():
            raise SchemaError("a $ref points into a value of const or enum, which is no schema")
        return self._document

    def _adapt_from(self, place: _Place) -> None:
        """Adapt a schema, and those that keywords hold in it."""
        waiting = [place]
        while waiting:
            place = waiting.pop()
            if isinstance(place.schema, dict) and id(place.schema) not in self._adapted:
                self._adapted[id(place.schema)] = place.schema
                waiting += reversed(list(self._adapt_one(place)))

    def _adapt_one(self, place: _Place) -> Iterator[_Place]:
        """Adapt the members of a schema that are no schemas; yield those that are."""
        schema, path = place.schema, place.path
        place = place._replace(resources=enter_resource(schema, path, place.resources))
        self._named.setdefault(place.resources[-1].uri, place.resources[-1])
        self._drop_members(schema)
        for key, value in list(schema.items()):
            inner = (*path, key)
            if key in ("const", "enum"):
                check_exact(value, *inner)
                self._values |= {id(each): each for each in _iter_containers(value)}
            elif key == "type":
                _check_type(value, inner)
            elif key in LENGTHS and isinstance(value, float) and value.is_integer():
                schema[key] = int(value)
            elif key == "$ref" and isinstance(value, str):
                schema[key] = escape_reference(value)
                self._note_reference(schema[key], place)
            else:
                yield from (place._replace(schema=each, path=at) for each, at in _iter_schemas(key, value, inner))
        schema |= adapt_bounds(schema, *path)

    def _drop_members(self, schema: dict[str, Any]) -> None:
        """Drop the members of a schema that have no effect, and that llguidance refuses."""
        for key in [key for key, value in schema.items() if value is None and key not in MAY_BE_NULL]:
            del schema[key]
        if isinstance(name := schema.get("format"), str) and name not in FORMATS:
            self._note_ignored(f"format: {name}")
            del schema["format"]
        for key in [key for key in schema if restricts_nothing(key, schema)]:
            del schema[key]

    def _note_reference(self, reference: str, place: _Place) -> None:
        found = (reference, id(place.resources[-1].schema))
        if found not in self._found:
            self._found.add(found)
            self._references.append((reference, place))


def _copy(value: Any) -> Any:
    """Return a copy in which no two members are the same object."""
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    return [_copy(each) for each in value] if isinstance(value, list) else value


def _iter_containers(value: Any) -> Iterator[Any]:
    """Yield all objects and arrays in a value, and the value itself if it is one."""
    if isinstance(value, dict | list):
        yield value
        for each in value.values() if isinstance(value, dict) else value:
            yield from _iter_containers(each)


def _check_type(value: Any, path: tuple[str, ...]) -> None:
    for name in value if isinstance(value, list) else [value]:
        if not isinstance(name, str) or name not in TYPES:
            names = ", ".join(sorted(TYPES))
            raise SchemaError(f"{format_value(name)} is no type of JSON; the types are {names}", *path)


def _iter_schemas(key: str, value: Any, path: tuple[str, ...]) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Yield the schemas that a keyword holds, and the keys that lead there. Raises SchemaError if one is none."""
    if key in OF_NAMES and isinstance(value, dict):
        members = [(each, (*path, name)) for name, each in value.items()]
    elif key in OF_LISTS | OF_SCHEMAS and isinstance(value, list):
        members = [(each, (*path, str(index))) for index, each in enumerate(value)]
    else:
        members = [(value, path)] if key in OF_SCHEMAS else []
    for each, at in members:
        if key not in CONTAINERS:
            _check_schema(each, at)
        yield each, at


def _check_schema(value: Any, path: tuple[str, ...]) -> None:
    if not isinstance(value, dict | bool):
        raise SchemaError(f"should be a schema (an object, true or false), not {format_value(value)}", *path)


# ---------------------------------------------------------------- keywords that restrict nothing
def restricts_nothing(key: str, schema: Mapping[str, Any]) -> bool:
    """Return whether a schema accepts the same without this keyword, of those that llguidance refuses."""
    value = schema[key]
    match key:
        case "uniqueItems" | "not":
            return value is False
        case "$dynamicAnchor" | "$recursiveAnchor":  # llguidance refuses the references that look for them
            return True
        case "propertyNames":  # names are strings
            return _accepts_all(value) or _accepts_all(_without_type(value, "string"))
        case "unevaluatedProperties" | "unevaluatedItems":
            return _accepts_all(value)
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return isinstance(value, dict) and all(each == [] or _accepts_all(each) for each in value.values())
        case "contains":
            return schema.get("minContains") == 0 and "maxContains" not in schema
        case "minContains" | "maxContains":
            return "contains" not in schema or restricts_nothing("contains", schema)
        case "if":
            return all(_accepts_all(schema.get(branch, True)) for branch in ("then", "else"))
        case "then" | "else":
            return "if" not in schema or restricts_nothing("if", schema)
    return False


def _accepts_all(schema: Any) -> bool:
    return schema is True or (isinstance(schema, dict) and schema.keys() <= ANNOTATIONS)


def _without_type(schema: Any, name: str) -> Any:
    """Return a schema without its type if that is this one alone."""
    if isinstance(schema, dict) and schema.get("type") in (name, [name]):
        return {key: value for key, value in schema.items() if key != "type"}
    return schema
