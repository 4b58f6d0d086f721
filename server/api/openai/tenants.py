"""Who shares cached prompts with whom: requests with the same API key, and of these the ones with the same salt.

What one tenant has sent must not show in how fast, or how, another is answered (CVE-2025-46570). Knows headers; not
which keys are allowed.
"""

from __future__ import annotations

import hashlib


def tenant(authorization: str | None) -> str:
    """A name for whoever sent this header, which does not give away the key; nobody's is empty."""
    scheme, _, key = (authorization or "").partition(" ")
    return tenant_of_key(key.encode("latin-1")) if scheme.lower() == "bearer" else ""  # the bytes as they came


def tenant_of_key(key: bytes) -> str:
    key = key.strip()
    return hashlib.sha256(key).hexdigest()[:16] if key else ""


def salt_of(tenant: str, cache_salt: str | None) -> str:
    """As the engine has it: see `cache_strategies.base.tenant_of`."""
    return f"{tenant}/{cache_salt or ''}"
