"""uvicorn's connections, with limits that they lack.

uvicorn's parser keeps the beginning of a request for any time and in any length, and takes quadratic time for it. So
there are limits for the bytes and the seconds until a request's headers are complete, for the seconds in which a client
may go on sending a body that was answered already, for those in which it reads nothing of its response, and for those
between requests. Bytes that are not HTTP are answered with OpenAI's error object. Knows neither the application nor the
settings.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import sys
import termios
from collections import deque
from collections.abc import Callable, Iterable
from http import HTTPStatus

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.api.http.errors import ApiError, make_headers_error

LINGER = 5.0  # seconds; closing at once can take the response away from a client that is still sending
# Requests without a response; with more, nothing is read, so that a disconnect is not noticed
MAX_PIPELINED_REQUESTS = 16
Headers = Iterable[tuple[bytes, bytes]]  # their names in lower case


def make_connection_class(
    max_header_bytes: int, header_timeout: float, body_timeout: float, on_refusal: Callable[[int], None]
) -> type[HttpToolsProtocol]:
    """Return the class of which uvicorn makes one for each connection; `on_refusal` gets the status of each refusal."""

    class Bounded(BoundedConnection):
        header_bytes_limit = max_header_bytes
        header_seconds = header_timeout
        unread_seconds = body_timeout

    # Set here: in the body of the class, its name would hide the parameter.
    Bounded.on_refusal = staticmethod(on_refusal)
    return Bounded


class BoundedConnection(HttpToolsProtocol):
    """A connection.

    The parser calls on_message_begin, on_headers_complete, on_body, on_message_complete, in this order.
    """

    header_bytes_limit: int
    header_seconds: float
    unread_seconds: float
    on_refusal: Callable[[int], None]

    _unanswered: deque[RequestResponseCycle]  # the first one runs, the others wait; `cycle` is the latest
    _receive_timer: asyncio.TimerHandle | None = None  # for what the client has to send next
    _write_timer: asyncio.TimerHandle | None = None  # for what it has to read
    _num_unparsed_bytes = 0  # which the parser may keep, as they completed nothing
    _made_progress = False  # whether the bytes that are being parsed completed something
    _in_headers = False  # the client has sent some of them, but not all
    _in_body = False  # the client has sent the headers, but not the whole body
    _refused = False  # nothing more is read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._unanswered = deque()
        self._start_receive_timer(self.header_seconds, self._on_header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_receive_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()
        self._disconnect_cycles()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse bytes as uvicorn does; but those that begin no request do not keep the connection open."""
        if self._refused:
            return
        self._made_progress = False
        try:
            self._parse(memoryview(data))
        except HttpParserError as error:
            cause = error.__context__  # what one of the methods below raised
            self._refuse(
                cause if isinstance(cause, ApiError) else make_http_error("this is not a valid HTTP/1.1 request")
            )
        self._num_unparsed_bytes = 0 if self._made_progress else self._num_unparsed_bytes + len(data)
        if self._num_unparsed_bytes > self.header_bytes_limit and not self._refused:
            self._refuse(make_headers_error(self.header_bytes_limit))

    def _parse(self, data: memoryview) -> None:
        """Parse a head that offers another protocol again without the offer: the parser takes no body after it."""
        while True:
            try:
                return self.parser.feed_data(data)
            except HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                method, version = self.parser.get_method(), self.parser.get_http_version()
                self.parser = HttpRequestParser(self)  # the other one may have ended with that request
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
                self.parser.feed_data(make_head_without_upgrade(method, self.url, version, self.headers))

    # ------------------------------------------------------------ called by the parser
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True
        self._start_receive_timer(self.header_seconds, self._on_header_timeout)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # else it comes after a body, where no header counts
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        check_head(self.parser.get_method(), self.parser.get_http_version(), self.headers)
        if self.parser.should_upgrade():  # it comes again
            return
        super().on_headers_complete()
        self._unanswered.append(self.cycle)
        if self.cycle.scope["http_version"] == "1.0":
            disable_chunked_encoding(self.cycle)
        if len(self._unanswered) <= MAX_PIPELINED_REQUESTS:  # uvicorn would not read on
            self.flow.resume_reading()
        self._made_progress = self._in_body = True
        self._in_headers = False
        self._cancel_receive_timer()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._made_progress = True

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._made_progress, self._in_body = True, False
        self._expect_next_request()

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()
        self._unset_keepalive_if_required()  # the timer of uvicorn, which ends with whatever comes
        if not self._in_headers:
            self._expect_next_request()

    def _disconnect_cycles(self) -> None:
        """Mark every unanswered request as disconnected; uvicorn marks the latest one only."""
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()

    # ------------------------------------------------------------ time
    def pause_writing(self) -> None:
        """Wait for a client that does not read: the buffers on the way to it are full."""
        super().pause_writing()
        self._start_write_timer()

    def _start_write_timer(self) -> None:
        self._write_timer = self.loop.call_later(
            self.unread_seconds, self._abort_unless_drained, count_unread_bytes(self.transport)
        )

    def _abort_unless_drained(self, unread: int) -> None:
        if count_unread_bytes(self.transport) < unread:
            self._start_write_timer()
        else:
            self.transport.abort()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def _start_receive_timer(self, seconds: float, on_timeout: Callable[[], None]) -> None:
        self._cancel_receive_timer()
        self._receive_timer = self.loop.call_later(seconds, on_timeout)

    def _cancel_receive_timer(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    def _expect_next_request(self) -> None:
        """Start the timer for the next request, or for the rest of a body that was answered before it was complete."""
        if self._unanswered:
            self._cancel_receive_timer()
        elif self._in_body:
            self._start_receive_timer(LINGER, self.transport.close)
        else:
            self._start_receive_timer(self.timeout_keep_alive, self.transport.close)

    def _on_header_timeout(self) -> None:
        if self._unanswered:  # the request before
            self._start_receive_timer(self.header_seconds, self._on_header_timeout)
        elif self._in_headers:
            message = f"no complete headers came within {self.header_seconds:g} seconds"
            self._refuse(ApiError(408, message, code="header_timeout"))
        else:  # no request has begun, so there is nothing to answer
            self.transport.close()

    # ------------------------------------------------------------ refusals, without the application
    def _refuse(self, error: ApiError) -> None:
        """Answer with the error, and close the connection once the client has had time to read it."""
        self._refused = True
        self.logger.info("a connection is refused: %d, %s", error.status_code, error.log_message)
        if self.transport.is_closing():
            return
        self._disconnect_cycles()
        if self._unanswered and self._unanswered[0].response_started:
            self.transport.close()
            return
        self.on_refusal(error.status_code)
        self.transport.write(format_error_response(error, self.server_state.default_headers))
        self.transport.write_eof()
        self._start_receive_timer(LINGER, self.transport.close)


def count_unread_bytes(transport: asyncio.Transport) -> int:
    """Return the bytes that the client has not read: those buffered here, and those in the system's send queue.

    The system takes more bytes only once a third of its queue was read.
    """
    kept = bytes(4)
    with contextlib.suppress(OSError):  # not every system has this call
        kept = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, kept)
    return transport.get_write_buffer_size() + int.from_bytes(kept, sys.byteorder)


# ---------------------------------------------------------------- what RFC 9112 asks of a server beyond uvicorn
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
    """Send the response without chunks, which HTTP/1.0 does not have: there the connection's end is the response's."""
    send = cycle.send
    cycle.chunked_encoding = False

    async def send_plain(message: ASGISendEvent) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))  # uvicorn lets no more through
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]


def format_error_response(error: ApiError, default_headers: Headers) -> bytes:
    """Return the whole response to a request that the application never gets."""
    body = error.encode()
    status = f"HTTP/1.1 {error.status_code} {HTTPStatus(error.status_code).phrase}"
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    lines = [status, *(f"{name}: {value}" for name, value in (headers | (dict(error.headers or {}))).items())]
    head = "\r\n".join(lines).encode() + b"".join(b"\r\n%s: %s" % header for header in default_headers)
    return head + b"\r\n\r\n" + body
