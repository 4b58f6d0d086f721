"""The tables of families: what the guide says about them, and how a family is chosen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from server.text.tool_parsers.formats import TOOL_FORMATS, find_tool_format, list_tool_formats
from server.text.tool_parsers.reasoning import REASONING_FORMATS, find_reasoning_format, list_reasoning_formats
from tests.text.tool_parsers.writers import WRITERS

GUIDE = (Path(__file__).parents[3] / "docs" / "guide" / "tools.md").read_text()


@pytest.mark.parametrize("setting", ["tool_call_parser", "reasoning_parser"])
def test_the_guide_has_every_name(setting: str) -> None:
    table = GUIDE.partition(f"| `{setting}` |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`([\w-]+)`", table))
    known = list_tool_formats() if setting == "tool_call_parser" else list_reasoning_formats()
    assert known.keys() <= named


def test_no_two_rows_have_one_name() -> None:
    assert len(list_tool_formats()) == sum(1 + len(row.aliases) for row in TOOL_FORMATS)
    assert len(list_reasoning_formats()) == sum(1 + len(row.aliases) for row in REASONING_FORMATS)


def test_every_family_has_a_writer() -> None:
    """Otherwise no test would read its calls."""
    assert {row.name for row in TOOL_FORMATS} == WRITERS.keys()


def test_a_template_of_no_family() -> None:
    for template in ("", "{% for message in messages %}{{ message.content }}{% endfor %}", "{{ tools | tojson }}"):
        assert find_tool_format(template) is None
        assert find_reasoning_format(template) is None


@pytest.mark.parametrize("row", TOOL_FORMATS, ids=lambda row: row.name)
def test_a_row_is_found_by_its_texts(row: object) -> None:
    """Rows that come first do not hide it, unless the texts are theirs as well."""
    found = [find_tool_format(" ".join(texts)) for texts in row.in_template]  # type: ignore[attr-defined]
    assert row in found
