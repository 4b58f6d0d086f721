"""What all bodies may take together, and what one may by default."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import select
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from config.errors import SettingsError
from config.settings import MEBIBYTE, Settings, load_settings
from server.api.http import middleware as bounds
from server.api.http.middleware import UNCOUNTED_BYTES
from server.api.openai.generation_job import Job
from server.engine.ipc.messages import Submit
from server.text.processes.messages import Call, Encode, Encoded
from server.text.tokenizer import Tokenizer
from tests.api.conftest import Api, running_api
from tests.api.fake_engine import FakeEngine, generates
from tests.api.payloads import VALID_REQUEST, error_of
from tests.api.raw_http import connect, raw_post, read_response, send_raw
from tests.patience import PATIENCE, eventually
from tests.text.tiny_tokenizers import byte_level

MOST = 2**20  # bytes
LARGE = json.dumps(VALID_REQUEST).encode().ljust(MOST)  # a body


@pytest.fixture(scope="module")
def narrow_api() -> Iterator[Api]:
    """Has room for one large body."""
    with running_api(max_body_bytes=MOST, max_inflight_body_bytes=MOST) as api:
        yield api


@pytest.fixture
def narrow(narrow_api: Api) -> Iterator[Api]:
    with FakeEngine(narrow_api.socket_path, generates([100])):
        narrow_api.await_ready()
        yield narrow_api


def await_refusal(api: Api) -> httpx.Response:
    """The answer to a large body, as soon as it is a refusal."""
    deadline = time.monotonic() + PATIENCE
    while (answer := send_raw(api.url, raw_post(LARGE))).status_code == 200:
        assert time.monotonic() < deadline
    return answer


def await_room(api: Api) -> None:
    eventually(lambda: send_raw(api.url, raw_post(LARGE)).status_code == 200)


@contextlib.contextmanager
def half_sent(api: Api) -> Iterator[socket.socket]:
    with connect(api.url, raw_post(LARGE[: MOST // 2], length=MOST)) as connection:
        yield connection


def test_a_body_that_finds_no_room(narrow: Api) -> None:
    """It is refused with 429; ordinary ones have room all the while, and the one that came first is answered."""
    with half_sent(narrow) as first:
        refused = await_refusal(narrow)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert error_of(refused)["code"] == "inflight_bodies_full"
        assert (
            send_raw(narrow.url, raw_post(json.dumps(VALID_REQUEST).encode().ljust(UNCOUNTED_BYTES))).status_code == 200
        )
        first.sendall(LARGE[MOST // 2 :])
        assert read_response(first).status_code == 200
    assert send_raw(narrow.url, raw_post(LARGE)).status_code == 200


def test_room_is_there_again_when_a_client_leaves(narrow: Api) -> None:
    with half_sent(narrow):
        await_refusal(narrow)
    await_room(narrow)


def test_a_body_that_trickles_keeps_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a byte of it comes long before `body_timeout` every time."""
    monkeypatch.setattr(
        bounds, "MIN_BYTES_PER_SECOND", MOST
    )  # bytes a second, so that this one has a second and a half
    limits = {"max_body_bytes": MOST, "max_inflight_body_bytes": MOST}
    with (
        running_api(**limits, body_timeout=1) as api,
        FakeEngine(api.socket_path, generates([100])),
    ):
        api.await_ready()
        with half_sent(api) as slow:
            await_refusal(api)
            answer = trickle_until_answered(slow)
            assert (answer.status_code, error_of(answer)["code"]) == (408, "body_timeout")
            await_room(api)


def trickle_until_answered(connection: socket.socket) -> httpx.Response:
    deadline = time.monotonic() + PATIENCE
    while not select.select([connection], [], [], 0.05)[0]:
        assert time.monotonic() < deadline, "it keeps its room for as long as it likes"
        connection.sendall(b" ")
    return read_response(connection)


@pytest.mark.parametrize("body", [b"{", b"[" * 100_000, b'{"model": "x", "prompt": "x"}', b'{"n": 0}'])
def test_room_is_there_again_after_an_error(narrow: Api, body: bytes) -> None:
    for _ in range(3):
        assert send_raw(narrow.url, raw_post(body.ljust(MOST))).status_code in (400, 404)
    assert send_raw(narrow.url, raw_post(LARGE)).status_code == 200


class SlowTokenizer(Tokenizer):
    """A tokenizer that answers a call for "held" only once it may go on."""

    def __init__(self) -> None:
        super().__init__(byte_level())
        self.is_waiting, self.may_go_on = threading.Event(), threading.Event()

    async def answer(self, call: Call) -> Encoded:
        if isinstance(call, Encode) and call.text == "held":
            self.is_waiting.set()
            while not self.may_go_on.is_set():
                await asyncio.sleep(0.001)
        return await super().answer(call)


def test_a_body_takes_room_until_its_request_is_with_the_engine() -> None:
    """While it is tokenised, but not while it is answered."""
    tokenizer, body = SlowTokenizer(), json.dumps(VALID_REQUEST | {"prompt": "held"}).encode().ljust(MOST)
    with (
        running_api(tokenizer, max_body_bytes=MOST, max_inflight_body_bytes=MOST) as api,
        FakeEngine(api.socket_path, generates([100])),
    ):
        api.await_ready()
        with connect(api.url, raw_post(body)) as first:
            assert tokenizer.is_waiting.wait(PATIENCE)
            assert send_raw(api.url, raw_post(LARGE)).status_code == 429
            tokenizer.may_go_on.set()
            assert read_response(first).status_code == 200


def test_an_answer_that_goes_on_takes_no_room(narrow_api: Api) -> None:
    with FakeEngine(narrow_api.socket_path, generates([100], None)) as engine:
        narrow_api.await_ready()
        with connect(narrow_api.url, raw_post(LARGE)):
            engine.wait_for(Submit)
            engine.script = generates([100])
            assert send_raw(narrow_api.url, raw_post(LARGE)).status_code == 200


def test_a_connection_keeps_nothing_of_its_last_request(narrow: Api) -> None:
    """It may be idle for a minute, and there may be many."""

    def jobs() -> int:
        return sum(isinstance(each, Job) for each in gc.get_objects())

    gc.collect()
    before = jobs()
    with httpx.Client(base_url=narrow.url, timeout=PATIENCE) as client:
        assert client.post("/v1/completions", json=VALID_REQUEST).status_code == 200

        def is_left() -> bool:
            gc.collect()
            return jobs() <= before

        eventually(is_left)


# ---------------------------------------------------------------- defaults
@pytest.mark.parametrize(
    ("settings", "context", "one", "together"),
    [
        ({}, 256, 3 * MEBIBYTE, 64 * MEBIBYTE),
        ({}, 8192, 17 * MEBIBYTE, 68 * MEBIBYTE),
        ({}, 131_072, 32 * MEBIBYTE, 128 * MEBIBYTE),
        ({"max_choices": 64}, 8192, 5 * MEBIBYTE, 64 * MEBIBYTE),
        ({"max_prompt_characters": 2**24}, 256, 17 * MEBIBYTE, 68 * MEBIBYTE),
        ({"max_body_bytes": 5000}, 8192, 5000, 64 * MEBIBYTE),
        ({"max_body_bytes": 2**26}, 8192, 2**26, 2**28),
        ({"max_inflight_body_bytes": MEBIBYTE}, 8192, MEBIBYTE, MEBIBYTE),
    ],
)
def test_the_default_follows_the_context(settings: dict[str, int], context: int, one: int, together: int) -> None:
    assert Settings(**settings).compute_body_limits(context) == (one, together)


@pytest.mark.parametrize("context", [512, 8192, 32_768])
def test_the_default_has_room_for_what_clients_send(context: int) -> None:
    """A chat as long as the context, half of it escaped, and a batch of 64 prompts of ids."""
    chat = json.dumps("\u4e2d" * context)
    batch = json.dumps([[123_456] * context] * 64)
    assert Settings().compute_body_limits(context)[0] > max(len(chat), len(batch))


def test_one_may_not_be_more_than_all() -> None:
    with pytest.raises(SettingsError, match="max_body_bytes 2000 is more than max_inflight_body_bytes 1024"):
        load_settings(None, {"max_body_bytes": 2000, "max_inflight_body_bytes": 1024})


def test_before_the_context_is_known() -> None:
    """A body that may turn out to be none too long is not refused for good."""
    body = json.dumps(VALID_REQUEST).encode().ljust(4 * MEBIBYTE)
    with running_api(max_choices=1024) as api:
        answer = send_raw(api.url, raw_post(body))
        assert (answer.status_code, error_of(answer)["code"]) == (503, "engine_unavailable")
        with FakeEngine(api.socket_path, generates([100])):
            api.await_ready()
            assert send_raw(api.url, raw_post(body)).status_code == 413
    with running_api(max_body_bytes=MEBIBYTE) as api:
        assert send_raw(api.url, raw_post(body)).status_code == 413
