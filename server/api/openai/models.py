"""GET /v1/models: the model and, with `strategies`, its name with each strategy instance, `name:instance`."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Query

from server.api.http.errors import make_error_responses
from server.api.openai.generation_job import find_strategy, list_model_names
from server.engine.ipc.client import EngineClient
from server.engine.ipc.messages import Hello


def router(client: EngineClient, *, list_strategies: bool) -> APIRouter:
    """Return the router; `list_strategies` is the default of the query parameter `strategies`."""
    routes = APIRouter(prefix="/v1/models", tags=["models"], responses=make_error_responses(503))
    created = int(time.time())

    @routes.get("")
    async def list_models(
        strategies: Annotated[
            bool, Query(description="also list the model's name with each strategy instance, as name:instance")
        ] = list_strategies,
    ) -> dict[str, Any]:
        hello = client.get_hello()
        listed = [name for name, strategy in list_model_names(hello).items() if strategies or strategy is None]
        return {"object": "list", "data": [_describe_model(hello, name, created) for name in listed]}

    @routes.get("/{model:path}", responses=make_error_responses(404))
    async def get_model(model: str) -> dict[str, Any]:
        return _describe_model(client.get_hello(), model, created)

    return routes


def _describe_model(hello: Hello, model: str, created: int) -> dict[str, Any]:
    strategy = find_strategy(hello, model)
    described = {"id": model, "object": "model", "created": created, "owned_by": "kvmux"}
    described |= {"root": hello.model, "max_model_len": hello.max_seq_len, "weights": _describe_weights(hello)}
    if strategy is not None:
        described["kv_cache"] = {"instance": strategy.name, "kind": strategy.kind}
    return described


def _describe_weights(hello: Hello) -> dict[str, Any]:
    """Return the number of parameters, the bytes and bits of a parameter, and the bytes by format, most used first."""
    parameters = sum(usage.parameters for usage in hello.weight_formats.values())
    size = sum(usage.nbytes for usage in hello.weight_formats.values())
    return {
        "parameters": parameters,
        "bytes": size,
        "bits_per_parameter": round(8 * size / parameters, 2) if parameters else None,
        "bytes_by_format": {name: usage.nbytes for name, usage in hello.weight_formats.items()},
    }
