"""Loads classes by name: built-in ones, and those that installed packages declare as entry points.

Knows nothing of what the classes do.
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
    """Return the class `name` of `known`. Raises SettingsError if it is unknown, or is not a subclass of `base`.

    `what` and `plural` name the kind of class in error messages.
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
