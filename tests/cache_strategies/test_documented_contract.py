"""docs/guide/strategy_contract.md says of each field of a contract what reads it and what checks it."""

from __future__ import annotations

import re
from pathlib import Path

from cache_strategies.types import CacheUsage, Contract

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guide" / "strategy_contract.md").read_text()
SECTION = PAGE.partition("## The contract\n")[2].partition("\n## ")[0]
LINES = [line for line in SECTION.splitlines() if line.startswith("| `")]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES]


def test_the_table_has_each_field_of_a_contract_and_no_other() -> None:
    fields = [row for row in ROWS if len(row) == 4]
    assert [row[0].strip("`") for row in fields] == list(Contract._fields)
    assert all(all(row) for row in fields)


def test_the_tests_and_values_that_the_tables_name_exist() -> None:
    for name in re.findall(r"\b(?:test_|random_)\w+\.py", SECTION):
        assert list((ROOT / "tests").rglob(name)), name
    used = next(row[1] for row in ROWS if row[0] == "`CacheUsage`")
    named = re.findall(r"`(\w+)`", used)
    assert named
    assert set(named) <= set(CacheUsage._fields)
