"""API keys, the admin token beside them, and web pages of other origins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from server.api.http.api_keys import get_tenant
from server.engine.ipc.messages import Query, Submit
from tests.api.conftest import ADMIN_TOKEN, Api, running_api
from tests.api.fake_engine import FakeEngine, generates
from tests.api.payloads import VALID_REQUEST, error_of
from tests.api.raw_http import raw_post, send_raw
from tests.patience import PATIENCE

KEYS = ["sk-first-secret", "sk-second-secret"]
PAGE = "https://chat.example"


@pytest.fixture(scope="module")
def guarded() -> Iterator[Api]:
    with running_api(api_keys=KEYS, cors_origins=[PAGE]) as api:
        yield api


@pytest.fixture(scope="module")
def guarded_engine(guarded: Api) -> Iterator[FakeEngine]:
    with FakeEngine(guarded.socket_path, generates([100])) as engine:
        guarded.await_ready()
        yield engine


@pytest.fixture
def locked(guarded: Api, guarded_engine: FakeEngine) -> Iterator[httpx.Client]:
    guarded_engine.begin_again(generates([100]))
    with httpx.Client(base_url=guarded.url, timeout=PATIENCE) as client:
        yield client


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


# ---------------------------------------------------------------- keys
@pytest.mark.parametrize("key", KEYS)
def test_every_key_opens(guarded: Api, locked: httpx.Client, guarded_engine: FakeEngine, key: str) -> None:
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE) as client:
        assert client.models.retrieve("tiny").id == "tiny"
        assert client.completions.create(model="tiny", prompt="x").choices
    (submit,) = guarded_engine.all(Submit)
    assert submit.caching.tenant == get_tenant(f"Bearer {key}")
    assert locked.get("/v1/models", headers={"authorization": f"bearer  {key}"}).status_code == 200


@pytest.mark.parametrize("key", KEYS)
def test_a_key_in_x_api_key_is_the_same_key(locked: httpx.Client, guarded_engine: FakeEngine, key: str) -> None:
    """As Anthropic's clients send it; Authorization counts if both are there."""
    body = {"model": "tiny", "prompt": "x"}
    assert locked.post("/v1/completions", json=body, headers={"X-Api-Key": key}).status_code == 200
    (submit,) = guarded_engine.all(Submit)
    assert submit.caching.tenant == get_tenant(f"Bearer {key}")
    for wrong in ({"X-Api-Key": "sk-wrong-secret"}, {"X-Api-Key": ""}, {"X-Api-Key": key, "Authorization": "Bearer x"}):
        assert locked.post("/v1/completions", json=body, headers=wrong).status_code == 401


WRONG = [
    None,
    "",
    "Bearer",
    "Bearer sk-first-secre",
    "Bearer sk-first-secret-",
    "Bearer SK-FIRST-SECRET",
    f"Bearer {','.join(KEYS)}",
    f"Bearer {ADMIN_TOKEN}",
    f"Basic {KEYS[0]}",
    KEYS[0],
    "Bearer ключ",
]
OTHERS = [
    ("GET", "/v1/models"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/apply-template"),
    ("GET", "/tokenizer_info"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/models/tiny"),
    ("GET", "/v1/kv_cache"),
    ("GET", "/v1/nowhere"),
    ("PUT", "/v1/completions"),
    ("POST", "/completions"),
    ("POST", "/chat/completions"),
    ("POST", "/responses"),
    ("GET", "/models"),
    ("GET", "/models/tiny"),
    ("GET", "/kv_cache"),
    ("GET", "/settings"),
    ("POST", "/kv_cache/paged/clear"),
]


@pytest.mark.parametrize(
    ("method", "path", "sent"),
    [*(("POST", "/v1/completions", sent) for sent in WRONG), *((*other, "Bearer sk-first-secre") for other in OTHERS)],
)
def test_nothing_else_opens(
    locked: httpx.Client, guarded_engine: FakeEngine, method: str, path: str, sent: str | None
) -> None:
    headers = {} if sent is None else {"Authorization": sent.encode()}
    answer = locked.request(method, path, json=VALID_REQUEST, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = error_of(answer)
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_api_key")
    assert not any(key in answer.text for key in KEYS)
    assert guarded_engine.received == []


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({}, "send an API key of this server: 'Authorization: Bearer ...'"),
        ({"Authorization": "Basic eA=="}, "send an API key of this server: 'Authorization: Bearer ...'"),
        (bearer("x"), "the token that was sent is wrong: send an API key of this server: 'Authorization: Bearer ...'"),
    ],
)
def test_a_wrong_token_is_called_wrong(locked: httpx.Client, sent: dict[str, str], message: str) -> None:
    assert error_of(locked.get("/v1/models", headers=sent))["message"] == message


def test_openai_raises_its_authentication_error(guarded: Api) -> None:
    with (
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="sk-wrong-secret", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError, match="an API key of this server"),
    ):
        client.models.list()


def test_no_body_is_read_without_a_key(guarded: Api) -> None:
    """It would be asked for with 100 Continue. An empty key is none."""
    answer = send_raw(guarded.url, raw_post(b"", "Expect: 100-continue", "Authorization: Bearer ", length=1000))
    assert answer.status_code == 401


def test_what_the_operator_asks_needs_no_key(locked: httpx.Client) -> None:
    for path in ("/health", "/ready", "/metrics", "/openapi.json"):
        assert locked.get(path).status_code == 200


def test_metrics_behind_a_key_of_their_own() -> None:
    keys = {"api_keys": KEYS, "metrics_key": "for-prometheus"}
    with running_api(**keys) as api, httpx.Client(base_url=api.url, timeout=PATIENCE) as http:
        for method in ("GET", "HEAD"):
            for sent in ({}, bearer(KEYS[0]), bearer(ADMIN_TOKEN)):
                assert http.request(method, "/metrics", headers=sent).status_code == 401
            answer = http.request(method, "/metrics", headers=bearer("for-prometheus"))
            assert answer.status_code == 503, "there is no engine"
        assert "the metrics key" in http.get("/metrics").json()["error"]["message"]
        assert http.get("/v1/models", headers=bearer("for-prometheus")).status_code == 401


@pytest.mark.parametrize("sent", ["Bearer ", "Bearer", "Bearer anything", "Basic eA==", "", "Bearer schlüssel"])
def test_without_keys_any_header_will_do(api: Api, engine: FakeEngine, sent: str) -> None:
    """The first is what lm-eval sends when it has no key."""
    assert send_raw(api.url, raw_post(json.dumps(VALID_REQUEST).encode(), f"Authorization: {sent}")).status_code == 200


# ---------------------------------------------------------------- the admin token
def test_a_key_does_not_administer_and_the_admin_token_needs_no_key(
    locked: httpx.Client, guarded_engine: FakeEngine
) -> None:
    routes = [("GET", ""), ("PATCH", ""), ("POST", "/clear"), ("POST", "/pins")]
    for method, path in (*routes, ("DELETE", "/pins/1"), ("DELETE", "/prefixes/1")):
        answer = locked.request(method, f"/v1/kv_cache/paged{path}", headers=bearer(KEYS[0]))
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert guarded_engine.received == []
    assert locked.get("/v1/kv_cache/paged", headers=bearer(ADMIN_TOKEN)).status_code == 200
    assert len(guarded_engine.all(Query)) == 1


@pytest.mark.parametrize("route", ["/v1/kv_cache/paged/clear", "/v1/profile"])
def test_without_an_admin_token_administration_is_refused(route: str) -> None:
    with running_api(admin_token=None) as api:
        answer = httpx.post(f"{api.url}{route}", headers=bearer("anything"), timeout=PATIENCE)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_off")
    assert "start the server with an admin_token" in answer.json()["error"]["message"]


# ---------------------------------------------------------------- other origins
def test_a_page_that_may_ask(locked: httpx.Client) -> None:
    asks = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    answer = locked.options("/v1/completions", headers=asks)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "authorization" in answer.headers["access-control-allow-headers"].lower()
    for headers in ({}, bearer(KEYS[0])):  # its errors can be read, too
        answer = locked.post("/v1/completions", json=VALID_REQUEST, headers=headers | {"Origin": PAGE})
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["access-control-expose-headers"] == "*"


def test_a_page_that_may_not(locked: httpx.Client) -> None:
    asks = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    answer = locked.options("/v1/completions", headers=asks)
    assert answer.status_code == 400  # a browser looks at headers alone; this text is the library's
    assert "access-control-allow-origin" not in answer.headers
    answer = locked.get("/v1/models", headers=bearer(KEYS[0]) | {"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_no_page_may_unless_the_settings_say_so(engine: FakeEngine, http: httpx.Client) -> None:
    answer = http.get("/v1/models", headers={"Origin": PAGE})
    assert answer.status_code == 200
    assert not any(name.startswith("access-control") for name in answer.headers)
    answer = http.options("/v1/models", headers={"Origin": PAGE, "Access-Control-Request-Method": "GET"})
    assert answer.status_code == 405


# ---------------------------------------------------------------- openapi.json
ERROR = {"$ref": "#/components/schemas/Error"}


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method} {path}", operation


def test_openapi_has_the_errors(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    assert "422" not in http.get("/openapi.json").text
    assert set(document["components"]["schemas"]["ErrorDetails"]["properties"]) == {"message", "type", "param", "code"}
    answers = {name: operation["responses"] for name, operation in operations(document)}
    for name, responses in answers.items():
        for status, response in responses.items():
            if status != "200":
                assert response["content"]["application/json"]["schema"] == ERROR, (name, status)
    assert set(answers["post /v1/completions"]) == {"200", "400", "404", "413", "429", "503", "default"}
    assert {"503", "default"} <= set(answers["get /v1/models"])
    assert {"404", "503"} <= set(answers["get /v1/models/{model}"])
    assert {"400", "401", "403", "404", "409"} <= set(answers["post /v1/kv_cache/{instance}/clear"])


@pytest.mark.parametrize("keys", [True, False])
def test_openapi_has_the_keys_that_routes_need(locked: httpx.Client, http: httpx.Client, keys: bool) -> None:
    document = (locked if keys else http).get("/openapi.json").json()
    for name, operation in operations(document):
        path = name.split()[1]
        administers = name.startswith("post /v1/rollouts")
        administers |= path.startswith(("/v1/kv_cache/", "/v1/profile", "/v1/live"))
        scheme = "admin token" if administers else "API key"
        keyed = keys and path.startswith(("/v1/", "/tokenize", "/detokenize", "/apply-template"))
        expected = [{scheme: []}] if administers or keyed else None
        assert operation.get("security") == expected, name
        assert ("401" in operation["responses"]) == (expected is not None), name
    assert document["components"]["securitySchemes"]["admin token"] == {"type": "http", "scheme": "bearer"}
