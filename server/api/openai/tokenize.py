"""Routes that need only the tokenizer and the chat template: no step of the engine runs.

POST /tokenize and /detokenize and GET /tokenizer_info, as vLLM has them; POST /apply-template, as llama.cpp.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import APIRouter, Response
from pydantic import Field, ValidationInfo, field_validator

from server.api.http.errors import ApiError, make_error_responses
from server.api.http.json_body import Body
from server.api.http.json_route import JsonRoute
from server.api.openai.chat import ChatRequest
from server.api.openai.conversation import Message, Messages, Rendering, encode_chat
from server.api.openai.generation_job import Serving, check_ids, find_instance, resolve_model_name
from server.api.openai.request_models import TokenIds
from server.engine.ipc.messages import Hello
from server.text.vocabulary import Vocabulary

MAX_DECODED_TOKENS = 2**16  # most tokens that /detokenize takes, unless the model's context is longer


class TokenizeRequest(Rendering):
    """Body of POST /tokenize."""

    model: str | None = Field(None, description="name of the model; default: the model that is served")
    prompt: str | None = Field(None, description="a text to tokenize; not with messages")
    messages: Messages | None = Field(
        None, min_length=1, validate_default=True, description="the messages of a chat; not with a prompt"
    )
    add_special_tokens: bool | None = Field(
        None, description="add the model's special tokens; default: true for a prompt, false for messages"
    )
    return_token_strs: bool = Field(False, description="also return each token as the vocabulary writes it")

    @field_validator("messages")
    @classmethod
    def _check_one_given(cls, value: list[Message] | None, info: ValidationInfo) -> list[Message] | None:
        if (value is None) == (info.data.get("prompt") is None) and "prompt" in info.data:
            raise ValueError("either prompt or messages is required, and not both")
        return value


class DetokenizeRequest(Body):
    """Body of POST /detokenize."""

    model: str | None = Field(None, description="name of the model; default: the model that is served")
    tokens: TokenIds = Field(description="token ids; as many as the context has, or 65,536")


class ApplyTemplateRequest(ChatRequest):
    """Body of POST /apply-template, with the fields of a chat. Fields that do not concern the prompt have no effect."""


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(msgspec.Struct):
    prompt: str


def router(serving: Serving, info: Mapping[str, Any] | None = None) -> APIRouter:
    """Return the router of all these routes; /tokenizer_info, which returns `info`, only if `info` is not None."""
    tokenizer = serving.tokenizer
    routes = APIRouter(route_class=JsonRoute, tags=["tokens"], responses=make_error_responses(400, 404, 413, 503))

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        hello = _get_hello(serving, body.model)
        ids = await _encode_body(serving, body)
        strings = await asyncio.to_thread(_get_token_strings, tokenizer, ids) if body.return_token_strs else None
        return _make_json_response(TokenizeResponse(len(ids), hello.max_seq_len, ids, strings))

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        hello = _get_hello(serving, body.model)
        if len(body.tokens) > (most := max(hello.max_seq_len, MAX_DECODED_TOKENS)):
            raise ApiError(400, f"tokens: should be at most {most} ids", param="tokens", code="context_length_exceeded")
        check_ids(body.tokens, hello, "tokens")
        return _make_json_response(
            DetokenizeResponse(await tokenizer.decode_many(body.tokens, skip_special_tokens=False))
        )

    @routes.post("/apply-template")
    async def apply_template(body: ApplyTemplateRequest) -> Response:
        _get_hello(serving, body.model)
        encoded = await encode_chat(serving, body.messages, body, add_special_tokens=False)
        return _make_json_response(DetokenizeResponse(encoded.text))

    if info is not None:
        content = msgspec.json.encode(info)

        @routes.get("/tokenizer_info")
        async def get_tokenizer_info() -> Response:
            return Response(content, media_type="application/json")

    return routes


async def _encode_body(serving: Serving, body: TokenizeRequest) -> list[int]:
    """Return the ids of a request's prompt or messages.

    Raises ApiError for texts that are too long or that the template refuses, TextError if they cannot be encoded.
    """
    special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
    if body.messages is not None:
        return (await encode_chat(serving, body.messages, body, add_special_tokens=special)).ids
    assert body.prompt is not None, "the validator requires one of both"
    serving.limits.check_length(body.prompt, "prompt")
    return await serving.tokenizer.encode(body.prompt, add_special_tokens=special)


def _get_hello(serving: Serving, model: str | None) -> Hello:
    """Return the engine's Hello. Raises EngineLost without an engine, ApiError 404 for a model it does not serve."""
    hello = serving.client.get_hello()
    find_instance(hello, resolve_model_name(hello, model, any_name=serving.any_model_name))
    return hello


def _get_token_strings(tokenizer: Vocabulary, ids: list[int]) -> list[str]:
    return [tokenizer.piece(token) for token in ids]


def _make_json_response(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
