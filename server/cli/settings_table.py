"""The table of every setting in Markdown: name, flag, environment variable, default, meaning.

It is made from the fields of `Settings`, in the groups of the flags, so that it always contains every setting.

`python -m server.cli.settings_table` prints the tables of docs/reference/settings.md.
"""

from __future__ import annotations

import argparse
from typing import Literal, NamedTuple, get_args, get_origin

from pydantic.fields import FieldInfo

from config.settings import Settings
from config.sources import env_name, flag_name
from config.units import find_unit
from server.cli.flags import group_settings, is_scalar

HEADER = ("setting", "flag", "environment variable", "default", "meaning")
TABLES = "tables of the settings file"  # title of the group of settings that have no flag
DEFAULT_MARK = "; default: "  # in a setting's description, the words before the description of its default

BOUNDS = {"gt": "above", "ge": "from", "lt": "below", "le": "to"}  # words for pydantic's bounds of a number


class Description(NamedTuple):
    """The default and the meaning of a setting, as they are printed in the table."""

    default: str
    meaning: str


def format_tables() -> str:
    """Return a heading and a table for each group of settings, in Markdown; tables of the settings file come last."""
    groups = group_settings()
    groups[TABLES] = [name for name, field in Settings.model_fields.items() if not is_scalar(field.annotation)]
    return "\n\n".join(_format_group(title, names) for title, names in groups.items() if names)


def _format_group(title: str, names: list[str]) -> str:
    head = [f"### {title[0].upper()}{title[1:]}", "", _format_row(HEADER), "|---" * len(HEADER) + "|"]
    return "\n".join([*head, *map(_format_row, map(_make_row, names))])


def _format_row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def _make_row(name: str) -> tuple[str, ...]:
    field = Settings.model_fields[name]
    flag = f"`{flag_name(name)}`" if is_scalar(field.annotation) else "none"
    default, meaning = describe(field)
    return tuple(cell.replace("|", "\\|") for cell in (f"`{name}`", flag, f"`{env_name(name)}`", default, meaning))


def describe(field: FieldInfo) -> Description:
    """Return the default and the meaning of a setting.

    If the default is None, the end of the setting's description, after "; default: ", says what is used instead; if the
    description has no such end, the default is "none".
    """
    meaning, _, default = (field.description or "").partition(DEFAULT_MARK)
    if field.default_factory is not None:
        default = "empty"
    elif field.default is not None:
        default = f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"
    values = _describe_values(field)
    return Description(default or "none", f"{meaning} ({values})" if values else meaning)


def _describe_values(field: FieldInfo) -> str:
    """Return the values that a setting accepts, as in "a duration, above 0 to 60"; empty if any are."""
    if get_origin(field.annotation) is Literal:
        return "one of " + ", ".join(f"`{choice}`" for choice in get_args(field.annotation))
    bounds = {name: getattr(part, name) for part in field.metadata for name in BOUNDS if hasattr(part, name)}
    words = " ".join(f"{BOUNDS[name]} {_format_number(bounds[name])}" for name in BOUNDS if name in bounds)
    unit = find_unit(field)
    return ", ".join(part for part in (f"a {unit.name}" if unit else "", words) if part)


def _format_number(value: float) -> str:
    """Return a bound in digits, but a power of two from 2^20 on as "2^n"."""
    power = abs(int(value)).bit_length() - 1
    if power >= 20 and abs(value) == 2**power:
        return f"{'-' if value < 0 else ''}2^{power}"
    return f"{value:,}"


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m server.cli.settings_table", description=__doc__).parse_args()
    print(format_tables())
