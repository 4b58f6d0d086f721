"""GET /v1/models: the model, and where asked a name for it under each KV-cache strategy, `name:instance`."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Query

from server.api.http.errors import ApiError, make_error_responses
from server.engine.ipc.client import EngineClient
from server.engine.ipc.messages import Hello, Strategy


def resolve_model_name(hello: Hello, model: str | None, *, any_name: bool = False) -> str:
    """Return the name that a request's model has here: the served model's for none, and for any other if `any_name`."""
    return hello.model if not model or (any_name and model not in _list_model_names(hello)) else model


def find_instance(hello: Hello, model: str) -> str | None:
    """Return the strategy instance that a model's name asks for, if any. Raises ApiError 404 for an unknown model."""
    strategy = _find_strategy(hello, model)
    return strategy.name if strategy else None


def router(client: EngineClient, *, list_strategies: bool) -> APIRouter:
    """Return the routes; with `list_strategies` names with a strategy are listed unless a request says no."""
    routes = APIRouter(prefix="/v1/models", tags=["models"], responses=make_error_responses(503))
    created = int(time.time())

    @routes.get("")
    async def list_models(
        strategies: Annotated[
            bool, Query(description="also list the model's names under each strategy")
        ] = list_strategies,
    ) -> dict[str, Any]:
        hello = client.get_hello()
        listed = [name for name, strategy in _list_model_names(hello).items() if strategies or strategy is None]
        return {"object": "list", "data": [_describe_model(hello, name, created) for name in listed]}

    @routes.get("/{model:path}", responses=make_error_responses(404))
    async def get_model(model: str) -> dict[str, Any]:
        return _describe_model(client.get_hello(), model, created)

    return routes


def _list_model_names(hello: Hello) -> dict[str, Strategy | None]:
    """Return every name and alias, plain and with each strategy, and the strategy each names."""
    return {
        name if strategy is None else f"{name}:{strategy.name}": strategy
        for name in (hello.model, *hello.aliases)
        for strategy in (None, *hello.strategies)
    }


def _find_strategy(hello: Hello, model: str) -> Strategy | None:
    names = _list_model_names(hello)
    if model not in names:
        raise ApiError(
            404,
            f"the model {model[:200]!r} does not exist; there is {', '.join(names)}",
            param="model",
            code="model_not_found",
            log_message="there is no model of that name",
        )
    return names[model]


def _describe_model(hello: Hello, model: str, created: int) -> dict[str, Any]:
    strategy = _find_strategy(hello, model)
    described = {"id": model, "object": "model", "created": created, "owned_by": "kvmux"}
    described |= {"root": hello.model, "max_model_len": hello.max_seq_len}
    if strategy is not None:
        described["kv_cache"] = {"instance": strategy.name, "kind": strategy.kind}
    return described
