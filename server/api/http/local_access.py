"""Decides whether a request comes from this machine: from a program on it, or from a page that this server served.

A connection from a loopback address is not enough. A proxy on this machine passes on requests of anyone, and so does a
browser: a page of another site may send requests to this server (Origin), or have its own host name resolved to a
loopback address (Host; DNS rebinding). A proxy that hides itself completely cannot be recognized: behind a proxy a
server needs an admin token. Knows no paths and no tokens.
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from server.api.http.errors import ApiError

# Headers that proxies add: X-Forwarded-For, CF-Connecting-IP, True-Client-IP, Fly-Client-IP, X-Real-IP and the like
PROXY_HEADER = re.compile(r"forwarded|via|(?:x-)?(?:original-)?forwarded-.*|.*-(?:client|connecting|real)-ip")
HOST = re.compile(r"(?P<name>[a-z0-9.-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?", re.IGNORECASE)  # of the header Host
# Values of the header Sec-Fetch-Site of requests that no other site has caused
OWN_FETCH_SITES = ("same-origin", "none")


def find_local_refusal(scope: Scope) -> ApiError | None:
    """Return None for a request from this machine, else an error 403 that says why it does not count as one."""
    reason = _find_reason(scope)
    if reason is None:
        return None
    message = (
        "without an admin_token this shows other clients' requests to programs on this machine only, "
        f"and {reason}: start the server with an admin_token and send it"
    )
    return ApiError(403, message, code="local_only")


def _find_reason(scope: Scope) -> str | None:
    headers = Headers(scope=scope)
    if proxied := [name for name in headers if PROXY_HEADER.fullmatch(name)]:
        return f"this request came through a proxy (header {proxied[0]})"
    if scope.get("http_version") == "1.0":
        return "this request came through a proxy (HTTP/1.0)"
    client = scope.get("client")
    if client is None or not is_loopback(client[0]):
        return "this request comes from another one"
    host = headers.get("host", "")
    found = HOST.fullmatch(host)
    if found is None or not is_loopback(found["name"].strip("[]")):
        return "the header Host is not localhost"
    referer = headers.get("referer")  # the page's requests have one, which proxies pass on
    if referer is not None and _find_host(referer) != host:
        return "this request came through a proxy, or from a page of another site (header Referer)"
    origin = headers.get("origin")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return "a page of another site sent this request (header Origin)"
    if headers.get("sec-fetch-site", "none") not in OWN_FETCH_SITES:
        return "a page of another site sent this request (header Sec-Fetch-Site)"
    return None


def _find_host(address: str) -> str | None:
    """Return the host and port of an address; None if it has none."""
    try:
        return urlsplit(address).netloc
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Return whether a host name or an address stands for this machine: localhost, 127.0.0.0/8 or ::1."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
