"""Bounds, by API key, of the priority of requests and of what they leave in the cache.

Without bounds a single client could run before all others, and evict what they have cached. Knows bodies and keys, not
which keys are allowed (server/api/http/auth.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from config.settings import Settings
from server.api.http.errors import ApiError
from server.api.openai.request_models import GenerationRequest
from server.api.openai.tenants import tenant, tenant_of_key


class PriorityBounds(NamedTuple):
    """The bounds that hold for one client's requests."""

    min_priority: int
    max_kv_cache_priority: int

    def check(self, body: GenerationRequest) -> None:
        """Raise ApiError for a request that is outside of these bounds."""
        if body.priority < self.min_priority:
            raise _refused("priority", f"should be {self.min_priority} or more", body.priority, "min_priority")
        if body.kv_cache_priority > self.max_kv_cache_priority:
            raise _refused(
                "kv_cache_priority",
                f"should be at most {self.max_kv_cache_priority}",
                body.kv_cache_priority,
                "max_kv_cache_priority",
            )


class Priorities:
    """The bounds of all clients: of some tenants their own, of the others the server's."""

    def __init__(self, everyone: PriorityBounds, by_tenant: Mapping[str, PriorityBounds]) -> None:
        self._everyone = everyone
        self._by_tenant = by_tenant

    @classmethod
    def from_settings(cls, settings: Settings) -> Priorities:
        everyone = PriorityBounds(settings.min_priority, settings.max_kv_cache_priority)
        by_tenant = {
            tenant_of_key(key.encode()): everyone._replace(**limits.model_dump(exclude_none=True))
            for key, limits in settings.key_limits.items()
        }
        return cls(everyone, by_tenant)

    def check(self, body: GenerationRequest, authorization: str | None) -> None:
        """Raise ApiError for a request that is outside of the bounds of its API key."""
        self._by_tenant.get(tenant(authorization), self._everyone).check(body)


def _refused(param: str, should: str, sent: int, setting: str) -> ApiError:
    message = (
        f"{param}: {should} for this client, not {sent}; the server's operator may allow more ({setting}, key_limits)"
    )
    return ApiError(400, message, param=param)
