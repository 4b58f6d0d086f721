"""Texts that are longer than the context: taken for strategies whose texts are unbounded, and for no others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest

from server.engine.ipc.messages import Strategy, Submit
from tests.api.conftest import Api, running_api
from tests.api.fake_engine import HELLO, FakeEngine, generates
from tests.api.payloads import error_of
from tests.patience import PATIENCE

CONTEXT = HELLO.max_seq_len
UNBOUNDED = [Strategy("endless", "streaming", unbounded=True), *HELLO.strategies]
LONG = {"max_tokens": 20 * CONTEXT}


class Call(NamedTuple):
    """A request to an endpoint."""

    path: str
    body: dict[str, Any]


class Choice(NamedTuple):
    """The fields and headers with which a request chooses its strategy."""

    fields: dict[str, str]
    headers: dict[str, str]


COMPLETION = Call("/v1/completions", {"prompt": "hello"})
CHAT = Call("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]})
endpoints = pytest.mark.parametrize("call", [COMPLETION, CHAT], ids=["completion", "chat"])


@pytest.fixture(scope="module")
def unbounded_engine() -> Iterator[tuple[Api, FakeEngine]]:
    hello = msgspec.structs.replace(HELLO, strategies=UNBOUNDED)
    with running_api() as api, FakeEngine(Path(api.socket_path), generates([100]), hello) as engine:
        api.await_ready()
        yield api, engine


def post(api: Api, call: Call, fields: dict[str, Any], headers: dict[str, str] | None = None) -> httpx.Response:
    """Send a request with further fields."""
    return httpx.post(
        api.url + call.path, json={"model": "tiny"} | call.body | fields, headers=headers, timeout=PATIENCE
    )


@endpoints
@pytest.mark.parametrize(
    "choice",
    [
        Choice({"kv_cache": "endless"}, {}),
        Choice({"kv_cache": "endless"}, {"X-KV-Cache": "paged"}),
        Choice({}, {"X-KV-Cache": "endless"}),
        Choice({"model": "tiny:endless"}, {}),
        Choice({}, {}),  # the engine decides
    ],
)
def test_a_strategy_that_may_take_it_gets_it(
    unbounded_engine: tuple[Api, FakeEngine], call: Call, choice: Choice
) -> None:
    api, engine = unbounded_engine
    engine.begin_again(generates([100]))
    answer = post(api, call, LONG | choice.fields, choice.headers)
    assert answer.status_code == 200, answer.text
    (submit,) = engine.all(Submit)
    assert submit.sampling.max_tokens == LONG["max_tokens"]


@endpoints
@pytest.mark.parametrize(
    "choice",
    [
        Choice({"kv_cache": "paged"}, {"X-KV-Cache": "endless"}),
        Choice({}, {"X-KV-Cache": "short"}),
        Choice({"model": "tiny:paged"}, {}),
    ],
)
def test_another_strategy_is_refused_with_the_name_of_one_that_takes_it(
    unbounded_engine: tuple[Api, FakeEngine], call: Call, choice: Choice
) -> None:
    answer = post(unbounded_engine[0], call, LONG | choice.fields, choice.headers)
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "max_tokens")
    assert f"the model's context is {CONTEXT} tokens long" in error["message"]
    assert error["message"].endswith("; under strategy 'endless' only the prompt has to fit")


@endpoints
def test_a_server_without_such_a_strategy_names_none(api: Api, engine: FakeEngine, call: Call) -> None:
    answer = post(api, call, LONG)
    assert answer.status_code == 400
    assert error_of(answer)["message"].endswith("make either shorter")


def test_a_prompt_has_to_fit_in_any_case(unbounded_engine: tuple[Api, FakeEngine]) -> None:
    body = {"prompt": [5] * (CONTEXT + 1), "max_tokens": 1, "kv_cache": "endless"}
    answer = post(unbounded_engine[0], COMPLETION, body)
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")


def test_a_chat_without_a_limit_ends_with_the_context(unbounded_engine: tuple[Api, FakeEngine]) -> None:
    api, engine = unbounded_engine
    engine.begin_again(generates([100]))
    assert post(api, CHAT, {"kv_cache": "endless"}).status_code == 200
    (submit,) = engine.all(Submit)
    assert len(submit.prompt) + submit.sampling.max_tokens == CONTEXT
