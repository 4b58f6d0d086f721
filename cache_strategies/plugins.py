"""Loads classes by name: built-in ones, and those that installed packages declare as entry points (plug-ins).

Does not know what the classes do.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TypeVar

from config.errors import SettingsError

T = TypeVar("T")

HOW_TO_FIND = "run the command in the folder that has it, set PYTHONPATH to that folder, or install its package"


class MissingClassError(SettingsError):
    """The module of a class is neither installed nor in the current folder, or has no class of that name."""


def list_plugins(group: str, builtin: Mapping[str, str]) -> dict[str, str]:
    """Return the classes of an entry-point group by name, as "module:Class"; built-in names take precedence."""
    return {point.name: point.value for point in entry_points(group=group)} | dict(builtin)


def load_plugin(name: str, group: str, builtin: Mapping[str, str], base: type[T], *, what: str, plural: str) -> type[T]:
    """Return the class of a built-in or installed plug-in of an entry-point group, or "module:Class", as load_class."""
    # entry points are slow to read, so they are read only for a name that is not a built-in one
    known = builtin if name in builtin or ":" in name else list_plugins(group, builtin)
    return load_class(name, known, base, what=what, plural=plural)


def load_class(name: str, known: Mapping[str, str], base: type[T], *, what: str, plural: str) -> type[T]:
    """Import and return the class of a name; `known` maps names to "module:Class", which may also be given itself.

    A module that is given itself may be in the current folder. `what` and `plural` say in error messages what the
    classes are. Raises SettingsError if the name is unknown, or if the class cannot be imported or is not a subclass of
    `base`; MissingClassError if there is no such module or class.
    """
    place = name if ":" in name else known.get(name)
    if place is None:
        raise SettingsError(
            f"there is no {what} {name!r}; {plural} are {', '.join(sorted(known))}. Install the package of one of your "
            "own, or name its class as module:Class"
        )
    package = place.partition(":")[0].partition(".")[0]
    try:
        if ":" in name and find_spec(package) is None:
            sys.path.append(os.getcwd())  # last, so that the folder's modules hide no others
        cls = pkgutil.resolve_name(place)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise SettingsError(f"{what} {name!r}: cannot load {place}: {error}") from None
        raise MissingClassError(f"{what} {name!r}: cannot load {place}: {error}; {HOW_TO_FIND}") from None
    except (ImportError, AttributeError, ValueError) as error:
        if isinstance(error, AttributeError) and getattr(error.obj, "__name__", "") == place.partition(":")[0]:
            raise MissingClassError(f"{what} {name!r}: cannot load {place}: {error}") from None
        raise SettingsError(f"{what} {name!r}: cannot load {place}: {error}") from None
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise SettingsError(f"{what} {name!r}: {place} is not a subclass of {base.__name__}")
    return cls
