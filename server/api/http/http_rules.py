"""What RFC 9112 asks of a server, and uvicorn with its parser does not do.

Functions without state; server/api/http/connection.py calls them.
"""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from server.api.http.errors import ApiError

Headers = Iterable[tuple[bytes, bytes]]  # their names in lower case


def make_http_error(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_http")


def check_head(method: bytes, version: str, headers: Headers) -> None:
    """Raise ApiError for what the parser accepts, but a proxy before this server may read in another way."""
    if version not in ("1.0", "1.1"):
        raise make_http_error(f"this server speaks HTTP/1.1, not HTTP/{version}")
    if method == b"CONNECT":
        raise make_http_error("this server is not a proxy: there is no CONNECT")
    hosts = _get_header_values(headers, b"host")
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        raise make_http_error(f"the header Host came {len(hosts)} times; send it once")
    codings = _get_header_values(headers, b"transfer-encoding")
    if codings and (codings != [b"chunked"] or version == "1.0"):
        raise make_http_error("the header Transfer-Encoding may only be `chunked`, once, in HTTP/1.1")


def _get_header_values(headers: Headers, wanted: bytes) -> list[bytes]:
    return [value.strip().lower() for name, value in headers if name == wanted]


def make_head_without_upgrade(method: bytes, url: bytes, version: str, headers: Headers) -> bytes:
    """Return the same head without its offer of another protocol."""
    kept = [b"%s: %s\r\n" % (name, value) for name, value in headers if name != b"upgrade"]
    return b"%s %s HTTP/%s\r\n%s\r\n" % (method, url, version.encode(), b"".join(kept))


def disable_chunked_encoding(cycle: RequestResponseCycle) -> None:
    """Clients of HTTP/1.0 know no chunks: the end of the connection is the end of the answer."""
    send = cycle.send
    cycle.chunked_encoding = False

    async def send_plain(message: ASGISendEvent) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))  # uvicorn lets no more through
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]


def format_error_response(error: ApiError, default_headers: Headers) -> bytes:
    """Return the whole answer to a request that the application never sees."""
    body = error.encode()
    status = f"HTTP/1.1 {error.status_code} {HTTPStatus(error.status_code).phrase}"
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    lines = [status, *(f"{name}: {value}" for name, value in (headers | (dict(error.headers or {}))).items())]
    head = "\r\n".join(lines).encode() + b"".join(b"\r\n%s: %s" % header for header in default_headers)
    return head + b"\r\n\r\n" + body
