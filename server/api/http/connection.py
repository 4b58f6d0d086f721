"""uvicorn's connections, with limits of size and time that uvicorn lacks.

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

# Seconds from a response before the end of a request's body to closing the connection; if it was closed at once, a
# client that still sends could lose the response
LINGER = 5.0
# Most unanswered requests of a connection; with more, nothing is read from it, and a disconnect is not noticed
MAX_PIPELINED_REQUESTS = 16
Headers = Iterable[tuple[bytes, bytes]]  # pairs of a header's name, in lower case, and its value


def make_connection_class(
    max_header_bytes: int, header_timeout: float, body_timeout: float, on_refusal: Callable[[int], None]
) -> type[HttpToolsProtocol]:
    """Return a connection class for uvicorn with these limits (bytes, seconds).

    `on_refusal` is called with the HTTP status of each request that the connection itself refuses.
    """

    class Bounded(BoundedConnection):
        header_bytes_limit = max_header_bytes
        header_seconds = header_timeout
        unread_seconds = body_timeout

    # `on_refusal` is set outside of the class body, where the attribute would hide the parameter of the same name.
    Bounded.on_refusal = staticmethod(on_refusal)
    return Bounded


class BoundedConnection(HttpToolsProtocol):
    """A client's connection, with limits on the size and the time of what it sends and reads.

    The HTTP parser calls on_message_begin, on_headers_complete, on_body, on_message_complete, in this order.
    """

    header_bytes_limit: int
    header_seconds: float
    unread_seconds: float
    on_refusal: Callable[[int], None]

    _unanswered: deque[RequestResponseCycle]  # requests to answer: the first runs, the others wait
    _receive_timer: asyncio.TimerHandle | None = None  # limits the time until the client sends more
    _write_timer: asyncio.TimerHandle | None = None  # limits the time until the client reads more
    _num_unparsed_bytes = 0  # bytes received since the parser last completed something
    _made_progress = False  # whether the bytes being parsed completed headers or a piece of a body
    _in_headers = False  # whether the client has sent some of a request's headers, but not all
    _in_body = False  # whether the client has sent a request's headers, but not its whole body
    _ends = False  # the connection ends with the response that is sent, and with the rest of its request's body
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
        """Parse bytes as uvicorn does, but bytes before a request (blank lines) do not stop the keep-alive timer."""
        if self._refused:
            return
        self._made_progress = False
        try:
            self._parse(memoryview(data))
        except HttpParserError as error:
            cause = error.__context__  # the exception that one of the parser's callbacks raised
            self._refuse(
                cause if isinstance(cause, ApiError) else make_http_error("this is not a valid HTTP/1.1 request")
            )
        self._num_unparsed_bytes = 0 if self._made_progress else self._num_unparsed_bytes + len(data)
        if self._num_unparsed_bytes > self.header_bytes_limit and not self._refused:
            self._refuse(make_headers_error(self.header_bytes_limit))

    def _parse(self, data: memoryview) -> None:
        """Parse bytes. Headers with Upgrade are parsed again without it: the parser would take no body after them."""
        while True:
            try:
                return self.parser.feed_data(data)
            except HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                method, version = self.parser.get_method(), self.parser.get_http_version()
                self.parser = HttpRequestParser(self)  # the old parser may take no more bytes after that request
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
                self.parser.feed_data(make_head_without_upgrade(method, self.url, version, self.headers))

    # ------------------------------------------------------------ called by the parser
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True
        self._start_receive_timer(self.header_seconds, self._on_header_timeout)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # otherwise the header is a trailer after a body, which is ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        check_head(self.parser.get_method(), self.parser.get_http_version(), self.headers)
        if self.parser.should_upgrade() or self._ends:  # it comes again, or is not answered
            return
        super().on_headers_complete()
        self._unanswered.append(self.cycle)
        if self.cycle.scope["http_version"] == "1.0":
            disable_chunked_encoding(self.cycle)
        defer_close(self.cycle, self._end_after_response)
        if len(self._unanswered) <= MAX_PIPELINED_REQUESTS:  # keep reading, unlike uvicorn, while requests wait
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
        if self._ends:
            self.transport.close()
        else:
            self._expect_next_request()

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        is_complete = bool(self._unanswered) or not self._in_body  # the request of this response
        if self._ends and is_complete:
            self.transport.close()
        super().on_response_complete()
        if self._ends and not self.transport.is_closing():  # closed now, the client could lose the response
            self.transport.write_eof()
        self._unset_keepalive_if_required()  # any byte ends uvicorn's keep-alive timer; `_receive_timer` replaces it
        if not self._in_headers:
            self._expect_next_request()

    def _end_after_response(self) -> None:
        self._ends = True

    def _disconnect_cycles(self) -> None:
        """Mark every unanswered request as disconnected; uvicorn marks the latest one only."""
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()

    # ------------------------------------------------------------ time
    def pause_writing(self) -> None:
        """Start the timer for a client that does not read: the buffers on the way to it are full."""
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
        else:  # no request has begun: close without a response
            self.transport.close()

    # ------------------------------------------------------------ refusals, without the application
    def _refuse(self, error: ApiError) -> None:
        """Answer with the error, and close the connection LINGER seconds later, so that the client can read it."""
        self._refused = True
        self.logger.info("a connection is refused: %d, %s", error.status_code, error.log_message)
        if self.transport.is_closing():
            return
        self._disconnect_cycles()
        if self._ends or (self._unanswered and self._unanswered[0].response_started):
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
    with contextlib.suppress(OSError):  # not every system has the ioctl TIOCOUTQ
        kept = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, kept)
    return transport.get_write_buffer_size() + int.from_bytes(kept, sys.byteorder)


# ---------------------------------------------------------------- rules of RFC 9112 that uvicorn does not enforce
def make_http_error(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_http")


def check_head(method: bytes, version: str, headers: Headers) -> None:
    """Raise ApiError for request headers that the parser accepts, but a proxy may read in another way."""
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
    """Return a request line and its headers as bytes, without the header Upgrade."""
    kept = [b"%s: %s\r\n" % (name, value) for name, value in headers if name != b"upgrade"]
    return b"%s %s HTTP/%s\r\n%s\r\n" % (method, url, version.encode(), b"".join(kept))


def disable_chunked_encoding(cycle: RequestResponseCycle) -> None:
    """Send the response without chunks, which HTTP/1.0 lacks: there the end of the connection ends the response."""
    send = cycle.send
    cycle.chunked_encoding = False

    async def send_plain(message: ASGISendEvent) -> None:
        if message["type"] == "http.response.body":
            # uvicorn raises an error if a body has more or fewer bytes than expected.
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]


def defer_close(cycle: RequestResponseCycle, end_after_response: Callable[[], None]) -> None:
    """Call a function with the end of a response after which uvicorn would close the connection, instead of that."""
    send = cycle.send

    async def send_and_keep(message: ASGISendEvent) -> None:
        is_end = message["type"] == "http.response.body" and not message.get("more_body", False)
        if is_end and not cycle.keep_alive:
            cycle.keep_alive = True  # the header `Connection: close` was sent with the beginning
            end_after_response()
        await send(message)

    cycle.send = send_and_keep  # type: ignore[method-assign]


def format_error_response(error: ApiError, default_headers: Headers) -> bytes:
    """Return the bytes of an error response to a request that does not reach the application."""
    body = error.encode()
    status = f"HTTP/1.1 {error.status_code} {HTTPStatus(error.status_code).phrase}"
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    lines = [status, *(f"{name}: {value}" for name, value in (headers | (dict(error.headers or {}))).items())]
    head = "\r\n".join(lines).encode() + b"".join(b"\r\n%s: %s" % header for header in default_headers)
    return head + b"\r\n\r\n" + body
