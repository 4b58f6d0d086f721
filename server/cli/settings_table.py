"""The table of every setting in Markdown: name, flag, environment variable, default, meaning.

It is made from the fields of `Settings`, in the groups of the flags, so that it always contains every setting.

`python -m server.cli.settings_table` prints the tables of docs/reference/settings.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args, get_origin

from pydantic.fields import FieldInfo

from config.flags import flag_name
from config.settings import Settings, group_settings
from config.sources import env_name
from config.units import find_unit, iter_metadata

HEADER = ("setting", "flag", "environment variable", "default", "meaning")
DEFAULT_MARK = "; default: "  # in a setting's description, the words before the description of its default

BOUNDS = {"gt": "above", "ge": "from", "lt": "below", "le": "to"}  # words for pydantic's bounds of a number


class Description(NamedTuple):
    """The default and the meaning of a setting, as they are printed in the table."""

    default: str
    meaning: str


def format_tables() -> str:
    """Return a heading and a table for each group of settings, in Markdown; tables of the settings file come last."""
    groups = group_settings()
    tables = [name for name in Settings.model_fields if not any(name in names for names in groups.values())]
    formatted = [_format_group(title, [_make_row(name, flag_name(name)) for name in groups[title]]) for title in groups]
    return "\n\n".join([*formatted, _format_group(str(Settings.model_config["title"]), map(_make_row, tables))])


def _format_group(title: str, rows: Iterable[tuple[str, ...]]) -> str:
    head = [f"### {title[0].upper()}{title[1:]}", "", _format_row(HEADER), "|---" * len(HEADER) + "|"]
    return "\n".join([*head, *map(_format_row, rows)])


def _format_row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def _make_row(name: str, flag: str | None = None) -> tuple[str, ...]:
    default, meaning = describe(Settings.model_fields[name])
    cells = f"`{name}`", f"`{flag}`" if flag else "none", f"`{env_name(name)}`", default, meaning
    return tuple(cell.replace("|", "\\|") for cell in cells)


def describe(field: FieldInfo) -> Description:
    """Return the default and the meaning of a setting.

    If the default is None, the end of the setting's description, after "; default: ", says what is used instead; if the
    description has no such end, the default is "none".
    """
    meaning, _, default = " ".join((field.description or "").split()).partition(DEFAULT_MARK)
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
    bounds = {name: getattr(part, name) for part in iter_metadata(field) for name in BOUNDS if hasattr(part, name)}
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
