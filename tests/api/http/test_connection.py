"""Bytes that become requests, or do not, and connections that end. With a small application of our own."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.http.connection import make_connection_class
from tests.api.raw_http import PATIENCE, connect, raw_get, read_response, send_raw

BIG = 12 * 2**20  # more than fits between the two ends
OFFER = ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"]  # as curl --http2
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"


class Application:
    """Notes the requests that it receives, and those whose client disconnected. The path says what it does."""

    def __init__(self) -> None:
        self.begin_again()

    def begin_again(self) -> None:
        self.received: list[tuple[str, bytes]] = []
        self.headers: list[set[str]] = []  # their names
        self.waiting: queue.Queue[str] = queue.Queue()  # paths
        self.left: queue.Queue[str] = queue.Queue()
        self.sent: queue.Queue[str] = queue.Queue()  # that have no more to send, or nobody to send it to

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        path = request.url.path
        if path != "/early":
            self.received.append((path, await request.body()))
            self.headers.append(set(request.headers))
        match path:
            case "/silent" | "/endless":
                if path == "/endless":
                    await begin(send, b"a piece")
                self.waiting.put(path)
                await gone(receive)
                self.left.put(path)
            case "/slow":
                await asyncio.sleep(0.7)
                await Response(path)(scope, receive, send)
            case "/pieces" | "/big":
                await begin(send, *[b"one", b"two"] if path == "/pieces" else [bytes(BIG)])
                await send({"type": "http.response.body"})
                self.sent.put(path)
            case _:
                await Response(path)(scope, receive, send)


async def begin(send: Send, *pieces: bytes) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for piece in pieces:
        await send({"type": "http.response.body", "body": piece, "more_body": True})


async def gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@contextlib.contextmanager
def served(app: Application, unread_seconds: float = 20, keep_alive: float = 20) -> Iterator[str]:
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=make_connection_class(2**16, 20, unread_seconds, lambda _: None),
        ws="none",
        lifespan="off",
        log_config=None,
        timeout_graceful_shutdown=1,  # a test that fails leaves something running
        timeout_keep_alive=keep_alive,  # type: ignore[arg-type]
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def running_app() -> Application:
    return Application()


@pytest.fixture
def app(running_app: Application) -> Application:
    """As new."""
    running_app.begin_again()
    return running_app


@pytest.fixture(scope="module")
def url(running_app: Application) -> Iterator[str]:
    """Kept for all tests: to stop a server takes a while."""
    with served(running_app) as url:
        yield url


def post(path: str, body: bytes, *headers: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", *headers]).encode() + b"\r\n\r\n" + body


def chunked(path: str, body: bytes, *headers: str, trailers: bytes = b"") -> bytes:
    chunks = b"%x\r\n%s\r\n0\r\n%s\r\n" % (len(body), body, trailers)
    return post(path, chunks, "Transfer-Encoding: chunked", *headers)


def rest(connection: socket.socket) -> bytes:
    """All until the server closes the connection."""
    with connection.makefile("rb") as stream:
        return stream.read()


# ---------------------------------------------------------------- the end of a request
@pytest.mark.parametrize("last", ["Connection: close", "Connection: close, Upgrade"])
def test_offers_of_another_protocol_are_ignored(
    app: Application, url: str, last: str, caplog: pytest.LogCaptureFixture
) -> None:
    """However the bytes are split."""
    sent = post("/1", SMUGGLED, *OFFER, f"Content-Length: {len(SMUGGLED)}") + chunked("/2", SMUGGLED, *OFFER)
    sent += raw_get("/3", *OFFER) + post("/4", b"{}", last, "Upgrade: websocket", "Content-Length: 2")
    for cut in range(1, len(sent), 3):
        app.received.clear()
        with connect(url, sent[:cut]) as connection:
            time.sleep(0.001)  # else both pieces are one
            connection.sendall(sent[cut:])
            assert rest(connection).count(b"HTTP/1.1 200 OK\r\n") == 4
        assert app.received == [("/1", SMUGGLED), ("/2", SMUGGLED), ("/3", b""), ("/4", b"{}")]
    assert caplog.records == []


def test_trailers_are_no_headers(app: Application, url: str) -> None:
    with connect(url, chunked("/1", b"{}", trailers=b"Authorization: Bearer key\r\n")) as connection:
        assert read_response(connection).status_code == 200
        connection.sendall(raw_get("/2"))
        assert read_response(connection).status_code == 200
    assert app.headers == [{"host", "transfer-encoding"}, {"host"}]


# ---------------------------------------------------------------- heads
@pytest.mark.parametrize(
    ("sent", "result"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "Host came 0 times"),
        (raw_get("/", "Host: x"), "Host came 2 times"),
        (b"GET / HTTP/1.0\r\nHost: x\r\nHost: y\r\n\r\n", "Host came 2 times"),
        (chunked("/", b"{}").replace(b"chunked", b"gzip\r\nTransfer-Encoding: chunked"), "Transfer-Encoding"),
        (chunked("/", b"{}").replace(b"chunked", b"gzip, chunked"), "Transfer-Encoding"),
        (chunked("/", b"{}").replace(b"HTTP/1.1", b"HTTP/1.0"), "Transfer-Encoding"),
        (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", "HTTP/2.0"),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n", "CONNECT"),
        (raw_get("/", "Host: y", *OFFER), "Host came 2 times"),
    ],
)
def test_heads_that_are_refused(app: Application, url: str, sent: bytes, result: str) -> None:
    answer = send_raw(url, sent)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_http"
    assert result in answer.json()["error"]["message"]
    assert app.received == []


def test_names_of_codings_have_no_case(app: Application, url: str) -> None:
    assert send_raw(url, chunked("/", b"{}").replace(b"chunked", b"Chunked")).status_code == 200
    assert app.received == [("/", b"{}")]


@pytest.mark.parametrize(("path", "body"), [("/pieces", b"onetwo"), ("/whole", b"/whole")])
def test_http_1_0_knows_no_chunks(url: str, path: str, body: bytes) -> None:
    with connect(url, f"GET {path} HTTP/1.0\r\n\r\n".encode()) as connection:
        head, _, received = rest(connection).partition(b"\r\n\r\n")
    assert received == body
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert (b"content-length: 6" in head) is (path == "/whole")
    assert httpx.get(url + path, timeout=PATIENCE).content == body


# ---------------------------------------------------------------- requests before the answer to the first
@pytest.mark.parametrize("path", ["/silent", "/endless"])
@pytest.mark.parametrize("together", [True, False])
def test_a_client_that_leaves(app: Application, url: str, path: str, together: bool) -> None:
    with connect(url, raw_get(path) + raw_get("/next") * together) as connection:
        app.waiting.get(timeout=PATIENCE)
        connection.sendall(b"" if together else raw_get("/next"))
    assert app.left.get(timeout=PATIENCE) == path
    assert app.received == [(path, b"")]


@pytest.mark.parametrize("path", ["/silent", "/endless"])
def test_one_that_is_refused(app: Application, url: str, path: str) -> None:
    """What runs ends. An answer that has begun is cut off, and nothing is written into it."""
    with connect(url, raw_get(path) + raw_get("/next")) as connection:
        app.waiting.get(timeout=PATIENCE)
        connection.sendall(b"BAD\r\n\r\n")
        assert app.left.get(timeout=PATIENCE) == path
        connection.shutdown(socket.SHUT_WR)
        received = rest(connection)
    assert received.startswith(b"HTTP/1.1 400 " if path == "/silent" else b"HTTP/1.1 200 OK")
    assert received.endswith(b"}" if path == "/silent" else b"a piece\r\n")
    assert app.received == [(path, b"")]


def test_more_of_them_than_are_read_ahead(app: Application, url: str) -> None:
    with connect(url, *[raw_get("/")] * 99, raw_get("/", "Connection: close")) as connection:
        assert rest(connection).count(b"HTTP/1.1 200 OK") == 100


# ---------------------------------------------------------------- time
@pytest.mark.parametrize("sent", [b"", b"\r\n"])
def test_nothing_more_is_asked(app: Application, sent: bytes) -> None:
    with served(app, keep_alive=0.5) as url, connect(url, raw_get("/")) as connection:
        assert read_response(connection).status_code == 200
        connection.sendall(sent)
        assert connection.recv(1) == b""


def test_nothing_more_is_asked_after_an_answer_that_came_early(app: Application) -> None:
    with served(app, keep_alive=0.5) as url, connect(url, post("/early", b"", "Content-Length: 2")) as connection:
        assert read_response(connection).status_code == 200
        connection.sendall(b"{}")
        assert connection.recv(1) == b""


@pytest.mark.parametrize("behind", [b"", raw_get("/behind"), b"BAD\r\n\r\n"])
def test_the_rest_of_a_body_is_read_before_the_connection_ends(app: Application, url: str, behind: bytes) -> None:
    """The answer is complete before, and nothing behind the body is answered."""
    with connect(url, post("/early", b"", "Connection: close", f"Content-Length: {BIG}")) as connection:
        assert rest(connection).endswith(b"\r\n\r\n/early")
        for _ in range(BIG // 2**20):
            connection.sendall(bytes(2**20))  # which the server takes
        with contextlib.suppress(ConnectionError):
            connection.sendall(behind)
        assert rest(connection) == b""
    assert app.received == []


def test_the_rest_of_a_body_is_not_awaited_for_ever(app: Application, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.api.http.connection.LINGER", 0.2)
    with served(app) as url, connect(url, post("/early", b"", "Connection: close", "Content-Length: 99")) as connection:
        assert rest(connection).endswith(b"/early")
        time.sleep(0.5)
        connection.sendall(b"x")  # answered by a reset
        time.sleep(0.1)
        with pytest.raises(ConnectionError):
            connection.sendall(b"x")


def test_a_connection_in_use_is_kept(app: Application) -> None:
    """Both the rest of a head and an answer may take longer than a connection is kept that is not used."""
    slow = raw_get("/slow")
    with served(app, keep_alive=0.3) as url, connect(url, raw_get("/") + slow[:9]) as connection:
        assert read_response(connection).status_code == 200
        time.sleep(0.7)
        connection.sendall(slow[9:])
        assert read_response(connection).status_code == 200


@contextlib.contextmanager
def reading(url: str) -> Iterator[socket.socket]:
    """A client of which not much fits into its own buffers."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**18)
        connection.settimeout(PATIENCE)
        connection.connect((httpx.URL(url).host, httpx.URL(url).port))
        connection.sendall(raw_get("/big", "Connection: close"))
        yield connection


def test_a_client_that_reads_slowly_gets_everything(app: Application) -> None:
    got = 0
    with served(app, unread_seconds=1.5) as url, reading(url) as connection:
        while data := connection.recv(2**18, socket.MSG_WAITALL):
            got += len(data)
            time.sleep(0.08)
    assert got > BIG


def test_a_client_that_stops_to_read_is_cut_off(app: Application) -> None:
    with served(app, unread_seconds=0.5) as url, reading(url) as connection:
        connection.recv(2**20, socket.MSG_WAITALL)
        app.sent.get(timeout=PATIENCE)
        with contextlib.suppress(ConnectionError):
            assert len(rest(connection)) < BIG - 2**20
