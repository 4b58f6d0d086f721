"""What belongs to the API key of a request: its tenant, the bounds of its priorities, and whether roll-outs include it.

Keys are checked in `middleware.py`. Knows no endpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from config.settings import Settings
from server.api.http.errors import ApiError


def get_tenant(authorization: str | None) -> str:
    """Return the tenant's name, a hash of the API key in this Authorization header; empty without a header."""
    return hash_api_key(get_bearer_token(authorization))


def get_bearer_token(authorization: str | None) -> bytes:
    """Return the key or token in an Authorization header, in the bytes that were sent; empty without one."""
    scheme, _, key = (authorization or "").partition(" ")
    return key.encode("latin-1") if scheme.lower() == "bearer" else b""


def hash_api_key(key: bytes) -> str:
    key = key.strip()
    return hashlib.sha256(key).hexdigest()[:16] if key else ""


class ClientLimits(NamedTuple):
    """What the requests with one API key may do: the bounds of their priorities, and whether roll-outs include them."""

    min_priority: int
    max_kv_cache_priority: int
    rollouts: bool = True

    def check_priorities(self, priority: int, kv_cache_priority: int) -> None:
        """Raise ApiError for a request whose priorities are outside of these bounds."""
        if priority < self.min_priority:
            raise _make_priority_error("priority", f"should be {self.min_priority} or more", priority, "min_priority")
        if kv_cache_priority > self.max_kv_cache_priority:
            raise _make_priority_error(
                "kv_cache_priority",
                f"should be at most {self.max_kv_cache_priority}",
                kv_cache_priority,
                "max_kv_cache_priority",
            )


class LimitsByKey:
    """The limits of all clients: some tenants have limits of their own, the others those of the server."""

    def __init__(self, default_limits: ClientLimits, by_tenant: Mapping[str, ClientLimits]) -> None:
        self._default_limits = default_limits
        self._by_tenant = by_tenant

    @classmethod
    def from_settings(cls, settings: Settings) -> LimitsByKey:
        default = ClientLimits(settings.min_priority, settings.max_kv_cache_priority)
        by_tenant = {
            hash_api_key(key.encode()): default._replace(**limits.model_dump(exclude_none=True))
            for key, limits in settings.key_limits.items()
        }
        return cls(default, by_tenant)

    def get(self, authorization: str | None) -> ClientLimits:
        """Return the limits of the API key in an Authorization header."""
        return self._by_tenant.get(get_tenant(authorization), self._default_limits)


def _make_priority_error(param: str, should: str, sent: int, setting: str) -> ApiError:
    message = (
        f"{param}: {should} for this client, not {sent}; the server's operator may allow more ({setting}, key_limits)"
    )
    return ApiError(400, message, param=param)
