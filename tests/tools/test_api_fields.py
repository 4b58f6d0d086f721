"""docs/reference/api.md has a row for every field of a request to generate text, with its type and its meaning."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from server.api.http.json_body import Body
from server.api.openai.tokenize import DetokenizeRequest, TokenizeRequest
from tools.api_fields import BODIES, ONE_VALUE, PAGE, PLACE, TABLES, WITHOUT_EFFECT, fill_tables, format_table


def iter_rows(name: str) -> Iterator[list[str]]:
    """Yield the cells of each row of a table."""
    for line in format_table(name).splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split(" | ")]


def test_the_page_has_the_tables() -> None:
    assert PAGE.read_text() == fill_tables(PAGE.read_text()), "run `python -m tools.api_fields`"


def test_the_page_has_a_place_for_each_table() -> None:
    places = [name for _, name, _ in PLACE.findall(PAGE.read_text())]
    assert sorted(places) == sorted([*TABLES, WITHOUT_EFFECT, ONE_VALUE])


@pytest.mark.parametrize("body", [*BODIES.values(), TokenizeRequest, DetokenizeRequest])
def test_every_field_of_a_body_has_a_row(body: type[Body]) -> None:
    rows = set(re.findall(r"^\| \[?`([\w.]+)`", PAGE.read_text(), flags=re.MULTILINE))
    assert {field.alias or name for name, field in body.model_fields.items()} <= rows


@pytest.mark.parametrize("name", TABLES)
def test_every_field_with_an_effect_has_a_meaning(name: str) -> None:
    rows = list(iter_rows(name))
    assert rows
    assert [row[0] for row in rows if not row[3]] == []


def test_links_of_fields_lead_to_headings() -> None:
    page = PAGE.read_text()
    for _, anchor in re.findall(r"^\| \[`([\w.]+)`\]\(#([\w-]+)\)", page, flags=re.MULTILINE):
        assert re.search(rf"^#+ {anchor.replace('-', '.')}$", page, flags=re.MULTILINE | re.IGNORECASE), anchor


def test_types_bounds_and_defaults() -> None:
    rows = {row[0]: row[1:] for row in [*iter_rows("sampling"), *iter_rows("structured"), *iter_rows("completions")]}
    assert rows["`temperature`"][:2] == ["number, from 0 to 2", "`1.0`"]
    assert rows["`top_p`"][0] == "number, above 0 to 1"
    assert rows["`stop`"][0] == "string or list of strings, up to 1,024 characters"
    assert rows["`response_format.type`"][:2] == ['`"text"` or `"json_object"` or `"json_schema"`', "required"]
    assert rows["[`prompt`](#limits-of-prompts)"][0].endswith("list of lists of integers")


def test_fields_without_effect_name_their_bodies() -> None:
    ignored = {row[0]: row[1:] for row in iter_rows(WITHOUT_EFFECT)}
    assert ignored["`store`"] == ["all", "boolean"]
    assert ignored["`reasoning_effort`"] == ["completions", "string"]
    refused = {row[0]: row[1:] for row in iter_rows(ONE_VALUE)}
    assert refused["`truncation`"] == ["responses", '`"disabled"`']
