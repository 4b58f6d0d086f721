"""The tree of prefixes: shared beginnings with their hits; operators pin, unpin, drop and clear them on the page."""

from __future__ import annotations

import base64
import random
import re
from typing import Any

import httpx
from playwright.sync_api import Browser, Page, expect

from tests.end_to_end.server_process import Server, eventually
from tests.end_to_end.ui.browser import open_page
from tests.end_to_end.ui.conftest import ADMIN, TOKEN, read_live
from tests.patience import PATIENCE


def confirm(page: Page, button: str, answer: str) -> None:
    """Press a button of the first row that has it, and confirm what it does."""
    page.get_by_role("button", name=re.compile(f"^{button} ")).first.click()
    page.get_by_role("button", name=answer, exact=True).click()
    expect(page.get_by_role("dialog")).to_have_count(0)


def read_prefixes(server: Server) -> list[dict[str, Any]]:
    answer = httpx.get(f"{server.url}/v1/live/prefixes", headers=ADMIN, timeout=PATIENCE).json()
    return list(answer["instances"]["paged"]["prefixes"])


def test_a_shared_beginning_is_pinned_unpinned_dropped_and_cleared(browser: Browser, server: Server) -> None:
    httpx.post(f"{server.url}/v1/kv_cache/paged/clear", headers=ADMIN, json={}, timeout=PATIENCE).raise_for_status()
    beginning = [random.randrange(100, 1000) for _ in range(96)]
    for _ in range(3):
        rest = [random.randrange(100, 1000) for _ in range(64)]
        server.complete(prompt=[*beginning, *rest], max_tokens=1, kv_cache="paged")
    with open_page(browser, server.url, token=TOKEN, fragment="prefixes") as page:
        rows = page.locator("tbody tr")
        expect(rows).to_have_count(4)  # the beginning, and what follows it in each text
        first = rows.first
        expect(first.locator("td").nth(1)).to_have_text("96")
        expect(first.locator("td").nth(4)).to_have_text("2")  # hits
        first.locator("button.toggle").click()
        expect(rows).to_have_count(1)
        first.locator("button.toggle").click()
        expect(rows).to_have_count(4)

        confirm(page, "Pin", "Pin it")
        expect(first.get_by_role("button", name=re.compile("^Unpin"))).to_be_visible()
        assert [each["pins"] for each in read_prefixes(server) if each.get("pins")]
        confirm(page, "Unpin", "Unpin it")
        expect(page.get_by_role("button", name=re.compile("^Unpin"))).to_have_count(0)

        page.get_by_role("button", name=re.compile("^Drop ")).last.click()
        page.get_by_role("button", name="Drop it").click()
        expect(rows).to_have_count(3)

        page.get_by_role("button", name="Clear all of paged").click()
        page.get_by_role("button", name="Clear", exact=True).click()
        expect(page.get_by_text("Nothing is cached yet.")).to_be_visible()
    eventually(lambda: not read_prefixes(server))


def test_what_clients_have_chosen_is_shown_as_text(browser: Browser, server: Server) -> None:
    prompt = [random.randrange(100, 1000) for _ in range(100)]
    server.complete(prompt=prompt, max_tokens=1, kv_cache="paged", cache_salt="\u202e\u0007<b>x")
    with open_page(browser, server.url, token=TOKEN, fragment="prefixes") as page:
        expect(page.locator("tbody")).to_contain_text("salt ⟨U+202E⟩␇<b>x")


def test_the_details_of_a_block_are_shown(browser: Browser, server: Server) -> None:
    server.complete(prompt=[random.randrange(100, 1000) for _ in range(300)], max_tokens=1, kv_cache="paged")
    region = read_live(server)["regions"]["paged/0"]
    states = base64.b64decode(region["states"])
    base = f"{server.url}/v1/live/blocks/paged/0"
    details = [httpx.get(f"{base}/{i}", headers=ADMIN, timeout=PATIENCE).json() for i in range(len(states))]
    known = next(each for each in reversed(details) if "prefix" in each)
    with open_page(browser, server.url, token=TOKEN) as page:
        canvas = page.get_by_label(re.compile(r"^paged, .* squares$"))
        canvas.focus()
        page.keyboard.press("End")
        for _ in range(len(states) - 1 - known["block"]):
            page.keyboard.press("ArrowLeft")
        text = page.locator("#block-details")
        expect(text).to_contain_text(f"Block {known['block']:,} · paged · {region['what']}")
        last = known["first_token"] + known["tokens"] - 1
        expect(text).to_contain_text(f"tokens {known['first_token']:,} to {last:,} of its text")
        expect(text).to_contain_text(f"prefix {known['prefix'][:8]}")
