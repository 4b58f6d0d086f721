"""Presets: ready choices of a cache strategy and its options, by name.

`kvmux serve --preset NAME` serves requests that name no instance under a preset. `[strategies.x] preset = NAME`
declares an instance with its options, which the table may override.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

PresetName = Literal["exact", "small", "long"]


class Preset(NamedTuple):
    """A kind of strategy with options, as in a table `[strategies.x]`, and a description of what it does."""

    description: str
    settings: Mapping[str, Any]


PRESETS: Mapping[str, Preset] = {
    "exact": Preset("keys and values as the model computes them", {"kind": "paged"}),
    "small": Preset(
        "keys in 8 bits and values in 4, with shared prefixes; 0.4 of the memory of bfloat16",
        {"kind": "paged", "k_dtype": "int8", "v_dtype": "int4"},
    ),
    "long": Preset(
        "like small, and each decoded token reads only the blocks that matter most to it; for long contexts",
        {"kind": "quest", "k_dtype": "int8", "v_dtype": "int4"},
    ),
}
assert {*PRESETS} == {*get_args(PresetName)}


def apply_preset(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table of settings, with those that its preset adds.

    Raises ValueError if there is no such preset, or if the table names another kind.
    """
    settings = dict(given)
    name = settings.pop("preset", None)
    if name is None:
        return settings
    if name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}; presets are {', '.join(PRESETS)}")
    preset = PRESETS[name].settings
    if settings.get("kind", preset["kind"]) != preset["kind"]:
        raise ValueError(f"preset {name!r} is of kind {preset['kind']!r}; leave out kind, or the preset")
    return {**preset, **settings}
