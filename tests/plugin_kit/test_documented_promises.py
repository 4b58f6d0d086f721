"""docs/guide/writing_a_strategy.md lists every promise of strategies and scorers, in the words of the report."""

from __future__ import annotations

import re
from pathlib import Path

from plugin_kit.scorers.promises import PROMISES as SCORER_PROMISES
from plugin_kit.strategies import PROMISES

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "writing_a_strategy.md").read_text()
TABLES = [
    dict(re.findall(r"^\| (.*?) \| (.*?) \|$", table, re.MULTILINE))
    for table in re.findall(r"\| promise \| what holds \|\n\|---\|---\|\n((?:\|.*\n)+)", PAGE)
]


def test_the_tables_are_those_of_the_report() -> None:
    strategies, scorers = TABLES
    assert strategies == {each.name: each.expected for each in PROMISES}
    assert scorers == {each.name: each.expected for each in SCORER_PROMISES if not each.name.startswith("under ")}


def test_every_promise_has_a_name_of_its_own() -> None:
    for promises in (PROMISES, SCORER_PROMISES):
        names = [each.name for each in promises]
        assert len({*names}) == len(names)
