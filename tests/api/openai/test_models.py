"""/v1/models: names, aliases, strategies."""

from __future__ import annotations

import httpx
import openai
import pytest

from server.api.http.errors import ApiError
from server.api.openai.generation_job import find_instance
from server.engine.ipc.messages import Hello, Strategy
from tests.api.conftest import Api, running_api
from tests.api.fake_engine import FakeEngine, silent
from tests.api.payloads import error_of
from tests.patience import PATIENCE


def test_models(engine: FakeEngine, openai_client: openai.OpenAI) -> None:
    assert [model.id for model in openai_client.models.list()] == ["tiny"]
    models = openai_client.models.list(extra_query={"strategies": "true"}).data
    assert [model.id for model in models] == ["tiny", "tiny:paged", "tiny:short"]
    assert models[2].to_dict()["kv_cache"] == {"instance": "short", "kind": "ring"}
    assert models[0].to_dict()["max_model_len"] == 256
    assert models[0].to_dict()["weights"] == {
        "parameters": 1000,
        "bytes": 615,
        "bits_per_parameter": 4.92,
        "bytes_by_format": {"Q4_K": 450, "Q6_K": 165},
    }
    assert openai_client.models.retrieve("tiny:short") == models[2]
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        openai_client.models.retrieve("some/other")


def test_strategies_are_listed_by_a_setting() -> None:
    with running_api(list_strategies=True) as api, FakeEngine(api.socket_path, silent):
        api.await_ready()
        assert [model["id"] for model in httpx.get(f"{api.url}/v1/models", timeout=PATIENCE).json()["data"]][1:] == [
            "tiny:paged",
            "tiny:short",
        ]
        asked = httpx.get(f"{api.url}/v1/models", params={"strategies": "false"}, timeout=PATIENCE)
        assert [model["id"] for model in asked.json()["data"]] == ["tiny"]


def test_a_query_that_is_no_answer_to_the_question(engine: FakeEngine, http: httpx.Client) -> None:
    answer = http.get("/v1/models", params={"strategies": "perhaps"})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "strategies")


def test_models_whose_names_have_slashes(lone_api: Api) -> None:
    hello = Hello("owner/name", ["other/owner/alias"], 256, 320, [Strategy("paged", "paged")])
    with (
        FakeEngine(lone_api.socket_path, silent, hello),
        openai.OpenAI(base_url=f"{lone_api.url}/v1", api_key="-") as us,
    ):
        lone_api.await_ready()
        for name in ("owner/name", "owner/name:paged", "other/owner/alias"):
            assert us.models.retrieve(name).id == name  # which writes a slash as %2F
            assert httpx.get(f"{lone_api.url}/v1/models/{name}", timeout=PATIENCE).json()["id"] == name
    lone_api.await_ready(False)


def test_a_models_other_names_are_as_good() -> None:
    hello = Hello("mine", ["gpt-4", "owner/name"], 256, 320, [Strategy("paged", "paged")])
    for name in ("mine", "gpt-4", "owner/name"):
        assert find_instance(hello, name) is None
        assert find_instance(hello, f"{name}:paged") == "paged"
    with pytest.raises(ApiError, match="does not exist; there is mine, mine:paged, gpt-4, gpt-4:paged, owner/name"):
        find_instance(hello, "gpt-5")
