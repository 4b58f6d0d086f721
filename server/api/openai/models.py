"""GET /v1/models: the model, and where asked a name for it under each KV-cache strategy, `name:instance`."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Query

from server.api.http.errors import ApiError, documented
from server.engine.ipc.client import EngineClient
from server.engine.ipc.messages import Hello, Strategy


def name_of(hello: Hello, model: str | None, *, any_name: bool = False) -> str:
    """Return the name that a request's model has here: the served model's for none, and for any other if `any_name`."""
    return hello.model if not model or (any_name and model not in _names(hello)) else model


def instance_of(hello: Hello, model: str) -> str | None:
    """Return the strategy instance that a model's name asks for, if any. Raises ApiError 404 for an unknown model."""
    strategy = _find(hello, model)
    return strategy.name if strategy else None


def router(client: EngineClient, *, list_strategies: bool) -> APIRouter:
    """Return the routes; with `list_strategies` names with a strategy are listed unless a request says no."""
    routes = APIRouter(prefix="/v1/models", tags=["models"], responses=documented(503))
    created = int(time.time())

    @routes.get("")
    async def list_models(
        strategies: Annotated[
            bool, Query(description="also list the model's names under each strategy")
        ] = list_strategies,
    ) -> dict[str, Any]:
        hello = client.served()
        listed = [name for name, strategy in _names(hello).items() if strategies or strategy is None]
        return {"object": "list", "data": [_described(hello, name, created) for name in listed]}

    @routes.get("/{model:path}", responses=documented(404))
    async def get_model(model: str) -> dict[str, Any]:
        return _described(client.served(), model, created)

    return routes


def _names(hello: Hello) -> dict[str, Strategy | None]:
    """Return every name and alias, plain and with each strategy, and the strategy each names."""
    return {
        name if strategy is None else f"{name}:{strategy.name}": strategy
        for name in (hello.model, *hello.aliases)
        for strategy in (None, *hello.strategies)
    }


def _find(hello: Hello, model: str) -> Strategy | None:
    names = _names(hello)
    if model not in names:
        raise ApiError(
            404,
            f"the model {model[:200]!r} does not exist; there is {', '.join(names)}",
            param="model",
            code="model_not_found",
            logged="there is no model of that name",
        )
    return names[model]


def _described(hello: Hello, model: str, created: int) -> dict[str, Any]:
    strategy = _find(hello, model)
    described = {"id": model, "object": "model", "created": created, "owned_by": "kvmux"}
    described |= {"root": hello.model, "max_model_len": hello.max_seq_len}
    if strategy is not None:
        described["kv_cache"] = {"instance": strategy.name, "kind": strategy.kind}
    return described
