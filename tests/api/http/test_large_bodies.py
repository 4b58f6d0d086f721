"""The largest bodies of every shape that costs: others are answered meanwhile, and little memory is kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import httpx
import msgspec
import pytest

from tests.api.fake_engine import HELLO
from tests.api.payloads import error_of
from tests.api.worker_process import Worker, running_worker
from tests.patience import PATIENCE

MOST = 32 * 2**20  # bytes, the largest default
LONGEST_TURN = 0.5  # seconds in which /health is not answered
ORDINARY_DECODING = 0.12  # seconds of a processor for 28 MiB of integers
COMPLETION, CHAT = b'{"model": "tiny", "prompt": "x", ', b'{"model": "tiny", "messages": ['
CALL = b'{"function": {"name": "f", "arguments": '
IDS, FULL_PROMPT = b'{"model": "tiny", "prompt": [', b",".join([b"300"] * 16_000)


class Large(NamedTuple):
    """A body: `unit` as often as there is room for it between `head` and `tail`."""

    name: str
    path: str
    head: bytes
    unit: bytes
    tail: bytes
    status: int = 400
    most: int = MOST

    def bytes(self) -> bytes:
        count = min(self.most, (MOST - len(self.head) - len(self.tail)) // len(self.unit))
        body = self.head + self.unit * count
        return body.removesuffix(b",") + self.tail


def completion(name: str, field: str, head: bytes, unit: bytes, tail: bytes, status: int = 400) -> Large:
    return Large(name, "/v1/completions", COMPLETION + f'"{field}": '.encode() + head, unit, tail + b"}", status)


def prompt(name: str, head: bytes, unit: bytes, tail: bytes, path: str = "/v1/completions") -> Large:
    field = b'"tokens": ' if path == "/detokenize" else b'"prompt": '
    return Large(name, path, b'{"model": "tiny", ' + field + head, unit, tail + b"}")


def chat(name: str, head: bytes, unit: bytes, tail: bytes) -> Large:
    return Large(name, "/v1/chat/completions", CHAT + head, unit, tail + b"]}")


LARGE = [
    completion("arrays where nothing has an effect", "metadata", b'{"a": [', b"[],", b"]}"),
    completion("a text where nothing has an effect", "user", b'"', b"a", b'"', 200),
    completion("an array as the user", "user", b"[", b"[],", b"]"),
    completion("small texts as metadata", "metadata", b"{", b'"key": "value",', b"}"),
    completion("arrays in an unknown field", "other", b"[", b"[],", b"]"),
    completion("deep objects", "metadata", b"", b'{"a":', b"1"),
    completion("biases", "logit_bias", b"{", b'"5": 1,', b"}"),
    completion("numbers of many digits", "seed", b"", b"7", b""),
    completion("numbers to stop at", "stop_token_ids", b"[", b"7,", b"]"),
    completion("options", "stream_options", b"{", b'"a": 1,', b"}"),
    completion("members of the same name", "user", b'"me",', b'"user": "me",', b'"n": 1'),
    completion("a suffix", "suffix", b'"', b"a", b'"'),
    prompt("a text", b'"', b"a", b'"'),
    prompt("a text of escapes", b'"', b"\\u0000", b'"'),
    prompt("a text of backslashes", b'"', b"\\\\", b'"'),
    prompt("a text of quotes", b'"', b',\\"', b'"'),
    prompt("a text in Chinese", b'"', "\u4e2d".encode(), b'"'),
    prompt("no UTF-8", b'"' + "\u4e2d".encode(), b"a", b'\xff"'),
    prompt("ids", b"[", b"7,", b"]"),
    prompt("long ids", b"[", b"123456,", b"]"),
    prompt("ids that end badly", b"[", b"7,", b"true]"),
    prompt("texts", b"[", b'"a",', b"]"),
    prompt("prompts of one id", b"[", b"[7],", b"]"),
    prompt("prompts of many ids", b"[", b"[" + b"7," * 16_000 + b"7],", b"]"),
    Large("as many ids as are taken", "/v1/completions", IDS, b"[" + FULL_PROMPT + b"],", b"]}", 200, most=256),
    Large("a prompt for many choices", "/v1/completions", IDS, FULL_PROMPT, b'], "n": 128}', 200, most=1),
    prompt("empty prompts", b"[", b"[],", b"]"),
    prompt("ids to decode", b"[", b"7,", b"]", "/detokenize"),
    prompt("a text to count", b'"', b"a", b'"', "/tokenize"),
    chat("empty messages", b"", b"{},", b""),
    chat("short messages", b"", b'{"role": "user", "content": "x"},', b""),
    chat("a long message", b'{"role": "user", "content": "', b",[", b'"}'),
    chat("parts", b'{"role": "user", "content": [', b'{"type": "text", "text": "x"},', b"]}"),
    chat("arguments", b'{"role": "assistant", "tool_calls": [' + CALL + b'{"a": [', b"[],", b"]}}}]}"),
    chat("encoded arguments", b'{"role": "assistant", "tool_calls": [' + CALL + b'"{\\"a\\": [', b"[],", b']}"}}]}'),
    chat(
        "arguments of many calls",
        b'{"role": "assistant", "tool_calls": [',
        CALL + b'"{\\"a\\": [' + b"[]," * 9999 + b'[]]}"}},',
        b"]}",
    ),
    chat(
        "variables of the template",
        b'{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": [',
        b"[],",
        b']}, "tools": [',
    ),
    Large("an array", "/v1/completions", b"[", b"[],", b"]"),
    Large("names", "/v1/completions", b'{"model": "tiny", "', b"a", b'": 1}'),
    Large("spaces", "/v1/completions", b"{", b" ", b"}"),
]  # fmt: skip


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """One whose default takes as much as any."""
    with running_worker(msgspec.structs.replace(HELLO, max_seq_len=16_384)) as worker:
        yield worker


def send(worker: Worker, body: Large) -> httpx.Response:
    content, headers = body.bytes(), {"Content-Type": "application/json"}
    return httpx.post(f"{worker.url}{body.path}", content=content, headers=headers, timeout=PATIENCE)


@contextmanager
def repeating(act: Callable[[], object], interval: float) -> Iterator[None]:
    """Call a function in a thread until the `with` block ends, with so many seconds in between."""
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(interval):
            act()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def is_short(turn: float) -> bool:
    """Return whether a turn took LONGEST_TURN at most, or more where JSON is decoded that slowly at the moment."""
    if turn < LONGEST_TURN:
        return True
    content = b"[" + b"123456," * 2**22 + b"0]"
    began = time.thread_time()
    msgspec.json.decode(content)
    return turn < LONGEST_TURN * (time.thread_time() - began) / ORDINARY_DECODING


@pytest.mark.parametrize("body", LARGE, ids=lambda body: body.name)
def test_a_large_body_holds_up_no_other_request(worker: Worker, body: Large) -> None:
    """By the processor time of the loop's thread, which a busy machine does not lengthen much."""
    httpx.get(f"{worker.url}/health", timeout=PATIENCE)
    before, memory = worker.memory, [0]
    worker.begin_again()
    with repeating(lambda: memory.append(worker.memory), 0.01):
        answer = send(worker, body)
    assert answer.status_code == body.status, answer.text
    if body.status != 200:
        assert len(answer.content) < 2000
        assert error_of(answer)["type"] == "invalid_request_error"
    assert is_short(worker.longest_turn)
    assert max(memory) < before + 10 * MOST
    assert worker.memory < before + 3 * MOST


@pytest.mark.slow
@pytest.mark.parametrize("body", LARGE, ids=lambda body: body.name)
def test_health_is_answered_meanwhile(worker: Worker, body: Large) -> None:
    """By the clock: for a machine that does nothing else."""
    gaps = [0.0]
    with httpx.Client(base_url=worker.url, timeout=PATIENCE) as client:

        def ask() -> None:
            began = time.monotonic()
            assert client.get("/health").status_code == 200
            gaps.append(time.monotonic() - began)

        with repeating(ask, 0.002):
            send(worker, body)
    assert max(gaps) < LONGEST_TURN
