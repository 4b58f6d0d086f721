"""Options of a command as a dataclass whose fields are flags, so that each is stated once; and flags that are numbers.

Imports only the standard library, as `loadtest` does. The flags of settings follow from the settings (server/cli).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from config.quantities import parse_duration_flag

Number = TypeVar("Number", int, float)


class Kind(NamedTuple):
    """What a flag takes: how help calls it, and how its text is parsed."""

    metavar: str
    parse: Callable[[str], Any] = str


def number_flag(kind: type[Number], noun: str, allows: Callable[[Number], bool]) -> Callable[[str], Number]:
    """Return a parser of flags that are a number of a kind; it raises ArgumentTypeError for one that is not allowed."""

    def parse(text: str) -> Number:
        try:
            if allows(number := kind(text)):
                return number
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r} is not {noun}")

    return parse


parse_count_flag = number_flag(int, "a whole number above 0", lambda count: count > 0)

COUNT = Kind("N", parse_count_flag)
DURATION = Kind("DURATION", parse_duration_flag)
FILE = Kind("FILE", Path)
SWITCH = Kind("")  # an option that is true or false


def flag(default: Any, kind: Kind, help: str, *, exclusive: bool = False, repr: bool = True, **how: Any) -> Any:
    """Return a field of a dataclass of options, which `add_flags` makes a flag; `how` has arguments of `add_argument`.

    At most one of the options that are exclusive can be given. The help ends with the default, unless that is None,
    empty or a truth value, or the text names it.
    """
    if kind is SWITCH:
        how["action"] = argparse.BooleanOptionalAction if default else "store_true"
    else:
        how |= {"metavar": kind.metavar, "type": kind.parse}
        if default and "(default: " not in help:
            help += f" (default: {f'{default:g}' if isinstance(default, float) else default})"
    return field(default=default, repr=repr, metadata={"exclusive": exclusive, "how": how | {"help": help}})


def flag_name(option: str) -> str:
    """Return the command-line flag of an option or a setting, such as --port."""
    return "--" + option.replace("_", "-")


def format_flags(options: Any) -> list[str]:
    """Return the arguments that give the options of a dataclass, without those that have their defaults."""
    arguments: list[str] = []
    for option in fields(options):
        value = getattr(options, option.name)
        if value != option.default:
            appends = option.metadata["how"].get("action") == "append"
            arguments += [part for each in (value if appends else [value]) for part in format_flag(option.name, each)]
    return arguments


def format_flag(name: str, value: Any) -> list[str]:
    """Return the arguments that give an option or a setting a value, or each of a list of values."""
    if isinstance(value, bool):
        return [flag_name(name if value else f"no_{name}")]
    return [flag_name(name), *map(str, value if isinstance(value, list | tuple) else [value])]


def add_flags(parser: argparse.ArgumentParser, title: str, options: type[Any]) -> None:
    """Add a flag for each field of a dataclass, in a group with a title."""
    group = parser.add_argument_group(title)
    exclusive = group.add_mutually_exclusive_group()
    for option in fields(options):
        target = exclusive if option.metadata["exclusive"] else group
        target.add_argument(flag_name(option.name), **option.metadata["how"])
