"""Which requests are let in, and on which port.

An API key opens /v1/*, the admin token the administration of the caches and profiles and nothing else, the metrics key
/metrics. Checked before anything of a body is read. Knows paths and tokens, but no endpoint.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from fastapi import Request, Security
from fastapi.params import Depends
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from server.api.http.errors import ApiError, make_error_response

ADMIN_PREFIX = "/v1/kv_cache/"
PROFILE_PATH = "/v1/profile"
API_KEY_PREFIXES = ("/v1/", "/tokenize", "/detokenize", "/apply-template")  # and what begins so, as /tokenizer_info
METRICS_PATH = "/metrics"
SHARED_PATHS = ("/health", "/ready")


class Access:
    """Middleware. Without API keys every request is let in; without an admin token, none that administers.

    With a `metrics_port`, /metrics is on that port only, and /health and /ready are all that is on both.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_keys: Iterable[str] | None,
        admin_token: str | None,
        metrics_key: str | None = None,
        metrics_port: int | None = None,
    ) -> None:
        self._app = app
        self._metrics_key = metrics_key
        self._metrics_port = metrics_port
        self._api_keys = None if api_keys is None else tuple(api_keys)
        self._admin_token = admin_token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._find_refusal(scope) if scope["type"] == "http" else None
        app = self._app if refusal is None else make_error_response(Request(scope), refusal)
        await app(scope, receive, send)

    def _find_refusal(self, scope: Scope) -> HTTPException | None:
        if not self._is_on_its_port(scope):
            return HTTPException(404)
        sent = Headers(scope=scope).get("authorization", "")
        if scope["path"] == METRICS_PATH and self._metrics_key is not None:
            return _check_token(sent, [self._metrics_key], "the metrics key")
        if scope["path"].startswith((ADMIN_PREFIX, PROFILE_PATH)):
            if self._admin_token is None:
                return ApiError(403, "administration is off: start the server with an admin_token", code="admin_off")
            return _check_token(sent, [self._admin_token], "the admin token")
        if scope["path"].startswith(API_KEY_PREFIXES) and self._api_keys is not None:
            return _check_token(sent, self._api_keys, "an API key of this server")
        return None

    def _is_on_its_port(self, scope: Scope) -> bool:
        if self._metrics_port is None or scope["path"] in SHARED_PATHS:
            return True
        _, port = scope["server"]
        return bool((port == self._metrics_port) == (scope["path"] == METRICS_PATH))


def _check_token(authorization: str, allowed: Iterable[str], what: str) -> ApiError | None:
    """Return None if an allowed token was sent, else an error; the time taken tells nothing about the token."""
    scheme, _, token = authorization.partition(" ")
    given = token.strip().encode("latin-1")  # as it came
    same = [hmac.compare_digest(given, each.encode()) for each in allowed]
    if scheme.lower() == "bearer" and any(same):
        return None
    return ApiError(401, f"send {what}: 'Authorization: Bearer ...'", code="invalid_api_key")


def make_security_dependency(scheme: str) -> Depends:
    """Return a dependency that only documents in openapi.json what Access has checked."""
    dependency: Depends = Security(HTTPBearer(scheme_name=scheme, auto_error=False))
    return dependency
