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

from server.api.connection import connections
from tests.api.raw import PATIENCE, connect, get, read

BIG = 12 * 2**20  # more than fits between the two ends
OFFER = ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"]  # as curl --http2
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"


class Application:
    """Notes what it hears, and whose client went away. What it does depends on the path."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, bytes]] = []
        self.headers: list[set[str]] = []  # their names
        self.waiting: queue.Queue[str] = queue.Queue()  # paths
        self.left: queue.Queue[str] = queue.Queue()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        path = request.url.path
        if path != "/early":
            self.heard.append((path, await request.body()))
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
        http=connections(2**16, 20, unread_seconds),
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


@pytest.fixture
def app() -> Application:
    return Application()


@pytest.fixture
def url(app: Application) -> Iterator[str]:
    with served(app) as url:
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


# ---------------------------------------------------------------- requests before the answer to the first
@pytest.mark.parametrize("path", ["/silent", "/endless"])
@pytest.mark.parametrize("together", [True, False])
def test_a_client_that_leaves(app: Application, url: str, path: str, together: bool) -> None:
    with connect(url, get(path) + get("/next") * together) as connection:
        app.waiting.get(timeout=PATIENCE)
        connection.sendall(b"" if together else get("/next"))
    assert app.left.get(timeout=PATIENCE) == path
    assert app.heard == [(path, b"")]


@pytest.mark.parametrize("path", ["/silent", "/endless"])
def test_one_that_is_refused(app: Application, url: str, path: str) -> None:
    """What runs ends. An answer that has begun is cut off, and nothing is written into it."""
    with connect(url, get(path) + get("/next")) as connection:
        app.waiting.get(timeout=PATIENCE)
        connection.sendall(b"BAD\r\n\r\n")
        assert app.left.get(timeout=PATIENCE) == path
        connection.shutdown(socket.SHUT_WR)
        received = rest(connection)
    assert received.startswith(b"HTTP/1.1 400 " if path == "/silent" else b"HTTP/1.1 200 OK")
    assert received.endswith(b"}" if path == "/silent" else b"a piece\r\n")
    assert app.heard == [(path, b"")]


def test_more_of_them_than_are_read_ahead(app: Application, url: str) -> None:
    with connect(url, *[get("/")] * 99, get("/", "Connection: close")) as connection:
        assert rest(connection).count(b"HTTP/1.1 200 OK") == 100


# ---------------------------------------------------------------- time
@pytest.mark.parametrize("sent", [b"", b"\r\n"])
def test_nothing_more_is_asked(app: Application, sent: bytes) -> None:
    with served(app, keep_alive=0.5) as url, connect(url, get("/")) as connection:
        assert read(connection).status_code == 200
        connection.sendall(sent)
        assert connection.recv(1) == b""


def test_nothing_more_is_asked_after_an_answer_that_came_early(app: Application) -> None:
    with served(app, keep_alive=0.5) as url, connect(url, post("/early", b"", "Content-Length: 2")) as connection:
        assert read(connection).status_code == 200
        connection.sendall(b"{}")
        assert connection.recv(1) == b""


def test_a_connection_in_use_is_kept(app: Application) -> None:
    """Both the rest of a head and an answer may take longer than a connection is kept that is not used."""
    slow = get("/slow")
    with served(app, keep_alive=0.3) as url, connect(url, get("/") + slow[:9]) as connection:
        assert read(connection).status_code == 200
        time.sleep(0.7)
        connection.sendall(slow[9:])
        assert read(connection).status_code == 200


@contextlib.contextmanager
def reading(url: str) -> Iterator[socket.socket]:
    """A client of which not much fits into its own buffers."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**18)
        connection.settimeout(PATIENCE)
        connection.connect((httpx.URL(url).host, httpx.URL(url).port))
        connection.sendall(get("/big", "Connection: close"))
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
        time.sleep(2)
        with contextlib.suppress(ConnectionError):
            assert len(rest(connection)) < BIG - 2**20
