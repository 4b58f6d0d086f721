"""Who may call what: an API key opens /v1/*, the admin token the administration of the caches and nothing else.

Checked before anything of a body is read. Knows paths and tokens, but no endpoint.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from fastapi import Request, Security
from fastapi.params import Depends
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.errors import ApiError, answer

ADMINISTRATION = "/v1/kv_cache/"
KEYED = ("/v1/", "/tokenize", "/detokenize")


class Access:
    """Middleware. Without API keys everybody may call; without an admin token nobody may administer."""

    def __init__(self, app: ASGIApp, api_keys: Iterable[str] | None, admin_token: str | None) -> None:
        self._app = app
        self._api_keys = None if api_keys is None else tuple(api_keys)
        self._admin_token = admin_token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        app = self._app if refusal is None else answer(Request(scope), refusal)
        await app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        sent = Headers(scope=scope).get("authorization", "")
        if scope["path"].startswith(ADMINISTRATION):
            if self._admin_token is None:
                return ApiError(403, "administration is off: start the server with an admin_token", code="admin_off")
            return _unless_sent(sent, [self._admin_token], "the admin token")
        if scope["path"].startswith(KEYED) and self._api_keys is not None:
            return _unless_sent(sent, self._api_keys, "an API key of this server")
        return None


def _unless_sent(authorization: str, allowed: Iterable[str], what: str) -> ApiError | None:
    """Takes as long for any wrong token: nobody learns from the time how much of one was right."""
    scheme, _, token = authorization.partition(" ")
    given = token.strip().encode("latin-1")  # as it came
    same = [hmac.compare_digest(given, each.encode()) for each in allowed]
    if scheme.lower() == "bearer" and any(same):
        return None
    return ApiError(401, f"send {what}: 'Authorization: Bearer ...'", code="invalid_api_key")


def secured(scheme: str) -> Depends:
    """A dependency that does nothing but say in openapi.json what Access has made sure of."""
    dependency: Depends = Security(HTTPBearer(scheme_name=scheme, auto_error=False))
    return dependency
