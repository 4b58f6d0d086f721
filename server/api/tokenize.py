"""POST /tokenize and /detokenize, as vLLM has them: text or messages to token ids, and back. Needs no engine's step."""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import APIRouter, Response
from pydantic import Field, ValidationInfo, field_validator

from server.api.answers import Serving
from server.api.body import JsonRoute
from server.api.conversation import Message, Rendering, prompt_of
from server.api.errors import documented
from server.api.jobs import check_ids
from server.api.models import instance_of
from server.api.schemas import Body, LongList
from server.engine.client import EngineClient
from server.engine.messages import Hello
from server.text.tokenizer import Tokenizer


class TokenizeRequest(Rendering):
    """Body of POST /tokenize."""

    model: str | None = Field(None, description="default: the model that is served")
    prompt: str | None = Field(None, description="a text; or else messages")
    messages: LongList[Message] | None = Field(None, min_length=1, validate_default=True)
    add_special_tokens: bool | None = Field(
        None, description="default: true for a prompt; false for messages, as the chat template writes them"
    )
    return_token_strs: bool = Field(False, description="also tell how the vocabulary writes each token")

    @field_validator("messages")
    @classmethod
    def _one_of_both(cls, value: list[Message] | None, info: ValidationInfo) -> list[Message] | None:
        if (value is None) == (info.data.get("prompt") is None) and "prompt" in info.data:
            raise ValueError("either prompt or messages is required, and not both")
        return value


class DetokenizeRequest(Body):
    """Body of POST /detokenize."""

    model: str | None = Field(None, description="default: the model that is served")
    tokens: LongList[int]


class Tokens(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(msgspec.Struct):
    prompt: str


def router(serving: Serving) -> APIRouter:
    tokenizer = serving.tokenizer
    routes = APIRouter(route_class=JsonRoute, tags=["tokens"], responses=documented(400, 404, 413, 503))

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        hello = _served(serving.client, body.model)
        text = body.prompt
        serving.most.check_text(text, "prompt")
        if body.messages is not None:
            text = await prompt_of(tokenizer.chat, body.messages, body, serving.most.prompt_characters)
        assert text is not None, "one of both is there"
        special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
        ids = await tokenizer.encode(text, add_special_tokens=special)
        strings = await asyncio.to_thread(_pieces, tokenizer, ids) if body.return_token_strs else None
        return _json(Tokens(len(ids), hello.max_seq_len, ids, strings))

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        hello = _served(serving.client, body.model)
        check_ids(body.tokens, hello, "tokens")
        return _json(Text(await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)))

    return routes


def _served(client: EngineClient, model: str | None) -> Hello:
    """Raises EngineLost, and ApiError 404 for another model."""
    hello = client.served()
    if model is not None:
        instance_of(hello, model)
    return hello


def _pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.piece(token) for token in ids]


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
