"""JSON bodies: decoded at a bounded cost, and checked strictly by pydantic models, which derive from `Body`.

The cost is bounded by the number of values, which is counted before they are decoded: a mebibyte of text is decoded in
a millisecond; a mebibyte of `[],[],` takes 100 ms, and 30 MiB of memory. So the members of an object are first
separated without decoding them; then the values of those that have an effect are counted and decoded. Ignored members
must be JSON, too, but their numbers may be out of range. Knows neither HTTP nor any field.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, ClassVar, get_args, get_origin
from urllib.parse import quote

import msgspec
from msgspec import Raw
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, model_validator
from pydantic.fields import FieldInfo
from typing_extensions import Buffer  # in collections.abc from Python 3.12 on

from config.sources import did_you_mean

MAX_VALUES = 2**16  # most values in a body, on all levels together; decoding and checking them takes about 100 ms
MAX_MEMBERS = 100  # most members of an object, repeated names included; each may cause an error message
SLICE = 2**16  # bytes of JSON that are scanned at a time
MAX_REPORTED_NAMES = 32  # most fields without effect that a response names
MAX_REPORTED_NAME_LENGTH = 64  # most characters of a field's name that is reported
MAX_SUGGESTIONS = 8  # most hints for unknown fields; an error shows fewer


class ReadAs(Enum):
    """How the value of a field is decoded."""

    VALUE = auto()
    IGNORED = auto()  # not decoded, but replaced by an empty value of its type
    TOKEN_IDS = auto()  # decoded in one pass if it is a long list of integers, or of lists of them


@dataclass(frozen=True)
class DecodedIds:
    """A long list of integers, or of lists of integers, that the decoder has checked item by item."""

    ids: list[Any]
    nested: bool

    def flatten(self) -> list[int]:
        """Return the integers. Raises ValueError if they are in lists within the list."""
        if self.nested:
            raise ValueError("should be one list of token ids")
        return self.ids


# An escape in a string, and whether it is half of a surrogate pair without the other half
_ESCAPES = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)"
)


class TooManyValues(Exception):
    """The JSON has too many values to be decoded: in `field`, or in the whole object if `field` is None."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class PathError(ValueError):
    """A value within a field is wrong; `path` leads from the field to it."""

    def __init__(self, path: tuple[str | int, ...], message: str) -> None:
        super().__init__(message)
        self.path = path


class _Name(str):
    """The name of a member: a type of its own, so that the decoder calls `dec_hook` for each name."""


def decode(data: bytes, fields: Mapping[str, ReadAs]) -> Any:
    """Decode a JSON object as `fields` says; other fields, and JSON that is not an object, become empty values.

    Raises TooManyValues for more than MAX_VALUES values or MAX_MEMBERS members, and msgspec.DecodeError,
    UnicodeDecodeError or RecursionError for what is not JSON.
    """
    data = data.removeprefix(codecs.BOM_UTF8)
    _check_utf8(data)
    try:
        found = _decode_members(data)
    except msgspec.ValidationError:  # the data is JSON, but not an object
        return _make_empty_value(msgspec.json.decode(data, type=Raw))
    few = len(data) <= MAX_VALUES
    left = MAX_VALUES
    values: dict[str, Any] = {}
    for name, raw in found.items():
        field = fields.get(name, ReadAs.IGNORED)
        if field is ReadAs.IGNORED:
            values[name] = _make_empty_value(raw)
        elif field is ReadAs.TOKEN_IDS and not few and (ids := _decode_token_ids(bytes(raw))) is not None:
            values[name] = ids
        else:
            left -= 0 if few else count_values(raw)
            if left < 0:
                raise TooManyValues(f"has too many values: a request may have at most {MAX_VALUES}; send less", name)
            values[name] = msgspec.json.decode(raw)
    return values


def replace_half_pairs(data: bytes) -> bytes:
    """Return JSON with U+FFFD for half surrogate pairs: clients that cut a text within an emoji write them."""
    return _ESCAPES.sub(lambda found: rb"\ufffd" if found["half"] else found[0], data)


def count_values(data: Buffer) -> int:
    """Return the number of values in valid JSON; counting stops above MAX_VALUES."""
    values, in_string = 1, False
    for piece in _iter_slices(memoryview(data)):
        parts = piece.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        values += _count_separators(b"".join(parts[in_string::2]))
        in_string ^= len(parts) % 2 == 0
        if values > MAX_VALUES:
            break
    return values


def _iter_slices(data: memoryview) -> Iterator[bytes]:
    """Yield the data in pieces of about SLICE bytes that do not end within an escape sequence."""
    start = 0
    while start < len(data):
        piece = bytes(data[start : start + SLICE])
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = bytes(data[start : start + SLICE + 1])
        start += len(piece)
        yield piece


def _count_separators(data: bytes) -> int:
    """Return how often `,`, `[` and `{` occur: one of them stands before each value but the outermost."""
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def _check_utf8(data: bytes) -> None:
    """Raise UnicodeDecodeError for bad UTF-8; the decoder looks only at the strings that it decodes."""
    if data.isascii():
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(data), SLICE):
        decoder.decode(data[start : start + SLICE])
    decoder.decode(b"", final=True)


def _decode_members(data: bytes) -> dict[str, Raw]:
    """Return a JSON object's members by name, with values still encoded; of members with the same name the last."""
    count = 0

    def count_name(_: type, text: str) -> _Name:
        nonlocal count
        count += 1
        if count > MAX_MEMBERS:
            raise TooManyValues(f"should have at most {MAX_MEMBERS} members")
        return _Name(text)

    found = msgspec.json.decode(data, type=dict[_Name, Raw], dec_hook=count_name)
    return {str(name): raw for name, raw in found.items()}


def _make_empty_value(raw: Raw) -> Any:
    """Return an empty value of the same JSON type: {}, [], "", null, false, or 0 for a number."""
    match memoryview(raw)[:1].tobytes():
        case b"{":
            return {}
        case b"[":
            return []
        case b'"':
            return ""
        case b"n":
            return None
        case b"t" | b"f":
            return False
    return 0


def _decode_token_ids(data: bytes) -> DecodedIds | None:
    """Return the integers of a JSON list, or of a list of lists; None for other JSON, or more than MAX_VALUES lists."""
    if not data.startswith(b"[") or b'"' in data or not 0 < (lists := data.count(b"[")) <= MAX_VALUES:
        return None
    nested = lists > 1
    try:
        return DecodedIds(msgspec.json.decode(data, type=list[list[int]] if nested else list[int]), nested)
    except msgspec.ValidationError:
        return None


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
        fields = get_read_modes(cls)
        cls.known_fields = tuple(fields)
        cls.no_effect_fields = frozenset(name for name, how in fields.items() if how is ReadAs.IGNORED)
        named = {field.alias or name: field for name, field in cls.model_fields.items()}
        cls.integer_fields = frozenset(name for name, field in named.items() if _is_integer(field.annotation))
        cls.integer_list_fields = frozenset(name for name, field in named.items() if _has_integers(field.annotation))
        useful = [name for name, field in named.items() if not _is_refusing(field)]
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
        if isinstance(value, list) and name in cls.integer_list_fields:
            return [_read_whole_numbers(each) for each in value]
        return _read_whole_numbers(value) if type(value) is float and name in cls.integer_fields else value


def get_read_modes(body: type[Body] | None) -> dict[str, ReadAs]:
    """Return for each field of a model, by its name in JSON, how its value is decoded."""
    fields = {} if body is None else body.model_fields
    return {field.alias or name: _get_read_mode(field) for name, field in fields.items()}


def _get_read_mode(field: FieldInfo) -> ReadAs:
    return next((mark for mark in field.metadata if isinstance(mark, ReadAs)), ReadAs.VALUE)


def _is_refusing(field: FieldInfo) -> bool:
    return any(isinstance(mark, RefusingValidator) for mark in field.metadata)


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
    """Return a value with integers for whole numbers that are written as 4.0, and so in a list."""
    if isinstance(value, list):
        return [_read_whole_numbers(each) for each in value] if float in map(type, value) else value
    return int(value) if isinstance(value, float) and value.is_integer() else value
