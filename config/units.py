"""The types of settings, options and fields that are shares, durations or sizes, and may be written with a unit.

A field of such a type takes a number as before, or a text. Bounds are those of its number: `Field(gt=0)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, get_args

from pydantic import GetCoreSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from config.quantities import parse_duration, parse_proportion
from config.sizes import parse_bytes


@dataclass(frozen=True)
class Unit:
    """Marks a type whose number may be written as a text; pydantic reads that by `parse`."""

    name: str
    examples: str
    parse: Callable[[str], float]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        number = handler(source)
        either = core_schema.union_schema([number, core_schema.str_schema()])
        return core_schema.no_info_before_validator_function(self._read, number, json_schema_input_schema=either)

    def _read(self, value: Any) -> Any:
        return self.parse(value) if isinstance(value, str) else value


@dataclass(frozen=True)
class Metavar:
    """Marks a type whose values the help of a flag calls by a name: `--host ADDRESS`."""

    name: str


Proportion = Annotated[float, Unit("share", "25% or 0.25", parse_proportion)]
"""A share of a whole, as a number from 0 to 1."""

Duration = Annotated[float, Unit("duration", "30, 30s or 10m", parse_duration)]
"""A number of seconds."""

Size = Annotated[int, Unit("size", "1024, 512KiB or 2MiB", parse_bytes)]
"""A number of bytes."""


def find_unit(field: FieldInfo) -> Unit | None:
    """Return the unit of a field's type, which may be one of several alternatives; None if it has none."""
    return next((part for part in iter_metadata(field) if isinstance(part, Unit)), None)


def iter_metadata(field: FieldInfo) -> Iterator[Any]:
    """Yield what the type of a field, or one of its alternatives, is annotated with: bounds, a unit, a metavar."""
    alternatives = (getattr(part, "__metadata__", ()) for part in get_args(field.annotation))
    for part in chain(field.metadata, *alternatives):
        yield from part.metadata if isinstance(part, FieldInfo) else (part,)
