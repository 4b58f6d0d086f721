"""The example files load, name only options that exist, and show the actual defaults."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from cache_strategies.registry import resolve_instances
from config.settings import Settings, load_settings

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "config" / "examples").glob("*.toml"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
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
    scalars = FULL.read_text().split("There are always three instances")[0]
    shown = tomllib.loads("\n".join(re.findall(r"^# (\w+ = .*)$", scalars, flags=re.MULTILINE)))
    assert set(shown) == set(Settings.model_fields) - {"strategies", "rules", "rollouts", "key_limits"}
    for name, value in shown.items():
        default = Settings.model_fields[name].default
        assert default is None or value == default, name


BOARDS = ROOT / "docs" / "laboratory" / "boards"  # whose blocks are to be chosen from


def find_settings(page: Path) -> list[str]:
    """Return the settings in TOML that a page shows, as files: one after the other, or each alone."""
    blocks = re.findall(r"^```toml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    blocks = [block for block in blocks if "[project" not in block]  # those are of a pyproject.toml
    return blocks if BOARDS in page.parents or not blocks else ["".join(blocks)]


@pytest.mark.parametrize("page", [page for page in PAGES if find_settings(page)], ids=lambda page: page.stem)
def test_settings_in_a_document_are_accepted(page: Path, tmp_path: Path) -> None:
    file = tmp_path / "kvmux.toml"
    for settings in find_settings(page):
        file.write_text(settings)
        resolve_instances(load_settings(file, {}).strategies)
