"""A real Chromium in which tests open the page of a running server, and which notes what must not happen there.

`make chromium` installs it on Debian and Ubuntu. Where REQUIRE_CHROMIUM is set its absence is a failure, not a skip.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

PATIENCE = 60_000.0  # milliseconds that anything on the page may take on a busy machine
WIDE, NARROW = (1600, 1000), (390, 844)
REQUIRED = bool(os.environ.get("REQUIRE_CHROMIUM"))
VIEWS = ["memory", "compare", "prefixes", "requests", "rates", "rollouts", "playground", "settings"]


@contextmanager
def running_chromium() -> Iterator[Browser]:
    """Run Debian's Chromium without a window; without it the test is skipped, or fails if it is required."""
    program = shutil.which("chromium")
    if program is None:
        (pytest.fail if REQUIRED else pytest.skip)("there is no chromium: `make chromium` installs it")
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        # Tests may run as root, for whom Chromium's sandbox does not start
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Watch:
    """What a page did that it must not do (errors in its console, requests to other servers), and what it waits for."""

    url: str  # of the only server that it may ask
    errors: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    unanswered: set[str] = field(default_factory=set)  # addresses of requests

    def note_message(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(f"{message.text} ({message.location})")

    def note_error(self, error: Exception) -> None:
        self.errors.append(str(error))

    def note_request(self, request: Request) -> None:
        if not request.url.startswith(f"{self.url}/"):
            self.foreign.append(request.url)
        self.unanswered.add(request.url)

    def note_end(self, request: Request) -> None:
        self.unanswered.discard(request.url)


@contextmanager
def open_page(
    browser: Browser,
    url: str,
    *,
    fragment: str = "",
    token: str = "",
    size: tuple[int, int] = WIDE,
    scheme: str = "light",
    allowed_errors: Sequence[str] = (),
) -> Iterator[Page]:
    """Open the page of the server at `url` with an admin token; at the end, assert that nothing went wrong on it.

    `allowed_errors` are parts of messages in the console that the test provokes.
    """
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme="dark" if scheme == "dark" else "light",
        reduced_motion="reduce",
    )
    watch = Watch(url)
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    page.on("console", watch.note_message)
    page.on("pageerror", watch.note_error)
    page.on("request", watch.note_request)
    page.on("requestfinished", watch.note_end)
    page.on("requestfailed", watch.note_end)
    if token:
        page.add_init_script(f"sessionStorage.setItem('kvmux.admin', {token!r})")
    try:
        page.goto(f"{url}/ui/{'#' if fragment else ''}{fragment}")
        yield page
    except BaseException:
        print(f"unanswered: {sorted(watch.unanswered)}, errors: {watch.errors}")
        raise
    finally:
        context.close()
    assert [error for error in watch.errors if not any(each in error for each in allowed_errors)] == []
    assert watch.foreign == []


def show(page: Page, view: str) -> None:
    """Open a view by its link, and wait until it is there."""
    page.get_by_role("navigation").locator(f"a[href='#{view}']").click()
    expect(page.locator("main h2")).to_be_visible()
    expect(page.get_by_text("Loading…")).to_have_count(0)
