"""API processes (threads here) and fake engines, kept for all tests; a test finds its engine as new."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from config.settings import Settings
from server.api.worker import ApiServer
from server.engine.ipc.socket_client import SocketClient
from server.text.chat.template import ChatTemplate
from server.text.encoder import Encoder
from server.text.tokenizer import Tokenizer, TokenizerBase
from tests.api.fake_engine import FakeEngine, generates
from tests.api.payloads import Encode
from tests.patience import PATIENCE, eventually
from tests.text.tiny_tokenizers import byte_level

ADMIN_TOKEN = "open-sesame"
BROKEN = "what no tokenizer can read"
CHAT = ChatTemplate(
    {
        "default": "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}"
        "{% for call in message.tool_calls %}{{ call.function.arguments.x }}{% endfor %}{{ '\n' }}{% endfor %}"
        "{% if messages[0].role == 'cat' %}{{ raise_exception('no cats') }}{% endif %}"
        "{% if messages[0].role == 'parrot' %}{{ raise_exception(messages[0].content * 9999) }}{% endif %}"
        "{% if loud %}!{% endif %}{% if add_generation_prompt %}assistant:{% endif %}"
    },
    {"bos_token": "<s>"},
)


class FaultyEncoder(Encoder):
    """An encoder with a bug: a text with BROKEN in it ends with an error that nobody expects."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if BROKEN in text:
            raise ZeroDivisionError("secret")
        return super().encode(text, add_special_tokens=add_special_tokens)


def make_tokenizer() -> Tokenizer:
    """Return a tiny tokenizer in this process, with a bug."""
    tokenizer = Tokenizer(byte_level(), CHAT)
    tokenizer.encoder = FaultyEncoder(tokenizer.backend, CHAT)
    return tokenizer


@dataclass(frozen=True)
class Api:
    """A running API process: its address, and the socket where it looks for the engine."""

    url: str
    socket_path: Path
    client: SocketClient

    def await_ready(self, ready: bool = True) -> None:
        eventually(lambda: (self.client.hello is not None) is ready)


@contextlib.contextmanager
def running_api(tokenizer: TokenizerBase | None = None, **settings: Any) -> Iterator[Api]:
    """Without a tokenizer, make_tokenizer's."""
    with tempfile.TemporaryDirectory(prefix="kvmux-") as directory:  # short enough for a socket's address
        socket_path = Path(directory) / "engine.sock"
        client = SocketClient(socket_path)
        defaults = {"admin_token": ADMIN_TOKEN, "min_priority": -(2**31), "max_kv_cache_priority": 100}
        tokenizer = tokenizer or make_tokenizer()
        server = ApiServer(Settings(**defaults | settings), client, tokenizer)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            thread.start()
            try:
                yield Api(f"http://127.0.0.1:{listener.getsockname()[1]}", socket_path, client)
            finally:
                server.should_exit = True
                thread.join()


@pytest.fixture(scope="session")
def api() -> Iterator[Api]:
    """With the `engine`."""
    with running_api() as api:
        yield api


@pytest.fixture(scope="session")
def lone_api() -> Iterator[Api]:
    """Without an engine, unless a test starts one."""
    with running_api() as api:
        yield api


@pytest.fixture(scope="session")
def running_engine(api: Api) -> Iterator[FakeEngine]:
    with FakeEngine(api.socket_path, generates([])) as engine:
        api.await_ready()
        yield engine


@pytest.fixture
def engine(running_engine: FakeEngine, encode: Encode) -> FakeEngine:
    running_engine.begin_again(generates(encode("hello world")))
    return running_engine


@pytest.fixture
def socket_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvmux-") as directory:
        yield Path(directory) / "engine.sock"


@pytest.fixture(scope="session")
def encode() -> Encode:
    backend = byte_level()
    return lambda text: list(backend.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="session")
def http(api: Api) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=api.url, timeout=PATIENCE) as client:
        yield client


@pytest.fixture(scope="session")
def openai_client(api: Api) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key="-", max_retries=0, timeout=PATIENCE) as client:
        yield client
