"""Writes settings as TOML, the form of a settings file. `sources.py` reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any


def format_settings(settings: Mapping[str, Any]) -> str:
    """Return settings as lines, those within tables with dots in their names; None is left out."""
    return "".join(f"{key} = {_format(value)}\n" for key, value in _iter_dotted_keys(settings))


def format_tables(group: str, tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the tables [group.NAME], such as [strategies.NAME], one after the other."""
    return "\n".join(f"[{group}.{_format_key(name)}]\n{format_settings(table)}" for name, table in tables.items())


def _iter_dotted_keys(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys with their values: {"a": {"b": 1}} has the key a.b."""
    for name, value in settings.items():
        key = f"{prefix}{_format_key(name)}"
        if isinstance(value, Mapping):
            yield from _iter_dotted_keys(value, f"{key}.")
        elif value is not None:
            yield key, value


def _format_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _format(name)


def _format(value: Any) -> str:
    """Return a value as JSON, which TOML reads alike if its characters are not escaped."""
    return json.dumps(value, ensure_ascii=False)
