"""JSON bodies: decoded at a bounded cost, and checked strictly by pydantic models, which derive from `Body`.

The cost is bounded by the number of values, which is counted before they are decoded: a mebibyte of text is decoded in
a millisecond; a mebibyte of `[],[],` takes 100 ms, and 30 MiB of memory. A list of integers is cheap, and counts as one
value, as a prompt may be many token ids. Knows neither HTTP nor any field.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin
from urllib.parse import quote

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, model_validator
from pydantic.fields import FieldInfo

from config.sources import did_you_mean

MAX_VALUES = 2**16  # most values in a body, on all levels together; decoding and checking them takes about 100 ms
MAX_INTEGERS = 2**22  # most integers in lists of a body, such as token ids; they take as long
MAX_MEMBERS = 100  # most members of an object; each may cause an error message
MAX_REPORTED_NAMES = 32  # most fields without effect that a response names
MAX_REPORTED_NAME_LENGTH = 64  # most characters of a field's name that is reported
MAX_SUGGESTIONS = 8  # most hints for unknown fields; an error shows fewer

# An escape in a string, and whether it is half of a surrogate pair without the other half
_ESCAPES = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)"
)
_INTEGER_LIST = re.compile(rb"\[,*\]")  # what is left of a list of integers without _INTEGERS
_INTEGERS = b"-0123456789 \t\r\n"


class TooManyValues(Exception):
    """A body has too many values to be decoded."""


class PathError(ValueError):
    """A value within a field is wrong; `path` leads from the field to it."""

    def __init__(self, path: tuple[str | int, ...], message: str) -> None:
        super().__init__(message)
        self.path = path


def decode(data: bytes) -> Any:
    """Decode JSON.

    Raises TooManyValues for more than MAX_VALUES values, or MAX_INTEGERS integers in lists; and msgspec.DecodeError,
    UnicodeDecodeError or RecursionError for what is not JSON.
    """
    data = data.removeprefix(codecs.BOM_UTF8)
    if len(data) > MAX_VALUES and count_values(data) > MAX_VALUES:
        limits = f"{MAX_VALUES} values, of which a list of integers is one, and {MAX_INTEGERS} integers"
        raise TooManyValues(f"at most {limits}; send less")
    return msgspec.json.decode(data)


def replace_half_pairs(data: bytes) -> bytes:
    """Return JSON with U+FFFD for half surrogate pairs: clients that cut a text within an emoji write them."""
    return _ESCAPES.sub(lambda found: rb"\ufffd" if found["half"] else found[0], data)


def count_values(data: bytes) -> int:
    """Return the number of values in valid JSON, of which a list of integers is one; MAX_VALUES + 1 for too many.

    One of `,`, `[` and `{` stands before each value but the outermost.
    """
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"")
    if plain.count(b'"') > 4 * MAX_VALUES:  # a value has at most two strings: itself, and its name
        return MAX_VALUES + 1
    outside = b'"'.join(plain.split(b'"')[::2])  # with one quote for each string
    openings, commas = outside.count(b"[") + outside.count(b"{"), outside.count(b",")
    if openings <= MAX_VALUES < openings + commas <= MAX_INTEGERS:
        outside = _INTEGER_LIST.sub(b"", outside.translate(None, _INTEGERS))
        openings, commas = outside.count(b"[") + outside.count(b"{"), outside.count(b",")
    return min(1 + openings + commas, MAX_VALUES + 1)


# ---------------------------------------------------------------- checking
@dataclass
class FieldNotes:
    """Notes made while a body is checked: fields that have no effect, and the likely names of unknown fields.

    They are the context of pydantic's validation. Names are paths without indices: `messages.refusal`.
    """

    ignore_unknown: bool = False  # otherwise they are refused
    ignored: dict[str, None] = field(default_factory=dict)  # names as an ordered set, in the order of the body
    suggestions: dict[str, str] = field(default_factory=dict)  # hint "; did you mean ...?" by unknown name

    def filter_fields(
        self,
        values: Mapping[str, Any],
        path_prefix: str,
        known: Collection[str],
        no_effect_fields: Collection[str],
        suggested: Mapping[str, str],
    ) -> dict[str, Any]:
        """Return the members of an object that are to be checked; `path_prefix` is the path before their names.

        Unknown members are included, so that the check refuses them, unless `ignore_unknown` is set. `suggested` has
        the fields that they may mean, by themselves and by other names.
        """
        effective = {}
        for name, value in values.items():
            if name in no_effect_fields or (self.ignore_unknown and name not in known):
                self.note_ignored(path_prefix + name)
            elif name not in known:
                self._note_suggestion(path_prefix, name, suggested)
            if name in known or not self.ignore_unknown:
                effective[name] = value
        return effective

    def note_ignored(self, path: str) -> None:
        """Note that a field, or a value of it, has no effect."""
        if len(self.ignored) <= MAX_REPORTED_NAMES:
            self.ignored[path[:MAX_REPORTED_NAME_LENGTH]] = None

    def _note_suggestion(self, path_prefix: str, name: str, suggested: Mapping[str, str]) -> None:
        if len(self.suggestions) < MAX_SUGGESTIONS and len(name) <= MAX_REPORTED_NAME_LENGTH:
            meant = suggested.get(name)
            hint = did_you_mean(name, suggested.values()) if meant is None else f"; did you mean {meant}?"
            self.suggestions[path_prefix + name] = hint

    @property
    def header_value(self) -> str:
        """Return the names of fields without effect as the value of an HTTP header, each quoted as in a URL."""
        names = [quote(name, safe="") for name in self.ignored]
        return ", ".join(names[:MAX_REPORTED_NAMES] + ["..."] * (len(names) > MAX_REPORTED_NAMES))


def get_field_notes(context: Any) -> FieldNotes:
    """Return the FieldNotes that are a validation's context; if it has none, new ones, which refuse unknown fields."""
    return context if isinstance(context, FieldNotes) else FieldNotes()


def limit_members(most: int) -> Callable[[Any], Any]:
    """Return a validator that refuses objects with more than `most` members before each member is checked."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"should have at most {most} members")
        return value

    return check


class RefusingValidator(AfterValidator):
    """The validator of a field that takes only values without effect: errors do not suggest the field."""


class ForgettingValidator(AfterValidator):
    """The validator of a field without effect: nothing is kept of its value."""


T = TypeVar("T")
Ignored = Annotated[T | None, ForgettingValidator(lambda _: None), Field(exclude=True)]


class Body(BaseModel):
    """A body, or an object within one: it is checked strictly, and null is the same as absent."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    path_prefix: ClassVar[str] = ""  # path of the object in a request's body, such as "messages."
    known_fields: ClassVar[tuple[str, ...]] = ()  # names of its members in JSON
    no_effect_fields: ClassVar[frozenset[str]] = frozenset()  # of its fields
    integer_fields: ClassVar[frozenset[str]] = frozenset()  # those that take a whole number written as 4.0, too
    integer_list_fields: ClassVar[frozenset[str]] = frozenset()  # those that take lists of such numbers
    foreign_names: ClassVar[Mapping[str, str]] = {}  # of its fields, by names that other endpoints have for them
    suggested_fields: ClassVar[Mapping[str, str]] = {}  # fields that may be meant, by themselves and by foreign names

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        named = {field.alias or name: field for name, field in cls.model_fields.items()}
        cls.known_fields = tuple(named)
        cls.no_effect_fields = frozenset(name for name, field in named.items() if _has_mark(field, ForgettingValidator))
        cls.integer_fields = frozenset(name for name, field in named.items() if _is_integer(field.annotation))
        cls.integer_list_fields = frozenset(name for name, field in named.items() if _has_integers(field.annotation))
        useful = [name for name, field in named.items() if not _has_mark(field, RefusingValidator)]
        cls.suggested_fields = {name: name for name in useful} | dict(cls.foreign_names)

    @model_validator(mode="before")
    @classmethod
    def _filter_fields(cls, values: Any, info: ValidationInfo) -> Any:
        """Return the members of an object that are to be checked: not those that are null or to be ignored."""
        limit_members(MAX_MEMBERS)(values)
        if not isinstance(values, dict):
            return values
        present = {key: cls._read_number(key, value) for key, value in values.items() if value is not None}
        return get_field_notes(info.context).filter_fields(
            present, cls.path_prefix, cls.known_fields, cls.no_effect_fields, cls.suggested_fields
        )

    @classmethod
    def _read_number(cls, name: str, value: Any) -> Any:
        """Return a whole number for an integer written as 4.0: JSON has one kind of numbers, and so have Lua and R."""
        takes = cls.integer_list_fields if isinstance(value, list) else cls.integer_fields
        return _read_whole_numbers(value) if name in takes else value


def _has_mark(field: FieldInfo, kind: type) -> bool:
    return any(isinstance(mark, kind) for mark in field.metadata)


def _is_integer(annotation: Any) -> bool:
    """Return whether a field takes integers and no other numbers."""
    kinds = {annotation, *get_args(annotation)}
    return int in kinds and float not in kinds


def _has_integers(annotation: Any) -> bool:
    """Return whether a field takes lists of integers, or lists of such lists, and no lists of other numbers."""
    kinds = {*_iter_kinds(annotation)}
    return {list, int} <= kinds and not kinds & {float, dict}


def _iter_kinds(annotation: Any) -> Iterator[Any]:
    """Yield the types that an annotation consists of."""
    yield get_origin(annotation) or annotation
    for each in get_args(annotation):
        yield from _iter_kinds(each)


def _read_whole_numbers(value: Any) -> Any:
    """Return a value with integers for whole numbers that are written as 4.0, and so in lists."""
    if isinstance(value, list):
        return value if {float, list}.isdisjoint(map(type, value)) else [_read_whole_numbers(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
