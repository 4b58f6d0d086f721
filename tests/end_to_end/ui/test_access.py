"""Who may see what: the page itself has no data, and the server decides by the token that the page sends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from playwright.sync_api import Browser, Route, expect

from tests.end_to_end.server_process import Server, serving
from tests.end_to_end.ui.browser import open_page
from tests.end_to_end.ui.conftest import TOKEN
from tests.patience import PATIENCE

KEY = "sk-a-key-of-these-tests"
REFUSED = "Failed to load resource: the server responded with a status of 40"


@contextmanager
def hidden_proxy(server: str) -> Iterator[str]:
    """Pass on GET requests to a server as if they were the proxy's own; yield the proxy's address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
            answer = httpx.get(server + self.path, headers=headers, timeout=PATIENCE)
            self.send_response(answer.status_code)
            self.send_header("content-type", answer.headers["content-type"])
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *_: object) -> None: ...

    class Proxy(ThreadingHTTPServer):
        request_queue_size = 128  # a browser opens more connections at once than the default of 5

    with Proxy(("127.0.0.1", 0), Handler) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{proxy.server_port}"
        finally:
            proxy.shutdown()
            thread.join()


def test_a_wrong_token_is_refused_and_the_right_one_opens_the_page(browser: Browser, server: Server) -> None:
    with open_page(browser, server.url, allowed_errors=[REFUSED]) as page:
        expect(page.get_by_role("alert")).to_contain_text("send the admin token")
        page.get_by_role("button", name="Access").click()
        page.get_by_label("Admin token").fill("a wrong token")
        page.get_by_role("button", name="Use").click()
        expect(page.get_by_role("alert")).to_contain_text("send the admin token")
        page.get_by_role("button", name="Access").click()
        page.get_by_label("Admin token").fill(TOKEN)
        page.get_by_role("button", name="Use").click()
        expect(page.locator("canvas").first).to_be_visible()
        assert TOKEN not in page.url
        page.reload()
        expect(page.locator("canvas").first).to_be_visible()


def test_tokens_are_sent_in_a_header_only(browser: Browser, server: Server) -> None:
    addresses: list[str] = []
    with open_page(browser, server.url, token=TOKEN) as page:
        page.on("request", lambda request: addresses.append(request.url))
        page.reload()
        expect(page.locator("canvas").first).to_be_visible()
    assert any("/v1/live/events" in address for address in addresses)
    assert not any(TOKEN.split()[0] in address or "token" in address for address in addresses)


def test_without_an_admin_token_this_machine_sees_everything_and_changes_nothing(
    browser: Browser, tiny: Server
) -> None:
    tiny.complete(prompt=list(range(100, 300)), max_tokens=1)
    with open_page(browser, tiny.url, fragment="prefixes", allowed_errors=[REFUSED]) as page:
        page.get_by_role("button", name="Clear all").click()
        page.get_by_role("button", name="Clear", exact=True).click()
        expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("admin_token")
    proxied = httpx.get(f"{tiny.url}/v1/live", headers={"X-Forwarded-For": "192.0.2.1"}, timeout=PATIENCE)
    assert proxied.status_code == 403


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a server that answers only with KEY."""
    config = tmp_path_factory.mktemp("locked") / "kvmux.toml"
    config.write_text(f'kv_memory = "32MiB"\napi_keys = ["{KEY}"]\n')
    with serving("--config", str(config)) as server:
        yield server


@pytest.mark.parametrize("view", ["compare", "settings", "playground"])
def test_a_view_loads_again_once_the_right_key_is_given(browser: Browser, view: str, locked: Server) -> None:
    with open_page(browser, locked.url, fragment=view, allowed_errors=[REFUSED]) as page:
        expect(page.get_by_role("alert").first).to_contain_text("API key")
        page.get_by_role("button", name="Access").click()
        page.get_by_label("API key").fill(KEY)
        page.get_by_role("button", name="Use").click()
        expect(page.get_by_role("alert")).to_have_count(0)
        expect(page.locator("main form, main table").first).to_be_visible()


def test_the_page_behind_a_proxy_that_hides_itself_sees_nothing(browser: Browser, tiny: Server) -> None:
    """The proxy sends no header of its own, and the server's Host; but it passes on the page's Referer."""
    with hidden_proxy(tiny.url) as url, open_page(browser, url, allowed_errors=[REFUSED]) as page:
        expect(page.get_by_role("alert")).to_contain_text("Referer")


def test_a_refusal_that_comes_before_a_view_is_painted_is_shown(browser: Browser, server: Server) -> None:
    """A busy browser runs what waits for the painting late: here a second late, and the server refuses before that."""
    late_painting = """
        const start = window.setTimeout.bind(window);
        window.setTimeout = (callback, delay = 0, ...rest) => start(callback, delay + 1000, ...rest);
        window.requestAnimationFrame = () => 0;
    """

    def refuse_late(route: Route) -> None:
        time.sleep(0.3)  # the view is drawn meanwhile
        route.continue_()

    with open_page(browser, server.url, allowed_errors=[REFUSED]) as page:
        page.add_init_script(late_painting)
        page.route("**/v1/live/events", refuse_late)
        page.reload()
        expect(page.get_by_role("alert")).to_contain_text("send the admin token")


def test_the_page_can_be_switched_off() -> None:
    with serving("--no-ui") as server:
        assert {server.get(path).status_code for path in ("/ui", "/ui/", "/ui/app.js")} == {404}
        assert "Watch it" not in server.output.read_text()


def test_files_have_strict_headers_and_nothing_else_is_served(server: Server) -> None:
    redirect = server.get("/ui")
    assert (redirect.status_code, redirect.headers["location"]) == (307, "ui/")
    for path, kind in [("/ui/", "text/html"), ("/ui/app.js", "text/javascript"), ("/ui/style.css", "text/css")]:
        answer = server.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kind)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        again = httpx.get(server.url + path, headers={"If-None-Match": answer.headers["etag"]}, timeout=PATIENCE)
        assert again.status_code == 304
    for path in ["/ui/nothing.js", "/ui/../pyproject.toml", "/ui/%2e%2e/files.py", "/ui/..%2ffiles.py"]:
        assert server.get(path).status_code in (400, 404), path
    refused = httpx.post(f"{server.url}/ui/", timeout=PATIENCE)
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")
