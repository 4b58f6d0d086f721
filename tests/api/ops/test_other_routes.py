"""/v1/models, /v1/kv_cache, /v1/settings, /health, /ready, /metrics."""

from __future__ import annotations

import httpx
import openai
import pytest

from server.api.http.errors import ApiError
from server.api.openai.models import instance_of
from server.engine.ipc.messages import Hello, Strategy
from tests.api.conftest import Api, running_api
from tests.api.fake_engine import FakeEngine, silent
from tests.api.payloads import VALID_REQUEST, error_of


def test_models(engine: FakeEngine, openai_client: openai.OpenAI) -> None:
    assert [model.id for model in openai_client.models.list()] == ["tiny"]
    models = openai_client.models.list(extra_query={"strategies": "true"}).data
    assert [model.id for model in models] == ["tiny", "tiny:paged", "tiny:short"]
    assert models[2].to_dict()["kv_cache"] == {"instance": "short", "kind": "ring"}
    assert models[0].to_dict()["max_model_len"] == 256
    assert openai_client.models.retrieve("tiny:short") == models[2]
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        openai_client.models.retrieve("some/other")


def test_strategies_are_listed_by_a_setting() -> None:
    with running_api(list_strategies=True) as api, FakeEngine(api.socket_path, silent):
        api.await_ready()
        assert [model["id"] for model in httpx.get(f"{api.url}/v1/models").json()["data"]][1:] == [
            "tiny:paged",
            "tiny:short",
        ]
        asked = httpx.get(f"{api.url}/v1/models", params={"strategies": "false"})
        assert [model["id"] for model in asked.json()["data"]] == ["tiny"]


def test_a_query_that_is_no_answer_to_the_question(engine: FakeEngine, http: httpx.Client) -> None:
    answer = http.get("/v1/models", params={"strategies": "perhaps"})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "strategies")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/completions", VALID_REQUEST),
        ("POST", "/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}),
        ("GET", "/models", None),
        ("GET", "/models/tiny:short", None),
        ("GET", "/kv_cache", None),
        ("GET", "/settings", None),
        ("GET", "/completions", None),
        ("GET", "/models/", None),
    ],
)
def test_without_v1(engine: FakeEngine, http: httpx.Client, method: str, path: str, body: object) -> None:
    without, with_version = (http.request(method, prefix + path, json=body) for prefix in ("", "/v1"))
    assert without.status_code == with_version.status_code
    assert without.json().keys() == with_version.json().keys()
    assert without.status_code in (200, 404, 405)


def test_nothing_else_is_there_without_v1(engine: FakeEngine, http: httpx.Client) -> None:
    for path in ("/completion", "/modelsx", "/chat", "/v1/v1/models", "/v1/tokenize"):
        assert http.get(path).status_code == 404


def test_models_whose_names_have_slashes(lone_api: Api) -> None:
    hello = Hello("owner/name", ["other/owner/alias"], 256, 320, [Strategy("paged", "paged")])
    with (
        FakeEngine(lone_api.socket_path, silent, hello),
        openai.OpenAI(base_url=f"{lone_api.url}/v1", api_key="-") as us,
    ):
        lone_api.await_ready()
        for name in ("owner/name", "owner/name:paged", "other/owner/alias"):
            assert us.models.retrieve(name).id == name  # which writes a slash as %2F
            assert httpx.get(f"{lone_api.url}/v1/models/{name}").json()["id"] == name
    lone_api.await_ready(False)


@pytest.mark.parametrize("what", ["kv_cache", "settings"])
def test_what_the_engine_says_of_itself(engine: FakeEngine, http: httpx.Client, what: str) -> None:
    response = http.get(f"/v1/{what}")
    assert response.headers["content-type"] == "application/json"
    assert response.content == engine.answers[what]


TEXT = b"# HELP kvmux_things Things.\n# TYPE kvmux_things gauge\nkvmux_things 1.0\n"


def test_metrics(engine: FakeEngine, http: httpx.Client) -> None:
    response = http.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert response.content == TEXT
    assert http.head("/metrics").status_code == 200


@pytest.mark.parametrize("version", ["; version=1.0.0", "; version=garbage;q=0.5", ""])
def test_openmetrics_when_asked(engine: FakeEngine, http: httpx.Client, version: str) -> None:
    response = http.get("/metrics", headers={"Accept": f"application/openmetrics-text{version},text/plain;q=0.3"})
    assert response.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert response.content == TEXT + b"# EOF\n"


def test_an_engine_that_does_not_answer(
    api: Api, engine: FakeEngine, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.client, "patience", 0.05)
    engine.answers.clear()
    response = http.get("/metrics")
    assert response.status_code == 503
    assert "did not answer" in response.json()["error"]["message"]


def test_ready(engine: FakeEngine, http: httpx.Client) -> None:
    assert http.get("/ready").json() == {"status": "ready", "model": "tiny"}


def test_without_an_engine(lone_api: Api) -> None:
    assert httpx.get(f"{lone_api.url}/health").json() == {"status": "ok"}
    for path in ("/ready", "/metrics", "/v1/models", "/v1/models/tiny", "/v1/kv_cache"):
        response = httpx.get(lone_api.url + path)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["type"] == "server_error"


def test_the_documentation_tells_every_parameter(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    body = document["components"]["schemas"]["CompletionRequest"]
    assert {"prompt", "kv_cache", "echo", "priority"} <= set(body["properties"])
    assert body["required"] == ["prompt"]
    assert {"messages", "chat_template_kwargs"} <= set(
        document["components"]["schemas"]["TokenizeRequest"]["properties"]
    )
    assert set(document["paths"]) >= {"/tokenize", "/detokenize", "/version"}
    assert set(document["paths"]) >= {"/v1/completions", "/v1/models", "/v1/kv_cache", "/health", "/ready", "/metrics"}


def test_a_models_other_names_are_as_good() -> None:
    hello = Hello("mine", ["gpt-4", "owner/name"], 256, 320, [Strategy("paged", "paged")])
    for name in ("mine", "gpt-4", "owner/name"):
        assert instance_of(hello, name) is None
        assert instance_of(hello, f"{name}:paged") == "paged"
    with pytest.raises(ApiError, match="does not exist; there is mine, mine:paged, gpt-4, gpt-4:paged, owner/name"):
        instance_of(hello, "gpt-5")
