"""Loads classes by name: built-in ones, and those that installed packages declare as entry points (plug-ins).

Does not know what the classes do.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import TypeVar

from config.errors import SettingsError

T = TypeVar("T")


def list_plugins(group: str, builtin: Mapping[str, str]) -> dict[str, str]:
    """Return the classes of an entry-point group by name, as "module:Class"; built-in names take precedence."""
    return {point.name: point.value for point in entry_points(group=group)} | dict(builtin)


def load_class(name: str, known: Mapping[str, str], base: type[T], *, what: str, plural: str) -> type[T]:
    """Import and return the class of a name; `known` maps names to "module:Class".

    `what` and `plural` say in error messages what the classes are. Raises SettingsError if the name is unknown, or if
    the class cannot be imported or is not a subclass of `base`.
    """
    if name not in known:
        raise SettingsError(f"there is no {what} {name!r}; {plural} are {', '.join(sorted(known))}")
    try:
        cls = pkgutil.resolve_name(known[name])
    except (ImportError, AttributeError) as error:
        raise SettingsError(f"{what} {name!r}: cannot load {known[name]}: {error}") from None
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise SettingsError(f"{what} {name!r}: {known[name]} is not a subclass of {base.__name__}")
    return cls
