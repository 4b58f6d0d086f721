"""POST /v1/chat/completions: messages become a prompt by the model's template; the rest is as for completions."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Response
from pydantic import Field, ValidationInfo, field_validator

from server.api.http.body import JsonRoute
from server.api.http.errors import make_error_responses
from server.api.openai.conversation import Messages, Rendering, encode_chat, iter_texts
from server.api.openai.generation import Generation, OutputDelta
from server.api.openai.generation_job import PromptTokens, check_prompt, make_job, make_sampling
from server.api.openai.logprobs import ChatLogprobs, make_chat_logprobs
from server.api.openai.request_models import (
    INT64,
    MAX_NAME_LENGTH,
    GenerationRequest,
    Ignored,
    LongList,
    Unsupported,
    allow_only,
)
from server.api.openai.response_models import ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatMessage, Delta
from server.api.openai.responses import Serving, Writer, create_response
from server.text.tokenizer import truncate_prompt


class ChatRequest(GenerationRequest, Rendering):
    """Body of POST /v1/chat/completions."""

    messages: Messages = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=0, lt=INT64, description="as max_completion_tokens, which is its new name")
    max_completion_tokens: int | None = Field(
        None, ge=0, lt=INT64, description="default: what the context has room for"
    )
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20, description="alternatives to each token; only with logprobs")
    add_special_tokens: bool = Field(False, description="beside those that the template writes")
    modalities: Annotated[LongList[str], allow_only(["text"])] = Field(default=["text"])
    tools: Annotated[list[Any], allow_only([])] = Field(default_factory=list)
    tool_choice: Annotated[Any, allow_only("none", "auto")] = "none"
    parallel_tool_calls: Ignored[bool] = None
    functions: Annotated[list[Any], allow_only([])] = Field(default_factory=list)
    function_call: Annotated[Any, allow_only("none", "auto")] = "none"
    audio: Unsupported = None
    moderation: Unsupported = None
    web_search_options: Unsupported = None

    @field_validator("top_logprobs")
    @classmethod
    def _check_top_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and not info.data.get("logprobs"):
            raise ValueError("allowed only with logprobs: true")
        return value

    @field_validator("max_completion_tokens")
    @classmethod
    def _check_max_tokens(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("max_tokens", value) not in (None, value):
            raise ValueError("differs from max_tokens; send one of them")
        return value

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(route_class=JsonRoute, tags=["chat"], responses=make_error_responses(400, 404, 413, 429, 503))
    tokenizer = serving.tokenizer

    @routes.post("/v1/chat/completions")
    async def create_chat_completion(
        body: ChatRequest,
        x_kv_cache: Annotated[str | None, Header(max_length=MAX_NAME_LENGTH)] = None,
        authorization: Annotated[str | None, Header(include_in_schema=False)] = None,
    ) -> Response:
        hello, how = serving.resolve_request(body, x_kv_cache, authorization)
        serving.limits.check_choices(1, body.n)
        serving.limits.check_stop(body.stop)
        serving.limits.check_total_length(iter_texts(body.messages), "messages")
        longest = serving.limits.get_max_characters(hello.max_seq_len if body.truncate_prompt_tokens is None else None)
        special = body.add_special_tokens
        encoded = await encode_chat(tokenizer, body.messages, body, longest, add_special_tokens=special)
        prompt = PromptTokens(truncate_prompt(encoded.ids, body.truncate_prompt_tokens), encoded.text)
        max_tokens = (
            max(1, hello.max_seq_len - len(prompt.ids))
            if body.requested_max_tokens is None
            else body.requested_max_tokens
        )
        check_prompt(prompt.ids, max_tokens, hello)
        sampling = make_sampling(
            body,
            hello,
            max_tokens=max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
        )
        job = make_job("chatcmpl", body, [prompt], sampling, body.n, how)
        return create_response(serving, ChatWriter(tokenizer, body, job))

    return routes


class ChatWriter(Writer[ChatRequest]):
    """Streams a choice's role, then its text, then its finish reason; fields of the prompt are in its first chunk."""

    def split_delta(self, piece: OutputDelta) -> list[OutputDelta]:
        parts = [] if piece.choice in self._started_choices else [OutputDelta(piece.choice, "", [], [])]
        if piece.finish_reason is None:
            return [*parts, piece]
        if piece.text:
            parts.append(piece._replace(finish_reason=None, stop_reason=None, record=None))
            piece = piece._replace(text="", tokens=[], logprobs=[])
        return [*parts, piece]

    def make_chunk(self, piece: OutputDelta | None, generation: Generation) -> ChatChunk:
        chunk = ChatChunk(**self.common_fields, choices=[])
        if piece is not None:
            first = not self._started_choices
            logprobs = self._make_logprobs(piece) if piece.tokens else None
            choice = ChatChunkChoice(index=piece.choice, delta=Delta(), logprobs=logprobs)
            if self._fill_choice(choice, piece, generation):
                choice.delta = Delta("", "assistant")
            elif piece.finish_reason is None:
                choice.delta = Delta(piece.text)
            if first:
                self._fill_prompt_fields(chunk, piece.choice, generation)
            chunk.choices.append(choice)
        return chunk

    def make_response(self, pieces: list[OutputDelta], generation: Generation) -> ChatCompletion:
        choices = []
        for piece in pieces:
            message = ChatMessage(piece.text)
            choice = ChatChoice(index=piece.choice, message=message, logprobs=self._make_logprobs(piece))
            self._fill_choice(choice, piece, generation)
            choices.append(choice)
        response = ChatCompletion(**self.common_fields, choices=choices)
        self._fill_prompt_fields(response, 0, generation)
        return response

    def _make_logprobs(self, piece: OutputDelta) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        top, by_id = self.body.top_logprobs or 0, self.body.return_tokens_as_token_ids
        return make_chat_logprobs(self.tokenizer, piece.tokens, piece.logprobs, top, by_id=by_id)
