"""POST /v1/responses: a chat in the form of OpenAI's Responses API. Responses are not stored."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fastapi import APIRouter, Response
from pydantic import ValidationError

from server.api.http.errors import ApiError, make_body_error, make_error_responses
from server.api.http.json_route import JsonRoute
from server.api.openai.chat import ChatRequest, make_chat_job
from server.api.openai.generation import Generation
from server.api.openai.generation_job import HeadersParam, Serving
from server.api.openai.response_items.fields import find_field, rename_field
from server.api.openai.response_items.input import ResponseRequest
from server.api.openai.response_items.output import make_format
from server.api.openai.responses import respond


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(
        route_class=JsonRoute, tags=["responses"], responses=make_error_responses(400, 404, 413, 429, 503)
    )

    @routes.post("/v1/responses")
    async def create_response(body: ResponseRequest, headers: HeadersParam) -> Response:
        try:
            job = await make_chat_job(serving, _make_chat_request(body), headers)
        except ApiError as error:
            raise rename_field(error) from None
        job = replace(job, id="resp_" + job.id.removeprefix("chatcmpl-"))
        return respond(Generation(serving, job), make_format(body))

    return routes


def _make_chat_request(body: ResponseRequest) -> ChatRequest:
    """Return the chat that a request stands for. Raises ApiError 400 if that is refused."""
    try:
        return ChatRequest.model_validate(body.make_chat_body())
    except ValidationError as error:
        raise make_body_error(error, {}, partial(find_field, body)) from None
