"""Each view of the page opens without errors, shows what the API says, and follows a server under load."""

from __future__ import annotations

import base64
import re

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.end_to_end.server_process import PATIENCE, Server, eventually
from tests.end_to_end.ui.browser import NARROW, VIEWS, WIDE, open_page, show
from tests.end_to_end.ui.conftest import ADMIN, TOKEN, read_live
from tests.end_to_end.ui.load import loaded

SERIOUS = ("serious", "critical")


def read_number(page: Page, title: str) -> int:
    """Return the first number of the figure with this title."""
    text = page.locator(".figure", has=page.get_by_text(title, exact=True)).locator("dd").first.inner_text()
    found = re.search(r"[\d,]+", text)
    assert found, text
    return int(found[0].replace(",", ""))


@pytest.mark.parametrize(("size", "scheme"), [(WIDE, "light"), (NARROW, "dark")])  # neither depends on the other
def test_every_view_is_accessible_and_fits_its_window(
    browser: Browser, server: Server, size: tuple[int, int], scheme: str
) -> None:
    with (
        loaded(server.url),
        open_page(browser, server.url, token=TOKEN, size=size, scheme=scheme, fragment="requests") as page,
    ):
        expect(page.locator("tbody tr").first).to_be_visible()
        for view in VIEWS:
            show(page, view)
            found = Axe().run(page).response["violations"]
            serious = [(each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in SERIOUS]
            assert not serious, f"{view}: {serious}"
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= size[0], f"{view} is {width} pixels wide"


def test_the_memory_follows_the_load(browser: Browser, server: Server) -> None:
    with open_page(browser, server.url, token=TOKEN) as page:
        expect(page.get_by_role("status").filter(has_text="live")).to_be_visible()
        with loaded(server.url):
            eventually(lambda: read_number(page, "requests") > 2)
            expect(page.locator(".strip", has_text="in_use").first).to_be_visible()
            row = page.locator("tbody tr", has=page.get_by_text("window", exact=True)).first
            expect(row.locator("td.number").first).not_to_have_text("0 B")
        eventually(lambda: read_number(page, "requests") == 0)


def test_a_strip_shows_what_the_api_says(browser: Browser, server: Server) -> None:
    server.complete(prompt=list(range(100, 400)), max_tokens=1, kv_cache="paged")
    state = read_live(server)
    with open_page(browser, server.url, token=TOKEN) as page:
        strip = page.locator(".strip").nth([*state["regions"]].index("paged/0"))
        details = page.locator("#block-details")
        canvas, region = strip.locator("canvas"), state["regions"]["paged/0"]
        num_blocks = len(base64.b64decode(region["states"]))
        expect(canvas).to_have_attribute("aria-label", f"paged, {region['what']}: {num_blocks} squares")
        expect(strip.get_by_role("heading")).to_contain_text(f"{region['held_blocks']:,} blocks of ")
        expect(strip).to_contain_text("idle")
        canvas.focus()
        page.keyboard.press("End")
        expect(details).to_contain_text(f"Block {num_blocks - 1:,} · paged")
        page.keyboard.press("ArrowLeft")
        expect(details).to_contain_text(f"Block {num_blocks - 2:,} · paged")
        canvas.hover(position={"x": 4, "y": 4})
        expect(details).to_contain_text("Block 0 ·")


def test_room_for_more_is_what_the_api_says(browser: Browser, server: Server) -> None:
    with open_page(browser, server.url, token=TOKEN) as page:
        slider = page.get_by_role("slider")
        slider.focus()
        page.keyboard.press("End")
        state = httpx.get(f"{server.url}/v1/live", headers=ADMIN, timeout=PATIENCE).json()
        for name, each in state["instances"].items():
            length = max(map(int, each["fits"]))
            expect(page.locator("output")).to_have_text(f"{length:,}")
            shown = page.locator(".room > div", has=page.get_by_text(name, exact=True)).locator("b")
            expect(shown).to_have_text(f"{each['fits'][str(length)]:,}")


def test_requests_are_listed_and_can_be_ended(browser: Browser, server: Server) -> None:
    with (
        open_page(browser, server.url, token=TOKEN, fragment="requests") as page,
        httpx.stream(
            "POST",
            f"{server.url}/v1/completions",
            json={"prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True, "kv_cache": "window"},
            timeout=PATIENCE,
        ) as answer,
    ):
        row = page.locator("tbody tr").first
        expect(row).to_contain_text("window")
        expect(row).to_contain_text("request")
        row.get_by_role("button").click()
        page.get_by_role("button", name="End it").click()
        expect(page.get_by_text("No requests.")).to_be_visible()
        assert "ended_by_operator" in answer.read().decode()


def test_rates_are_drawn(browser: Browser, server: Server) -> None:
    with loaded(server.url), open_page(browser, server.url, token=TOKEN, fragment="rates") as page:
        row = page.locator("tbody tr", has=page.get_by_text("window", exact=True))
        expect(row.locator("td").first).not_to_have_text(re.compile("^(–|0)$"))
        expect(row.locator("td").nth(3)).to_have_text(re.compile(r"[\d.]+ (ms|s) / [\d.]+ (ms|s)"))
        line = page.locator("figure", has_text="Tokens a second").locator("path.line").first
        eventually(lambda: (line.get_attribute("d") or "").count("L") > 2)
        chart = page.get_by_role("application", name="Tokens a second over time")
        chart.focus()
        page.keyboard.press("ArrowLeft")
        expect(page.locator("figure", has_text="Tokens a second").locator(".times")).to_contain_text("s ago")
        page.keyboard.press("Escape")
        expect(page.locator("figure", has_text="Tokens a second").locator(".times")).to_contain_text("now")


def test_settings_are_shown_without_secrets(browser: Browser, server: Server) -> None:
    with open_page(browser, server.url, token=TOKEN, fragment="settings") as page:
        table = page.locator("table.settings")
        expect(table).to_contain_text("kv_memory_bytes")
        page.get_by_label("Find").fill("window")
        expect(table).not_to_contain_text("kv_memory_bytes")
        assert TOKEN not in page.content()


def test_a_view_can_be_opened_by_its_address_and_by_keyboard(browser: Browser, server: Server) -> None:
    with open_page(browser, server.url, token=TOKEN, fragment="settings") as page:
        expect(page.get_by_role("heading", name="Settings", exact=True)).to_be_visible()
        page.keyboard.press("Tab")
        expect(page.get_by_text("Skip to the view")).to_be_focused()
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="Memory", exact=True)).to_be_visible()
        page.go_back()
        expect(page.get_by_role("heading", name="Settings", exact=True)).to_be_visible()
