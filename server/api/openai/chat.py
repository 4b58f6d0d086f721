"""POST /v1/chat/completions: messages become a prompt by the model's template; the rest is as for completions."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Response
from pydantic import Field, ValidationInfo, field_validator

from server.api.http.body import JsonRoute
from server.api.http.errors import documented
from server.api.openai.conversation import Messages, Rendering, encoded_chat, texts_of
from server.api.openai.generation import Generation, OutputDelta
from server.api.openai.generation_job import PromptTokens, check_prompt, job_of, sampling_of
from server.api.openai.logprobs import ChatLogprobs, chat_logprobs
from server.api.openai.request_models import (
    INT64,
    LONGEST_NAME,
    GenerationRequest,
    Ignored,
    LongList,
    Unsupported,
    only,
)
from server.api.openai.response_models import ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatMessage, Delta
from server.api.openai.responses import Serving, Writer, answering
from server.text.tokenizer import keep_last


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
    modalities: Annotated[LongList[str], only(["text"])] = Field(default=["text"])
    tools: Annotated[list[Any], only([])] = Field(default_factory=list)
    tool_choice: Annotated[Any, only("none", "auto")] = "none"
    parallel_tool_calls: Ignored[bool] = None
    functions: Annotated[list[Any], only([])] = Field(default_factory=list)
    function_call: Annotated[Any, only("none", "auto")] = "none"
    audio: Unsupported = None
    moderation: Unsupported = None
    web_search_options: Unsupported = None

    @field_validator("top_logprobs")
    @classmethod
    def _top_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and not info.data.get("logprobs"):
            raise ValueError("allowed only with logprobs: true")
        return value

    @field_validator("max_completion_tokens")
    @classmethod
    def _one_of_both(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("max_tokens", value) not in (None, value):
            raise ValueError("differs from max_tokens; send one of them")
        return value

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(route_class=JsonRoute, tags=["chat"], responses=documented(400, 404, 413, 429, 503))
    tokenizer = serving.tokenizer

    @routes.post("/v1/chat/completions")
    async def create_chat_completion(
        body: ChatRequest,
        x_kv_cache: Annotated[str | None, Header(max_length=LONGEST_NAME)] = None,
        authorization: Annotated[str | None, Header(include_in_schema=False)] = None,
    ) -> Response:
        hello, how = serving.asked(body, x_kv_cache, authorization)
        serving.most.check_choices(1, body.n)
        serving.most.check_stop(body.stop)
        serving.most.check_together(texts_of(body.messages), "messages")
        longest = serving.most.characters(hello.max_seq_len if body.truncate_prompt_tokens is None else None)
        special = body.add_special_tokens
        encoded = await encoded_chat(tokenizer, body.messages, body, longest, add_special_tokens=special)
        prompt = PromptTokens(keep_last(encoded.ids, body.truncate_prompt_tokens), encoded.text)
        max_tokens = max(1, hello.max_seq_len - len(prompt.ids)) if body.most_tokens is None else body.most_tokens
        check_prompt(prompt.ids, max_tokens, hello)
        sampling = sampling_of(
            body,
            hello,
            max_tokens=max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
        )
        job = job_of("chatcmpl", body, [prompt], sampling, body.n, how)
        return answering(serving, ChatWriter(tokenizer, body, job))

    return routes


class ChatWriter(Writer[ChatRequest]):
    """Streams a choice's role, then its text, then its finish reason; fields of the prompt are in its first chunk."""

    def parts(self, piece: OutputDelta) -> list[OutputDelta]:
        parts = [] if piece.choice in self._begun else [OutputDelta(piece.choice, "", [], [])]
        if piece.finish_reason is None:
            return [*parts, piece]
        if piece.text:
            parts.append(piece._replace(finish_reason=None, stop_reason=None, record=None))
            piece = piece._replace(text="", tokens=[], scores=[])
        return [*parts, piece]

    def chunk(self, piece: OutputDelta | None, generation: Generation) -> ChatChunk:
        chunk = ChatChunk(**self.about, choices=[])
        if piece is not None:
            first = not self._begun
            logprobs = self._logprobs(piece) if piece.tokens else None
            choice = ChatChunkChoice(index=piece.choice, delta=Delta(), logprobs=logprobs)
            if self._tell(choice, piece, generation):
                choice.delta = Delta("", "assistant")
            elif piece.finish_reason is None:
                choice.delta = Delta(piece.text)
            if first:
                self._tell_prompt(chunk, piece.choice, generation)
            chunk.choices.append(choice)
        return chunk

    def whole(self, pieces: list[OutputDelta], generation: Generation) -> ChatCompletion:
        choices = []
        for piece in pieces:
            message = ChatMessage(piece.text)
            choice = ChatChoice(index=piece.choice, message=message, logprobs=self._logprobs(piece))
            self._tell(choice, piece, generation)
            choices.append(choice)
        response = ChatCompletion(**self.about, choices=choices)
        self._tell_prompt(response, 0, generation)
        return response

    def _logprobs(self, piece: OutputDelta) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        top, by_id = self.body.top_logprobs or 0, self.body.return_tokens_as_token_ids
        return chat_logprobs(self.tokenizer, piece.tokens, piece.scores, top, by_id=by_id)
