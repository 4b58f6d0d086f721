"""The socket between API workers and engine, from both ends."""

from __future__ import annotations

import asyncio
import queue
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from server.engine.ipc import server as server_module
from server.engine.ipc.client import EngineLost
from server.engine.ipc.messages import Admitted, Answer, Cancel, FromEngine, Query, SamplingParams, Submit, Tokens
from server.engine.ipc.server import (
    EngineServer,
    WorkerConnection,
    WorkerDisconnected,
    encode_events,
    make_message_decoder,
)
from server.engine.ipc.socket_client import EngineSocket, SocketClient, encode_message, make_event_decoder
from server.processes import framing
from server.processes.framing import WireError
from tests.api.fake_engine import HELLO
from tests.patience import PATIENCE

SUBMIT = Submit("r-0", [1, 2, 3], SamplingParams(5, seed=2**63 - 1), "paged", "header", -3)
EVENTS: list[FromEngine] = [
    HELLO,
    Admitted("r", "paged", "default", 4),
    Tokens("r", [1], "stop"),
    Answer(3, b"\x00\xff"),
]


def read(*pieces: bytes) -> list[object]:
    frames = make_message_decoder()
    return [message for piece in pieces for message in frames.feed(piece)]


def test_messages_survive_the_wire() -> None:
    sent = [SUBMIT, Cancel("r-0"), Query(7, "metrics")]
    data = b"".join(map(encode_message, sent))
    assert read(data) == sent
    assert read(data[:3], data[3:50], data[50:]) == sent
    assert read(*(data[i : i + 1] for i in range(len(data)))) == sent
    assert [*make_event_decoder().feed(encode_events(EVENTS) + encode_events([]))] == [EVENTS, []]


def test_a_message_is_there_once_its_last_byte_is() -> None:
    one, other = encode_message(SUBMIT), encode_message(Cancel("r-0"))
    frames = make_message_decoder()
    assert [*frames.feed(one[:9])] == []
    assert [*frames.feed(one[9:] + other[:2])] == [SUBMIT]
    assert [*frames.feed(other[2:])] == [Cancel("r-0")]


def test_half_a_message_is_none() -> None:
    assert read(encode_message(SUBMIT)[:-1]) == []


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x01\xc1",
        b"\x00\x00\x00\x00",
        encode_events([]),
        b"GET / HTTP/1.1\r\n",
    ],
)
def test_other_bytes_are_an_error(data: bytes) -> None:
    with pytest.raises(WireError):
        read(data)


def test_a_message_that_is_too_long_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "MAX_FRAME_BYTES", 10)
    with pytest.raises(WireError):
        encode_message(SUBMIT)


# ---------------------------------------------------------------- the server
@pytest.fixture
def server(socket_path: Path) -> Iterator[EngineServer]:
    with EngineServer(socket_path, HELLO) as server:
        yield server


def connect(path: Path) -> socket.socket:
    worker = socket.socket(socket.AF_UNIX)
    worker.settimeout(PATIENCE)
    worker.connect(str(path))
    return worker


def receive(worker: socket.socket) -> list[FromEngine]:
    (length,) = struct.unpack(">I", worker.recv(4, socket.MSG_WAITALL))
    return msgspec.msgpack.decode(worker.recv(length, socket.MSG_WAITALL), type=list[FromEngine])


def test_workers_get_a_hello_an_id_and_a_disconnected_message(server: EngineServer, socket_path: Path) -> None:
    with connect(socket_path) as one, connect(socket_path) as two:
        assert receive(one) == receive(two) == [HELLO]
        one.sendall(encode_message(SUBMIT) + encode_message(Cancel("r-0")))
        first, message = server.inbox.get(timeout=PATIENCE)
        assert message == SUBMIT
        assert server.inbox.get(timeout=PATIENCE) == (first, Cancel("r-0"))
        two.sendall(encode_message(Cancel("other")))
        second, _ = server.inbox.get(timeout=PATIENCE)
        assert second != first
        server.send(second, EVENTS)
        server.send(first, EVENTS[:2])
        assert receive(one) == EVENTS[:2]
        assert receive(two) == EVENTS
        one.close()
        assert server.inbox.get(timeout=PATIENCE) == (first, WorkerDisconnected())
        server.send(first, EVENTS)
        server.send(12345, EVENTS)
        server.send(second, [])
        assert receive(two) == []


def test_a_worker_that_sends_other_bytes_is_disconnected(
    server: EngineServer, socket_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(socket_path) as worker:
        receive(worker)
        worker.sendall(b"\x00\x00\x00\x01\xc1")
        assert server.inbox.get(timeout=PATIENCE)[1] == WorkerDisconnected()
        assert worker.recv(1) == b""
    assert "holds no message" in caplog.text


def test_a_worker_that_does_not_read_holds_up_no_other(
    server: EngineServer, socket_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "MAX_UNREAD_BYTES", 2**20)
    with connect(socket_path) as stuck, connect(socket_path) as fine:
        stuck.sendall(encode_message(Cancel("r")))
        stuck_id, _ = server.inbox.get(timeout=PATIENCE)
        fine.sendall(encode_message(Cancel("r")))
        fine_id, _ = server.inbox.get(timeout=PATIENCE)
        for _ in range(50):
            server.send(stuck_id, [Answer(0, bytes(100_000))])
        server.send(fine_id, EVENTS)
        assert [receive(fine), receive(fine)] == [[HELLO], EVENTS]
        assert server.inbox.get(timeout=PATIENCE) == (stuck_id, WorkerDisconnected())
    assert "does not read" in caplog.text


def test_what_waits_for_a_worker_that_has_gone_is_dropped() -> None:
    ours, theirs = socket.socketpair()
    outbox = WorkerConnection(ours)
    assert outbox.send(bytes(2**22)) > 0, "the socket has room for all of it"
    theirs.close()
    assert outbox.send(b"") == outbox.send(b"more") == 0
    outbox.close()


def test_the_socket_is_private_and_goes_with_the_server(socket_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(socket_path))  # left behind by an engine that was killed
    server = EngineServer(socket_path, HELLO)
    server.start()
    assert stat.S_IMODE(socket_path.stat().st_mode) == 0o600
    with connect(socket_path) as worker:
        receive(worker)
        server.close()
        assert worker.recv(1) == b""
    assert server.inbox.get_nowait()[1] == WorkerDisconnected()
    assert not socket_path.exists()
    server.send(0, EVENTS)
    server.close()


def test_a_socket_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file or directory"):
        EngineServer(tmp_path / "nowhere" / "engine.sock", HELLO).start()


# ---------------------------------------------------------------- the client
async def ready(client: SocketClient) -> None:
    while client.hello is None:
        await asyncio.sleep(0.002)


def test_leaving_a_stream_cancels_what_still_runs(server: EngineServer, socket_path: Path) -> None:
    submits = [Submit(f"r-{i}", [1], SamplingParams(1)) for i in range(3)]

    async def use() -> list[object]:
        async with SocketClient(socket_path) as client:
            await ready(client)
            async with client.stream(submits) as stream:
                worker_id = (await asyncio.to_thread(server.inbox.get))[0]
                # r-0 ends, and r-1 is cancelled with its end on the way: no more of its events are delivered
                server.send(worker_id, [Tokens("r-0", [5], "stop"), Tokens("r-1", [6]), Tokens("r-1", [7], "stop")])
                received = [await anext(stream), await anext(stream)]
                stream.cancel("r-1")
                stream.cancel("r-1")
                server.send(worker_id, [Tokens("r-2", [8])])
                return [*received, await anext(stream)]

    assert asyncio.run(use()) == [Tokens("r-0", [5], "stop"), Tokens("r-1", [6]), Tokens("r-2", [8])]
    sent = [message for _, message in drained(server)]
    assert sent == [*submits[1:], Cancel("r-1"), Cancel("r-2"), WorkerDisconnected()]


def test_a_stream_ends_with_its_last_request(server: EngineServer, socket_path: Path) -> None:
    async def use() -> list[object]:
        async with SocketClient(socket_path) as client:
            await ready(client)
            async with client.stream([SUBMIT]) as stream:
                server.send((await asyncio.to_thread(server.inbox.get))[0], [Tokens("r-0", [5], "stop")])
                return [event async for event in stream]

    assert asyncio.run(use()) == [Tokens("r-0", [5], "stop")]
    assert [message for _, message in drained(server)] == [WorkerDisconnected()]


def test_nothing_is_sent_over_a_connection_that_is_closing(server: EngineServer, socket_path: Path) -> None:
    async def use() -> None:
        async with SocketClient(socket_path) as client:
            await ready(client)
            assert client._socket._connection is not None
            client._socket._connection.transport.close()
            with pytest.raises(EngineLost):
                async with client.stream([SUBMIT]):
                    pass

    asyncio.run(use())


def test_a_lost_engine_ends_everything_at_once(socket_path: Path) -> None:
    async def use() -> None:
        server = EngineServer(socket_path, HELLO)
        server.start()
        async with SocketClient(socket_path) as client:
            await ready(client)
            query = asyncio.ensure_future(client.query("metrics"))
            async with client.stream([SUBMIT]) as stream:
                messages = [await asyncio.to_thread(server.inbox.get) for _ in range(2)]
                server.send(messages[0][0], [Tokens("r-0", [5])])
                assert await anext(stream) == Tokens("r-0", [5])
                await asyncio.to_thread(server.close)
                with pytest.raises(EngineLost, match="went away"):
                    await anext(stream)
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)
            with pytest.raises(EngineLost):
                await query
            with pytest.raises(EngineLost, match="not ready"):
                await client.query("metrics")
            with pytest.raises(EngineLost, match="not ready"):
                async with client.stream([SUBMIT]):
                    pass
            with EngineServer(socket_path, HELLO):
                await ready(client)

    asyncio.run(asyncio.wait_for(use(), PATIENCE))


@pytest.mark.parametrize("expected", [True, False])
def test_a_connection_that_is_the_last_ends_without_a_warning(
    socket_path: Path, caplog: pytest.LogCaptureFixture, expected: bool
) -> None:
    async def use() -> None:
        lost = asyncio.Event()
        greeted = asyncio.Event()
        link = EngineSocket(socket_path, lambda _: greeted.set(), lost.set)
        staying = asyncio.create_task(link.stay_connected())
        with EngineServer(socket_path, HELLO):
            await greeted.wait()
            if expected:
                link.finish()
                assert link.send(Cancel("r-0")), "the connection is still of use"
        await lost.wait()
        if not expected:
            link.finish()
        await staying

    asyncio.run(asyncio.wait_for(use(), PATIENCE))
    assert ("the engine hung up; connecting again" in caplog.messages) is not expected


def drained(server: EngineServer) -> list[tuple[int, object]]:
    """What is in the inbox, up to the worker's end."""
    messages: list[tuple[int, object]] = []
    while not messages or messages[-1][1] != WorkerDisconnected():
        messages.append(server.inbox.get(timeout=PATIENCE))
    with pytest.raises(queue.Empty):
        server.inbox.get_nowait()
    return messages
