"""POST /v1/chat/completions: messages become a prompt by the model's template; the rest is as for completions."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Response
from pydantic import Field, ValidationInfo, field_validator

from server.api.answers import Serving, Writer, answering
from server.api.body import JsonRoute
from server.api.conversation import Message, Rendering, prompt_of
from server.api.errors import documented
from server.api.generation import Generation, Piece
from server.api.jobs import PromptTokens, check_prompt, job_of, sampling_of
from server.api.logprobs import ChatLogprobs, chat_logprobs
from server.api.objects import ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatMessage, Delta
from server.api.schemas import INT64, LONGEST_NAME, GenerationRequest, LongList, only
from server.text.tokenizer import keep_last


class ChatRequest(GenerationRequest, Rendering):
    """Body of POST /v1/chat/completions."""

    messages: LongList[Message] = Field(min_length=1)
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
    parallel_tool_calls: bool = Field(True, description="no effect without tools")

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
        text = await prompt_of(tokenizer.chat, body.messages, body, serving.most.prompt_characters)
        ids = await tokenizer.encode(text, add_special_tokens=body.add_special_tokens)
        prompt = PromptTokens(keep_last(ids, body.truncate_prompt_tokens), text)
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
    """The first chunk of each choice says who speaks."""

    def chunk(self, piece: Piece | None, generation: Generation) -> ChatChunk:
        chunk = ChatChunk(id=self.job.id, created=self.job.created, model=self.job.model, choices=[])
        if piece is not None:
            choice = ChatChunkChoice(index=piece.choice, delta=Delta(piece.text), logprobs=self._logprobs(piece))
            if self._tell(choice, piece, generation):
                choice.delta.role = "assistant"
            chunk.choices.append(choice)
        return chunk

    def whole(self, pieces: list[Piece], generation: Generation) -> ChatCompletion:
        choices = []
        for piece in pieces:
            message = ChatMessage(piece.text)
            choice = ChatChoice(index=piece.choice, message=message, logprobs=self._logprobs(piece))
            self._tell(choice, piece, generation)
            choices.append(choice)
        return ChatCompletion(id=self.job.id, created=self.job.created, model=self.job.model, choices=choices)

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        top = self.body.top_logprobs or 0
        return chat_logprobs(self.tokenizer, piece.tokens, piece.scores, top) if self.body.logprobs else None
