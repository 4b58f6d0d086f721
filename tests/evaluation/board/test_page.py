"""The page and the table of a board with made-up figures."""

from __future__ import annotations

import random
import re
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path

import pytest

from server.evaluation.board.data import FILE, Board
from server.evaluation.board.page import PAGE, TABLE, Scatter, choose_ticks, make_files, place_points
from server.evaluation.board.verdicts import describe_length, find_pareto_line
from tests.evaluation.board.boards import RIGHT, make_board, make_quality, make_speed

FOLDER = Path("boards/mine")


class Reader(HTMLParser):
    """Checks that each tag is closed where it should be, and keeps the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def board(rng: random.Random) -> Board:
    """A board of two lengths and five strategies with figures that are drawn."""

    def draw(length: int) -> Board:
        cells = {
            name: make_quality(
                {"easy": RIGHT, "drawn": [rng.random() for _ in RIGHT]},
                kv_bytes=rng.randrange(1, 9000),
                kl=rng.random(),
            )
            for name in ("exact", "a & b", "<c>", "d", "e")
        }
        return make_board(cells, length=length)

    first, second = draw(1024), draw(4096)
    first.cells += second.cells
    return first


def test_the_page_is_well_formed_stands_alone_and_has_every_figure(board: Board) -> None:
    files, reader = make_files(board, FOLDER), Reader()
    page = files[PAGE].decode()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    assert files[FILE].decode() in reader.text
    assert not re.search(r"<script|\b(src|href)=|url\(|@import|https?:", page)
    assert page.count("<circle ") == len(board.cells)
    for length in board.lengths:
        assert describe_length(board, length).replace("`", "") in reader.text
    assert "`" not in page


def test_the_table_has_a_row_for_each_cell(board: Board) -> None:
    table = make_files(board, FOLDER)[TABLE].decode()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    assert [row[0] for row in rows] == ["strategy", rows[1][0], *board.setup.strategies] * 2
    exact, other = rows[2], rows[3]
    assert exact[-7:-2] == ["98.77%", f"{board.cells[0].quality.kv_bytes / 1024:,.0f}", "1.00", "0.0", "0.6"]
    assert exact[-2:] == ["10", "30"]
    assert other[-2:] == ["11", "33"]


def test_what_is_not_measured_is_a_dash_and_a_busy_machine_is_named() -> None:
    board = make_board({"exact": make_quality({"easy": RIGHT}, exact=True)}, speed=False)
    row = make_files(board, FOLDER)[TABLE].decode().splitlines()
    assert [line.count(" - ") for line in row if line.startswith("| exact")] == [4]
    board.cells[0].speed = make_speed(others_share=0.4)
    warning = "Speed at 4,096 tokens: other processes used 40% of the machine meanwhile: measure again."
    assert all(warning in make_files(board, FOLDER)[name].decode() for name in (TABLE, PAGE))


def test_the_picture_joins_the_pareto_line_and_names_do_not_overlap(board: Board) -> None:
    cells = board.list_cells(4096)
    picture = place_points(cells)
    line = find_pareto_line({each.strategy: (each.quality.kv_bytes, each.quality.kl_mean) for each in cells})
    assert {each.name for each in picture.points if each.on_line} == set(line)
    places = {each.name: f"{each.x},{each.y}" for each in picture.points}
    assert picture.line.split() == [places[name] for name in line]
    assert all(picture.left <= each.x < picture.width and 0 < each.y <= picture.bottom for each in picture.points)
    check_labels(picture)


def check_labels(picture: Scatter) -> None:
    """Check that labels of letters that are 6 pixels wide lie in the picture, and not over one another."""
    boxes = []
    for point in picture.points:
        length = 6 * len(point.label)
        left = point.label_x - (length if point.anchor == "end" else 0)
        assert 0 <= left <= left + length <= picture.width
        assert 10 < point.label_y <= picture.bottom
        boxes.append((left, left + length, point.label_y))
    for (a, b, y), (c, d, z) in combinations(boxes, 2):
        assert b <= c or d <= a or abs(y - z) > 12.9


@pytest.mark.fuzz
def test_labels_have_room_also_if_names_are_long_and_points_near_to_each_other(rng: random.Random) -> None:
    for _ in range(50):
        kl, kv_bytes = 10 ** rng.uniform(-5, 2), rng.randrange(1000, 10**9)
        cells = {
            f"{i}{'-option' * rng.randrange(12)}": make_quality(
                {"easy": RIGHT}, kv_bytes=round(kv_bytes * rng.uniform(0.9, 1)), kl=kl * rng.uniform(0.9, 1)
            )
            for i in range(9)
        }
        picture = place_points(make_board(cells).cells)
        check_labels(picture)
        assert all(point.label == point.name or point.name.startswith(point.label[:-1]) for point in picture.points)


@pytest.mark.fuzz
def test_ticks_are_a_few_multiples_of_a_round_number(rng: random.Random) -> None:
    assert choose_ticks(24192) == [5000, 10000, 15000, 20000]
    for _ in range(300):
        most = 10 ** rng.uniform(-2, 9)
        ticks = choose_ticks(most)
        assert 2 <= len(ticks) <= 5
        assert ticks[-1] <= most < ticks[-1] + ticks[0] * 1.0001
        assert ticks == pytest.approx([ticks[0] * (i + 1) for i in range(len(ticks))])
        assert f"{ticks[0]:.6e}"[:8] in ("1.000000", "2.000000", "2.500000", "5.000000")
