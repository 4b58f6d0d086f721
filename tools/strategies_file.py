"""Writes the strategy instances of a settings file, for tools that start a server with certain instances."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any


def format_strategies(instances: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the tables [strategies.NAME] of a TOML file: kind and options of each instance; None is left out."""
    tables = (f"[strategies.{json.dumps(name)}]\n{_format_table(options)}" for name, options in instances.items())
    return "\n".join(tables)


def _format_table(options: Mapping[str, Any]) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in _iter_dotted_keys(options))


def _iter_dotted_keys(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys with their values: {"a": {"b": 1}} has the key "a"."b"."""
    for name, value in options.items():
        key = f"{prefix}{json.dumps(name)}"
        if isinstance(value, Mapping):
            yield from _iter_dotted_keys(value, f"{key}.")
        elif value is not None:
            yield key, value
