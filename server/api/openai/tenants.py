"""What follows from a request's API key: with whom it shares cached prompts, and which priorities it may ask for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from config.settings import Settings
from server.api.http.errors import ApiError
from server.api.openai.request_models import GenerationRequest


def get_tenant(authorization: str | None) -> str:
    """Return the name of the tenant with this header, which does not reveal the key; without a header it is empty."""
    scheme, _, key = (authorization or "").partition(" ")
    return hash_api_key(key.encode("latin-1")) if scheme.lower() == "bearer" else ""  # the bytes as they came


def hash_api_key(key: bytes) -> str:
    key = key.strip()
    return hashlib.sha256(key).hexdigest()[:16] if key else ""


class PriorityBounds(NamedTuple):
    """The bounds that hold for one client's requests."""

    min_priority: int
    max_kv_cache_priority: int

    def check(self, body: GenerationRequest) -> None:
        """Raise ApiError for a request that is outside of these bounds."""
        if body.priority < self.min_priority:
            raise _make_priority_error(
                "priority", f"should be {self.min_priority} or more", body.priority, "min_priority"
            )
        if body.kv_cache_priority > self.max_kv_cache_priority:
            raise _make_priority_error(
                "kv_cache_priority",
                f"should be at most {self.max_kv_cache_priority}",
                body.kv_cache_priority,
                "max_kv_cache_priority",
            )


class Priorities:
    """The bounds of all clients: of some tenants their own, of the others the server's."""

    def __init__(self, everyone: PriorityBounds, by_tenant: Mapping[str, PriorityBounds]) -> None:
        self._default_bounds = everyone
        self._by_tenant = by_tenant

    @classmethod
    def from_settings(cls, settings: Settings) -> Priorities:
        everyone = PriorityBounds(settings.min_priority, settings.max_kv_cache_priority)
        by_tenant = {
            hash_api_key(key.encode()): everyone._replace(**limits.model_dump(exclude_none=True))
            for key, limits in settings.key_limits.items()
        }
        return cls(everyone, by_tenant)

    def check(self, body: GenerationRequest, authorization: str | None) -> None:
        """Raise ApiError for a request that is outside of the bounds of its API key."""
        self._by_tenant.get(get_tenant(authorization), self._default_bounds).check(body)


def _make_priority_error(param: str, should: str, sent: int, setting: str) -> ApiError:
    message = (
        f"{param}: {should} for this client, not {sent}; the server's operator may allow more ({setting}, key_limits)"
    )
    return ApiError(400, message, param=param)
