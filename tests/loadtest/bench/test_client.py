"""The client against a stub: reading what the server is, completions, and errors."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpx
import pytest

from loadtest.bench.client import ServerError, open_client, read_server_info, send_completion
from loadtest.bench.types import BenchRequest, Outcome, ServerInfo
from tests.loadtest.stub_server import CACHED_TOKENS, CONTEXT, VOCABULARY, StubServer, running_stub

Found = TypeVar("Found")
REQUEST = BenchRequest([300, 301, 302, 303], 6)


def asked(url: str, what: Callable[[httpx.AsyncClient], Awaitable[Found]], key: str = "") -> Found:
    async def ask() -> Found:
        async with open_client(url, key) as client:
            return await what(client)

    return asyncio.run(ask())


def outcome(stub: StubServer, model: str, key: str = "", **more: object) -> Outcome:
    return asked(stub.url, lambda client: send_completion(client, model, REQUEST, more), key)


def looked(url: str, model: str = "") -> ServerInfo:
    return asked(url, lambda client: read_server_info(client, model))


def test_a_completion() -> None:
    with running_stub("tiny") as stub:
        found = outcome(stub, "tiny", priority=3, stream_options=None)
    reply = found.reply
    assert found.error is None
    assert found.requested_tokens == reply.completion_tokens == len(reply.arrival_times) == 6
    assert reply.text == " word\u2028" * 6  # a separator of lines in Unicode, and none of a stream's
    assert (reply.prompt_tokens, reply.cached_tokens) == (4, CACHED_TOKENS)
    assert reply.end_time is not None
    assert found.send_time <= reply.arrival_times[0] <= reply.arrival_times[-1] <= reply.end_time
    assert stub.seen == [
        (
            "/v1/completions",
            {
                "model": "tiny",
                "prompt": [300, 301, 302, 303],
                "max_tokens": 6,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "priority": 3,
            },
        )
    ]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("busy", "HTTP 429: too many requests wait"),
        ("failing", "error in the stream: the engine is gone"),
        ("breaking", "incomplete chunked read"),
        ("odd", "Expected `int | null`, got `str`"),
    ],
)
def test_failures(model: str, message: str) -> None:
    with running_stub("tiny") as stub:
        found = outcome(stub, model)
    assert found.error is not None
    assert message in found.error
    assert found.reply.end_time is None


@pytest.mark.parametrize("closed", [1, 2])
def test_a_request_on_a_closed_connection_is_sent_once_more(closed: int) -> None:
    """The first connections end without a response."""
    connections = 0
    events = b'data: {"choices": [{"text": "x"}]}\n\ndata: [DONE]\n\n'

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        if connections > closed:
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + events)
            await writer.drain()
        writer.close()

    async def send() -> Outcome:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        async with server, open_client(f"http://{host}:{port}") as client:
            return await send_completion(client, "tiny", REQUEST)

    found = asyncio.run(send())
    assert connections == 2
    if closed == 1:
        assert (found.error, found.reply.text) == (None, "x")
    else:
        assert found.error is not None
        assert "disconnected" in found.error


def test_keys() -> None:
    with running_stub("tiny", key="secret") as stub:
        assert outcome(stub, "tiny").error == "HTTP 401: no such key"
        assert outcome(stub, "tiny", key="secret").error is None
        with pytest.raises(ServerError, match="HTTP 401: no such key; see --api-key"):
            looked(stub.url)


def test_whoever_leaves_hangs_up() -> None:
    """As when the user stops the benchmark."""

    async def leave(client: httpx.AsyncClient) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await send_completion(client, "slow", BenchRequest([1], 1000))

    with running_stub("tiny") as stub:
        asked(stub.url, leave)
        assert stub.wait_until(lambda seen: len(seen) == 1)
        assert stub.hung_up == 1


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_what_a_server_is(path: str) -> None:
    with running_stub("tiny", "tiny:paged", "tiny:window") as stub:
        server = looked(stub.url + path)
    assert server.url == stub.url
    assert server.listing.model == "tiny"
    assert server.listing.max_model_len == CONTEXT
    assert list(server.listing.strategies) == ["paged", "window"]
    assert server.version == "0.0"
    assert server.vocabulary.pieces == VOCABULARY


def test_a_server_without_tokens_gets_words() -> None:
    with running_stub("tiny", tokenizes=False) as stub:
        assert not looked(stub.url).vocabulary.has_token_ids


@pytest.mark.parametrize("ids", [[1, 1e300], [1, 1 << 63], [1, 1 << 30], [-1], [True], "12", {"0": 1}, None])
def test_odd_ids_are_none(ids: object) -> None:
    with running_stub("tiny") as stub:
        stub.ids = ids
        assert not looked(stub.url).vocabulary.has_token_ids


def test_no_server() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ServerError, match=rf"no server answers at {url} .*start one \(kvmux serve\)"):
            looked(url)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "localhost", "ftp://localhost"])
def test_no_address(url: str) -> None:
    with pytest.raises(ServerError, match="a URL has to begin with http"):
        looked(url)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:99999", "http://127.0.0.1:-1", "http://[::1", "http://h/\ud800", "http://h:1\n"]
)
def test_an_address_that_cannot_be(url: str) -> None:
    with pytest.raises(ServerError, match=r"--url 'http:.*': ") as caught:
        looked(url)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["ü€", "a\nb", "a b", "a\r", "\x00"])
def test_what_is_no_key(key: str) -> None:
    with (
        running_stub("tiny") as stub,
        pytest.raises(ServerError, match="--api-key or OPENAI_API_KEY: a key consists of ASCII"),
    ):
        outcome(stub, "tiny", key=key)


def test_another_kind_of_server() -> None:
    with running_stub() as stub:
        with pytest.raises(ServerError, match="the server lists no model"):
            looked(stub.url)
        with pytest.raises(ServerError, match="does not list its models: HTTP 404"):
            looked(stub.url + "/elsewhere")
    with running_stub("tiny") as stub:
        stub.context = float("inf")
        with pytest.raises(ServerError, match="is not OpenAI-compatible"):
            looked(stub.url)
