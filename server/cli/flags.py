"""Settings as flags of the command line, in groups, made from the settings' own metadata. Imports nothing heavy.

Does not check values: values from all sources are checked alike, when the settings are loaded.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from config.flags import flag_name
from config.settings import Settings
from config.sources import ENV_CONFIG, env_name
from config.units import Metavar, find_unit, iter_metadata


def add_settings(parser: argparse.ArgumentParser, groups: Mapping[str, Sequence[str]]) -> None:
    """Add the flag --config, and flags for the settings in `groups`: {title of a group: names of settings}."""
    parser.add_argument("--config", metavar="FILE", help=f"path of the settings file, in TOML [{ENV_CONFIG}]")
    for title, names in groups.items():
        group = parser.add_argument_group(title)
        for name in names:
            _add_flag(group, name, Settings.model_fields[name])


def pop_settings_file(options: dict[str, Any]) -> Path | None:
    """Remove --config from the options and return its file, or that of KVMUX_CONFIG; None if neither is given."""
    file = options.pop("config", None) or os.environ.get(ENV_CONFIG)
    return Path(file) if file else None


def _add_flag(group: argparse._ArgumentGroup, name: str, field: FieldInfo) -> None:
    """Add the flag of one setting. Its value stays text, as load_settings() checks the values of all sources alike."""
    unit = find_unit(field)
    notes = [f"a {unit.name} such as {unit.examples}"] if unit else []
    notes += [f"default: {field.default}"] if field.default is not None else []
    note = f" ({'; '.join(notes)})" if notes else ""
    help_text = f"{field.description}{note} [{env_name(name)}]".replace("%", "%%")
    if field.annotation is bool:
        group.add_argument(flag_name(name), action=argparse.BooleanOptionalAction, help=help_text)
    else:
        group.add_argument(flag_name(name), metavar=_metavar(field), help=help_text)


def _metavar(field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return "{" + ",".join(map(str, get_args(field.annotation))) + "}"
    for part in iter_metadata(field):
        if isinstance(part, Metavar):
            return part.name
    if unit := find_unit(field):
        return unit.name.upper()
    parts = {getattr(part, "__origin__", part) for part in (field.annotation, *get_args(field.annotation))}
    return "N" if int in parts else "X" if float in parts else "NAME"
