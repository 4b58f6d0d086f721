"""The documents and openapi.json have every field that may be sent."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from pydantic import BaseModel

from server.api.ops.admin import ClearRequest, PinRequest, ProfileRequest, ShareRequest
from server.api.ops.rollouts import GuardRequest, RolloutRequest

ROOT = Path(__file__).parents[2]
REFERENCE = (ROOT / "docs" / "reference" / "api.md").read_text()
ADMINISTRATION = (ROOT / "docs" / "operations" / "administration.md").read_text()
COMMANDS = (ShareRequest, ClearRequest, PinRequest, ProfileRequest, RolloutRequest, GuardRequest)


@pytest.mark.parametrize("body", COMMANDS)
def test_every_field_of_a_command_is_in_a_table(body: type[BaseModel]) -> None:
    """tests/tools/test_api_fields.py checks the other bodies, whose tables are generated."""
    named = set(re.findall(r"`(\w+)", "".join(line for line in ADMINISTRATION.splitlines() if line.startswith("|"))))
    assert {field.alias or name for name, field in body.model_fields.items()} <= named


def test_the_documentation_has_every_parameter(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    body = document["components"]["schemas"]["CompletionRequest"]
    assert {"prompt", "kv_cache", "echo", "priority"} <= set(body["properties"])
    assert body["required"] == ["prompt"]
    assert {"messages", "chat_template_kwargs"} <= set(
        document["components"]["schemas"]["TokenizeRequest"]["properties"]
    )
    assert set(document["paths"]) >= {"/tokenize", "/detokenize", "/version"}
    assert set(document["paths"]) >= {"/v1/completions", "/v1/models", "/v1/kv_cache", "/health", "/ready", "/metrics"}


def find_end(path: str) -> str:
    """Return the last fixed part of a path with what follows it: tables write ".../clear" for a route below another."""
    fixed, rest = re.findall(r"/([\w.-]+)((?:/\{[^}]*\})*)", path)[-1]
    return f"/{fixed}{'/X' if rest else ''}"


def test_every_route_is_in_the_documents(http: httpx.Client) -> None:
    pages = "".join(file.read_text() for file in (ROOT / "docs").rglob("*.md"))
    named = {find_end(path) for path in re.findall(r"(?:/[\w.-]+|/\{\w+\})+", pages) if not path.startswith("/{")}
    routes = http.get("/openapi.json").json()["paths"]
    assert len(routes) > 20
    assert [path for path in routes if find_end(path) not in named] == []


def test_the_documentation_is_asked_for_beside_its_page(http: httpx.Client) -> None:
    """Otherwise the page would be empty below a path prefix."""
    page = http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert re.findall(r"url: '(.*openapi.json)'", page.text) == ["openapi.json"]


def test_every_code_of_an_error_is_in_the_document() -> None:
    source = "".join(file.read_text() for file in (ROOT / "server").rglob("*.py"))
    codes = {*re.findall(r'\bcode="(\w+)"', source), "strategy_failed", "step_failed"}  # both come without a name, too
    assert len(codes) > 25
    assert {code for code in codes if f"`{code}`" not in REFERENCE} == set()
