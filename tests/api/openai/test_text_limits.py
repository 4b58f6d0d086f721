"""What a model's own tokenizer and chat template make of a request costs that request, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import decoders

from server.text.processes.sandbox import CallLimits, SandboxedTokenizer
from server.text.tokenizer import Tokenizer
from tests.api.conftest import running_api
from tests.api.fake_engine import FakeEngine, generates
from tests.api.payloads import VALID_REQUEST, Encode, chunks_of, error_of
from tests.patience import PATIENCE
from tests.text.hostile_models import TEMPLATES, save_with_template
from tests.text.tiny_tokenizers import byte_level

MESSAGES = [{"role": "user", "content": "hello"}]
BOTH = "{% if which == 'power' %}" + TEMPLATES["a power"] + "{% else %}" + TEMPLATES["a text doubled"] + "{% endif %}"


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server whose template is as bad as a client wants."""
    directory = save_with_template(tmp_path_factory.mktemp("model"), BOTH)
    with (
        running_api(SandboxedTokenizer(directory, CallLimits(1.5, 2**26))) as api,
        FakeEngine(api.socket_path, generates(byte_level().encode("hello").ids)),
        httpx.Client(base_url=api.url, timeout=PATIENCE) as client,
    ):
        api.await_ready()
        yield client


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(("which", "code"), [("power", "text_timeout"), ("doubled", "text_memory")])
def test_a_bomb_is_refused_and_others_are_answered(limited: httpx.Client, path: str, which: str, code: str) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "chat_template_kwargs": {"n": 1, "which": which}}
    with ThreadPoolExecutor() as pool:
        bomb, answered = pool.submit(limited.post, path, json=body), 0
        while not bomb.done() or not answered:
            assert limited.get("/health").status_code == 200
            assert limited.post("/v1/completions", json=VALID_REQUEST).status_code == 200
            ordinary = {"model": "tiny", "messages": MESSAGES}
            assert limited.post("/v1/chat/completions", json=ordinary).status_code == 200
            answered += 1
            wait([bomb], timeout=0.1)
        response = bomb.result()
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (400, code, "messages")
    assert error["message"].startswith("messages: the model's chat template or tokenizer ")
    assert limited.post("/tokenize", json={"messages": MESSAGES}).json()["count"] > 0


@pytest.mark.parametrize(
    "kwargs",
    [
        {"n": {"n": 1}},
        {"n": "x" * 10**5},
        {"n": -(10**30)},
        {"n": [[[[0]]]] * 1000},
        {"bos_token": "x", "_": 1, "self": 2, "environment": 3, "context": 4, "max_length": 5},
        {"tools": [1]},
        {"range": 5, "namespace": None},
        {"n": 1e308, "which": "power"},
    ],
    ids=lambda kwargs: str(kwargs)[:40],
)
def test_hostile_variables(limited: httpx.Client, kwargs: dict[str, Any]) -> None:
    """A prompt or a sentence, and the server goes on."""
    body = {"model": "tiny", "messages": MESSAGES, "chat_template_kwargs": kwargs}
    assert limited.post("/v1/chat/completions", json=body).status_code in (200, 400)
    assert limited.post("/v1/completions", json=VALID_REQUEST).status_code == 200


def test_a_decoder_that_panics_ends_its_stream_with_a_sentence(encode: Encode) -> None:
    backend = byte_level()
    backend.decoder = decoders.Strip("h", 0, 9)
    broken = backend.token_to_id("h")
    with (
        running_api(Tokenizer(backend)) as api,
        FakeEngine(api.socket_path, generates([*encode(" world"), broken])),
        httpx.Client(base_url=api.url, timeout=PATIENCE) as client,
    ):
        api.await_ready()
        for prompt, status in (([5], 200), ([broken], 400)):
            response = client.post("/v1/completions", json=VALID_REQUEST | {"prompt": prompt, "stream": True})
            assert response.status_code == status
            found = chunks_of(response)[-1] if status == 200 else response.json()
            assert found["error"]["code"] == "tokenizer_failed"
        assert client.get("/health").status_code == 200


def test_the_model_of_a_directory_serves(tmp_path: Path) -> None:
    """Its process ends with the server."""
    tokenizer = SandboxedTokenizer(save_with_template(tmp_path, ""), CallLimits(30, 2**30))
    with (
        running_api(tokenizer) as api,
        FakeEngine(api.socket_path, generates(byte_level().encode("hello world").ids)),
        httpx.Client(base_url=api.url, timeout=PATIENCE) as client,
    ):
        api.await_ready()
        answer = client.post("/v1/chat/completions", json={"model": "tiny", "messages": MESSAGES})
        assert answer.json()["choices"][0]["message"]["content"] == "hello world"
