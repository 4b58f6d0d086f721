"""The page and the table of a board with made-up figures."""

from __future__ import annotations

import html
import json
import random
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import combinations
from typing import Any

import pytest

from server.evaluation.board.data import FILE, Board
from server.evaluation.board.page import PAGE, TABLE, make_files, place_points
from server.evaluation.board.verdicts import describe_length, find_pareto_line
from tests.evaluation.board.boards import RIGHT, WRONG, make_board, make_quality, make_speed

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Reader(HTMLParser):
    """Checks that each tag is closed where it should be, and keeps texts and what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.loads: list[str] = []
        self.counts: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.loads += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def iter_values(value: Any) -> Iterator[Any]:
    """Yield the numbers and texts of a JSON document."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from iter_values(each)
    else:
        yield value


@pytest.fixture
def board(rng: random.Random) -> Board:
    """A board of two lengths and five strategies with figures that are drawn."""
    names = ("exact", "a & b", "<c>", "d", "e")

    def draw(length: int) -> Board:
        cells = {
            name: make_quality(
                {"easy": RIGHT, "drawn": [rng.random() for _ in RIGHT]},
                kv_bytes=rng.randrange(1, 9000),
                kl=rng.random(),
            )
            for name in names
        }
        return make_board(cells, length=length)

    first, second = draw(1024), draw(4096)
    first.cells += second.cells
    return first


def test_the_page_is_well_formed_and_has_every_figure(board: Board) -> None:
    files = make_files(board)
    page = files[PAGE].decode()
    reader = read(page)
    text = "".join(reader.texts)
    for value in iter_values(json.loads(files[FILE])):
        assert (json.dumps(value) if not isinstance(value, str) else value) in text
    assert reader.loads == []
    assert "script" not in reader.counts
    assert not re.search(r"url\(|@import|https?:", page)
    assert reader.counts["circle"] == len(board.cells)
    for length in board.lengths:
        assert describe_length(board, length) in text


def test_the_table_has_a_row_for_each_cell(board: Board) -> None:
    table = make_files(board)[TABLE].decode()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    names = [*board.setup.strategies]
    assert [row[0] for row in rows] == ["strategy", rows[1][0], *names] * 2
    exact, other = rows[2], rows[3]
    assert exact[-7:-2] == ["98.77%", f"{board.cells[0].quality.kv_bytes / 1024:,.0f}", "1.00", "0.0", "0.6"]
    assert exact[-2:] == ["10", "30"]
    assert other[-2:] == ["11", "33"]


def test_figures_that_are_not_measured_yet_are_dashes() -> None:
    board = make_board({"exact": make_quality({"easy": RIGHT}, exact=True)}, speed=False)
    row = make_files(board)[TABLE].decode().splitlines()
    assert [line.count(" - ") for line in row if line.startswith("| exact")] == [4]


def test_a_busy_machine_is_named() -> None:
    board = make_board({"exact": make_quality({"easy": RIGHT}, exact=True)})
    board.cells[0].speed = make_speed(others_share=0.4)
    warning = "Speed at 4,096 tokens: other processes used 40% of the machine meanwhile: measure again."
    files = make_files(board)
    assert warning in files[TABLE].decode()
    assert warning in html.unescape(files[PAGE].decode())


def test_the_picture_joins_the_pareto_line_and_names_do_not_overlap(board: Board) -> None:
    cells = board.list_cells(4096)
    picture = place_points(cells)
    points = {each.strategy: (each.quality.kv_bytes / 4096, each.quality.kl_mean) for each in cells}
    line = find_pareto_line(points)
    assert {each.name for each in picture.points if each.on_line} == set(line)
    places = {each.name: f"{each.x},{each.y}" for each in picture.points}
    assert picture.line.split() == [places[name] for name in line]
    assert all(picture.left <= each.x < picture.width and 0 < each.y <= picture.bottom for each in picture.points)
    for a, b in combinations(picture.points, 2):
        assert abs(a.x - b.x) >= 190 or abs(a.label_y - b.label_y) >= 13


def test_exact_strategies_are_at_the_bottom() -> None:
    board = make_board({"exact": make_quality({"easy": WRONG}), "other": make_quality({"easy": WRONG}, kl=1e-9)})
    picture = place_points(board.cells)
    assert [each.y for each in picture.points] == [picture.bottom] * 2
