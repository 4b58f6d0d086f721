"""The options that a class is checked with: its defaults, those that it declares, and smaller ones.

Texts of the checks have about 150 tokens. With default options such as `window = 512` no window would wrap and no
budget would bite, so whole numbers are scaled down together. A class may declare options itself, as `test_options`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from config.errors import SettingsError
from config.wording import explain_problem

SMALL, TINY = 20, 5  # the largest number of the scaled options
UNSCALED = 8  # numbers up to this are left as they are


class Variant(NamedTuple):
    """Options, and how they are called in a report."""

    name: str
    options: Mapping[str, Any]


def list_variants(cls: type[Any], given: Sequence[Mapping[str, Any]] = ()) -> list[Variant]:
    """Return the variants of a class with an `options_type`: those `given`, or all that its options and it declare.

    Raises SettingsError if options are wrong.
    """
    declared = getattr(cls, "test_options", ())
    if not isinstance(declared, Sequence) or not all(isinstance(options, Mapping) for options in declared):
        raise SettingsError(f"{cls.__name__}.test_options must be a list of options, such as [{{'window': 20}}]")
    wanted = [*given] or [{}, *declared]
    for options in wanted:
        check_options(cls, options)
    variants = [Variant(_describe(options), options) for options in wanted]
    if not given:
        scaled = (scale_options(cls.options_type, largest) for largest in (SMALL, TINY))
        variants += [Variant(_describe(options), options) for options in scaled if options]
    return [variant for i, variant in enumerate(variants) if variant not in variants[:i]]


def _describe(options: Mapping[str, Any]) -> str:
    return json.dumps(options, default=str) if options else "the defaults"


def check_options(cls: type[Any], options: Mapping[str, Any]) -> None:
    """Raise SettingsError if a class cannot have these options."""
    try:
        cls.options_type.model_validate(dict(options))
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"]) or "options"
        known = ", ".join(sorted(cls.options_type.model_fields)) or "none"
        message = explain_problem(where, problem)
        raise SettingsError(
            f"{cls.__name__} cannot have the options {json.dumps(options, default=str)}: {message}; its options are: "
            f"{known}"
        ) from None


def scale_options(options_type: type[BaseModel], largest: int) -> dict[str, Any]:
    """Return the defaults above UNSCALED, divided so that the largest of them is `largest`; empty if there are none.

    Numbers that the type refuses are left out.
    """
    numbers = {
        name: field.default
        for name, field in options_type.model_fields.items()
        if type(field.default) is int and field.default > UNSCALED
    }
    if not numbers or max(numbers.values()) <= largest:
        return {}
    factor = largest / max(numbers.values())
    scaled = {name: max(1, round(number * factor)) for name, number in numbers.items()}
    for left_out in (None, *scaled):
        options = {name: number for name, number in scaled.items() if name != left_out}
        try:
            options_type.model_validate(options)
        except ValidationError:
            continue
        return options
    return {}
