"""Serves the files of the page at /ui. They contain no data: scripts on the page ask the API, with the user's tokens.

Knows neither the API nor who may call it.
"""

from __future__ import annotations

import os
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

UI_PATH = "/ui"
STATIC_FILES = Path(__file__).parent / "static"
HEADERS = {
    # Nothing but the page's own files and its own server, and no inline script or style
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # shows the server through which address the page was opened: local_access.py
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # the browser asks whether a file has changed, since a new version has the same names
}


class PageFiles(StaticFiles):
    """The static files, with headers that keep other sites away from the page, and the page from other sites."""

    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(HEADERS)
        return response


def mount_ui(app: FastAPI) -> None:
    """Serve the page at /ui/, to which /ui leads."""

    @app.head(UI_PATH, include_in_schema=False)
    @app.get(UI_PATH, include_in_schema=False)
    async def redirect() -> Response:
        return RedirectResponse("ui/", headers={"cache-control": "no-cache"})  # relative: a proxy may add a prefix

    app.mount(UI_PATH, PageFiles(directory=STATIC_FILES, html=True), name="ui")
