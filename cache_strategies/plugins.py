"""Classes by name: ours, and those that installed packages declare as entry points. Knows nothing of what they do."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import TypeVar

from config.errors import SettingsError

T = TypeVar("T")


def list_plugins(group: str, builtin: Mapping[str, str]) -> dict[str, str]:
    """Return the classes of a group by name, as "module:Class"; ours cannot be replaced."""
    return {point.name: point.value for point in entry_points(group=group)} | dict(builtin)


def load_class(name: str, known: Mapping[str, str], base: type[T], *, what: str, plural: str) -> type[T]:
    """Return the class called `name`. Raises SettingsError: it lists the names, or says what is wrong with this one."""
    if name not in known:
        raise SettingsError(f"there is no {what} {name!r}; {plural} are {', '.join(sorted(known))}")
    try:
        cls = pkgutil.resolve_name(known[name])
    except (ImportError, AttributeError) as error:
        raise SettingsError(f"{what} {name!r}: cannot load {known[name]}: {error}") from None
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise SettingsError(f"{what} {name!r}: {known[name]} is not a subclass of {base.__name__}")
    return cls
