"""The example files load, name only options that exist, and show the actual defaults."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from cache_strategies.registry import resolve_instances
from config.settings import Settings, load_settings

EXAMPLES = sorted((Path(__file__).parents[2] / "config" / "examples").glob("*.toml"))
FULL = next(file for file in EXAMPLES if file.name == "kvmux.toml")


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_an_example_is_accepted(file: Path) -> None:
    resolve_instances(load_settings(file, {}).strategies)


def test_what_the_full_example_shows_is_accepted(tmp_path: Path) -> None:
    """With every setting, table and rule of it uncommented."""
    file = tmp_path / "kvmux.toml"
    file.write_text(re.sub(r"^# (?=\[|\w+ = )", "", FULL.read_text(), flags=re.MULTILINE))
    settings = load_settings(file, {})
    resolve_instances(settings.strategies)
    assert settings.rules[0].use == "short"


def test_the_full_example_shows_every_setting_and_its_default() -> None:
    scalars = FULL.read_text().split("There is always an instance per built-in kind")[0]
    shown = tomllib.loads("\n".join(re.findall(r"^# (\w+ = .*)$", scalars, flags=re.MULTILINE)))
    assert set(shown) == set(Settings.model_fields) - {"strategies", "rules", "key_limits"}
    for name, value in shown.items():
        default = Settings.model_fields[name].default
        assert default is None or value == default, name
