"""The routes under /v1 without that prefix, for clients whose base URL has none. Knows paths, and no endpoint.

The path is rewritten before anything looks at it, so that both spellings ask for the same key. The log has
it as it came.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

VERSION = "/v1"
ROUTES = ("/completions", "/chat/completions", "/models", "/kv_cache", "/settings")


class Unversioned:
    """Middleware. Stands before `Access`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _is_unversioned(scope["path"]):
            scope["path"] = VERSION + scope["path"]
        await self._app(scope, receive, send)


def _is_unversioned(path: str) -> bool:
    return any(path == route or path.startswith(f"{route}/") for route in ROUTES)
