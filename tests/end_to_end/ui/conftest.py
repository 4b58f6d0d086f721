"""A server and a browser that all tests of the page share.

Both end with the last of these tests: Playwright runs an event loop in this thread, beside which there can be no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser

from tests.end_to_end.server_process import Server, serving
from tests.end_to_end.ui.browser import running_chromium
from tests.patience import PATIENCE

TOKEN = "an admin token of these tests: pässwörd, ключ"  # is sent as UTF-8
ADMIN = {b"Authorization": f"Bearer {TOKEN}".encode()}
SETTINGS = f"""
admin_token = "{TOKEN}"
kv_memory = "48MiB"

[strategies.paged]
kind = "paged"
floor = "10%"

[strategies.int8]
kind = "paged"
k_dtype = "int8"
v_dtype = "int8"

[strategies.window]
kind = "sliding_window"
window = 32

[strategies.compressed]
kind = "compressed"
budget = 64
"""


def read_live(server: Server) -> dict[str, Any]:
    """Return the live state as it is now: a command makes earlier answers old."""
    url, body = f"{server.url}/v1/kv_cache/paged/clear", {"cache_salt": "of nobody"}
    httpx.post(url, headers=ADMIN, json=body, timeout=PATIENCE).raise_for_status()
    state: dict[str, Any] = httpx.get(f"{server.url}/v1/live", headers=ADMIN, timeout=PATIENCE).json()
    return state


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with running_chromium() as browser:
        yield browser


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a server of the embedded model with four strategies and an admin token."""
    config: Path = tmp_path_factory.mktemp("ui") / "kvmux.toml"
    config.write_text(SETTINGS)
    with serving("--config", str(config)) as server:
        yield server
