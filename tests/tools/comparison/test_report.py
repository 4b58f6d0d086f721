"""The report is one page of valid HTML that loads nothing and shows hostile names as text."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from tests.tools.comparison.test_figures import make_result
from tools.comparison.fidelity import StrategyFidelity
from tools.comparison.plan import Cell, Load, Plan
from tools.comparison.report import ReportSetup, make_page
from tools.comparison.results import Comparison

VOID = {"meta", "br", "path", "use", "rect", "line", "link", "img"}
HOSTILE = "<script>alert(1)</script>"


class Page(HTMLParser):
    """Reads a page: its tags have to be closed in order; collects attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open
        assert len(set(self.ids)) == len(self.ids)

    def note(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.note(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.note(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def make_comparison() -> Comparison:
    plan = Plan(("paged", "small"), (64, 128), (1, 4), 8, 5.0, 2, 0)
    results = Comparison(plan, 0.01, exact={"paged": True, "small": False})
    for cell in plan.cells():
        faster = 2.0 if cell.strategy == "paged" else 1.0
        errors = {HOSTILE: 1} if cell.load.batch == 4 else None
        results.cells[cell] = make_result((1 + cell.round) * faster, errors)
    small = StrategyFidelity(0.002, 0.998, 5.0)
    results.fidelity = {64: {"paged": StrategyFidelity(0.0, 1.0, 5.0), "small": small}, 128: {}}
    results.fidelity_errors = {128: f"no room {HOSTILE}"}
    results.failures = {"gone": f"cannot start {HOSTILE}"}
    return results


SETUP = ReportSetup(
    date="2026-01-02",
    facts=[("model", f"my {HOSTILE}"), ("kvmux", "1")],
    command=f"make compare {HOSTILE}",
    options={"paged": {"kind": HOSTILE}},
)


@pytest.fixture(scope="module")
def text() -> str:
    """Return the page of a comparison; to draw its plot takes seconds."""
    return make_page(make_comparison(), SETUP)


def test_the_page_is_whole_and_loads_nothing(text: str) -> None:
    page = Page(text)
    assert "script" not in page.seen
    assert not {"link", "img", "iframe", "object"} & page.seen
    assert all(link.startswith("#") for link in page.links), "only within the page"
    assert not re.search(r"url\((?!#)|@import", text)
    # As text: title, heading, model, errors of a server and an evaluation, four failed cells, the command, options
    assert sum(HOSTILE in each for each in page.texts) == 3 + 2 + 4 + 1 + 1


def test_the_page_has_every_figure(text: str) -> None:
    assert "Incomplete" not in text
    for load in (Load(64, 1), Load(128, 4)):
        assert str(load) in text
    assert "Missing:" in text, "the fidelity at 128 tokens"
    assert "no room" in text
    assert '<td class="number best">' in text
    assert text.count("<svg") == 1
    assert ">exact<" in text


def test_a_page_tells_what_is_not_measured() -> None:
    results = make_comparison()
    results.cells.pop(Cell(1, Load(64, 1), "small"))
    assert "1 of 16 cells are not measured" in make_page(results, SETUP)
    results.cells.clear()
    results.fidelity.clear()
    page = make_page(results, SETUP)
    assert "16 of 16 cells" in page
    assert "The fidelity was not measured" in page
    assert "<svg" not in page
    Page(page)


def test_a_strategy_whose_server_failed_is_not_advised() -> None:
    results = make_comparison()
    assert results.advice()[0].exact is not None
    results.failures["paged"] = "it ended"
    assert results.advice()[0].exact is None
