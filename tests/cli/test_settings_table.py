"""docs/reference/settings.md has the table of every setting, and every key of the tables of a settings file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from config.settings import KeyLimits, SelectionRule, Settings, StrategySettings
from server.cli.settings_table import describe, format_tables

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"
BEGIN = "<!-- settings: printed by python -m server.cli.settings_table -->\n"
END = "\n<!-- end of settings -->"


def test_the_page_has_the_tables() -> None:
    committed = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert committed == format_tables(), (
        "put what `python -m server.cli.settings_table` prints between the two comments of docs/reference/settings.md"
    )


def test_every_setting_has_one_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", format_tables(), flags=re.MULTILINE)
    assert sorted(rows) == sorted(Settings.model_fields)


@pytest.mark.parametrize("table", [StrategySettings, SelectionRule, KeyLimits])
def test_the_page_has_every_key_of_a_table(table: type[BaseModel]) -> None:
    named = set(re.findall(r"^\| `(\w+)`", PAGE.read_text().partition(END)[2], flags=re.MULTILINE))
    assert table.model_fields.keys() <= named


def test_values_and_defaults_of_a_setting() -> None:
    fields = Settings.model_fields
    assert describe(fields["workers"]).default == "`1`"
    assert describe(fields["workers"]).meaning.endswith(" (from 1 to 64)")
    assert describe(fields["log_prompts"]).default == "`false`"
    assert describe(fields["revision"]).default == "main", "the end of its description"
    assert describe(fields["rules"]).default == "empty"
    assert describe(fields["model_impl"]).meaning.endswith("(one of `auto`, `lean`, `transformers`)")
