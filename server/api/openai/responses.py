"""How a job is answered, whole or streamed, whatever the endpoint. Knows no field of any endpoint's own."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from fastapi import Response
from msgspec import UNSET, UnsetType
from starlette.types import Receive, Scope, Send

from server.api.http.cancellation import Deadlines, WhileConnected
from server.api.http.sse import send_events
from server.api.openai.generation import Generation, OutputDelta, generate, merge_deltas
from server.api.openai.generation_job import Job, RequestLimits, StrategyHints
from server.api.openai.logprobs import PromptLogprobs, make_prompt_logprobs
from server.api.openai.models import find_instance, resolve_model_name
from server.api.openai.request_models import GenerationRequest
from server.api.openai.response_models import (
    ChatAnswer,
    Choice,
    CompletionChoice,
    Explanation,
    GenerationResponse,
    KVCacheChoice,
    PromptTokensDetails,
    Usage,
)
from server.api.openai.tenants import Priorities, get_tenant
from server.engine.ipc.client import EngineClient
from server.engine.ipc.messages import Admitted, Hello
from server.text.detokenizer import Detokenizer
from server.text.output import OutputText
from server.text.tokenizer import TokenizerBase
from server.text.vocabulary import Vocabulary

B = TypeVar("B", bound=GenerationRequest)

ENCODER = msgspec.json.Encoder()
TEXT_PLACEHOLDER = "\0"  # a text that is no other part of a chunk
JOB_FIELDS = ("id", "created", "model", "system_fingerprint")  # of a job, in each of its answers and chunks
# Log-probabilities with their alternatives; writing more would hold up other requests for 20 ms
MAX_INLINE_LOGPROBS = 500


@dataclass(frozen=True)
class Serving:
    """The objects and settings that endpoints of generation share."""

    client: EngineClient
    tokenizer: TokenizerBase
    limits: RequestLimits
    deadlines: Deadlines
    priorities: Priorities
    log_prompts: bool = False
    any_model_name: bool = False  # a name that the model does not have stands for it, too

    def resolve_request(
        self, body: GenerationRequest, header: str | None, authorization: str | None
    ) -> tuple[Hello, StrategyHints]:
        """Return what the engine serves, and a request's header, alias and tenant. Raises EngineLost, ApiError."""
        hello = self.client.get_hello()
        self.priorities.check(body, authorization)
        model = resolve_model_name(hello, body.model, any_name=self.any_model_name)
        return hello, StrategyHints(
            model, hello.system_fingerprint, header, find_instance(hello, model), get_tenant(authorization)
        )


class Writer(ABC, Generic[B]):
    """An endpoint's way to write answers; one for each request."""

    def __init__(self, tokenizer: Vocabulary, body: B, job: Job) -> None:
        self.tokenizer = tokenizer
        self.body = body
        self.job = job
        self.common_fields: dict[str, Any] = {name: getattr(job, name) for name in JOB_FIELDS}
        told_of_tokens = body.return_token_ids or body.continuous_usage
        self._wants_text_only = job.submits[0].sampling.logprobs is None and not told_of_tokens
        self._started_choices: set[int] = set()  # choices
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}  # by the prompt's first choice

    @abstractmethod
    def make_chunk(self, piece: OutputDelta | None, generation: Generation) -> GenerationResponse:
        """Return a chunk of a stream; without a piece, one without choices."""

    def split_delta(self, piece: OutputDelta) -> list[OutputDelta]:
        """Return the pieces that a streamed piece is sent in, a chunk for each."""
        return [piece]

    @abstractmethod
    def make_response(self, pieces: list[OutputDelta], generation: Generation) -> GenerationResponse:
        """Return the whole response, from one piece for each choice."""

    def count_logprobs(self, piece: OutputDelta, generation: Generation) -> int:
        """Return the number of log-probabilities of a piece, those of its prompt included."""
        of_prompt = [] if piece.choice in self._started_choices else generation.get_prompt_logprobs(piece.choice)
        return len(piece.logprobs) + len(of_prompt)

    def is_text_only(self, piece: OutputDelta) -> bool:
        """Return whether a piece has nothing but text, as most pieces have after the first one of a choice."""
        return self._wants_text_only and piece.finish_reason is None and piece.choice in self._started_choices

    def _fill_choice(self, choice: Choice, piece: OutputDelta, generation: Generation) -> bool:
        """Set the fields that choices have beside their text; return whether this is a choice's first piece."""
        begins = piece.choice not in self._started_choices
        if begins:
            self._started_choices.add(piece.choice)
        if self.body.return_token_ids:
            choice.token_ids = [placed.token for placed in piece.tokens]
        choice.finish_reason = piece.finish_reason
        if piece.stop_reason is not None:
            choice.stop_reason = piece.stop_reason
        if piece.record is not None:
            choice.kv_cache = msgspec.convert(piece.record, Explanation, from_attributes=True)
        return begins

    def _fill_prompt_fields(self, where: CompletionChoice | ChatAnswer, index: int, generation: Generation) -> None:
        """Set the fields that were asked for of a choice's prompt."""
        if self.body.return_token_ids:
            where.prompt_token_ids = self.job.get_prompt(index).ids
        if (top := self.body.prompt_logprobs) is not None:
            head = self.job.get_first_choice(index)
            if head not in self._prompt_logprobs:
                self._prompt_logprobs[head] = make_prompt_logprobs(
                    self.tokenizer, generation.get_prompt_logprobs(head), top
                )
            where.prompt_logprobs = self._prompt_logprobs[head]


def create_response(serving: Serving, writer: Writer[Any]) -> Response:
    """Return a response that runs the writer's job as long as its client is connected."""

    async def run_job(scope: Scope, receive: Receive, send: Send) -> None:
        asked = generate(serving.client, writer.job, make_output_texts(writer), keep_texts=serving.log_prompts)
        async with asked as generation:
            scope["state"]["generation"] = generation  # for the log
            with serving.deadlines.limit_request_time(generation.fail):
                async with serving.deadlines.limit_queue_time():
                    admitted = await generation.wait_for_admission()
                headers = {"X-KV-Cache": admitted.instance}
                if writer.body.stream:
                    return await send_events(scope, send, headers, _iter_chunks(writer, admitted, generation))
                pieces = merge_deltas([piece async for together in generation.iter_deltas() for piece in together])

            def write() -> bytes:
                told = writer.make_response(pieces, generation)
                told.usage, told.kv_cache = compute_usage(generation), make_kv_cache_choice(admitted)
                return ENCODER.encode(told)

            few = sum(writer.count_logprobs(piece, generation) for piece in pieces) < MAX_INLINE_LOGPROBS
            content = write() if few else await asyncio.to_thread(write)
        await Response(content, headers=headers, media_type="application/json")(scope, receive, send)

    return WhileConnected(run_job)


async def _iter_chunks(writer: Writer[Any], admitted: Admitted, generation: Generation) -> AsyncIterator[list[bytes]]:
    """Yield chunks of the stream, those that arrive together in one list."""
    chunks = Chunks(writer, admitted, generation)
    async for pieces in generation.iter_deltas():
        few = sum(writer.count_logprobs(piece, generation) for piece in pieces) < MAX_INLINE_LOGPROBS
        yield chunks.encode(pieces) if few else await asyncio.to_thread(chunks.encode, pieces)
    if writer.body.include_usage:
        chunk = writer.make_chunk(None, generation)
        chunk.usage = compute_usage(generation)
        yield [ENCODER.encode(chunk)]


class Chunks:
    """The chunks of a stream. Most differ from the one before in their text alone: the rest is encoded once."""

    def __init__(self, writer: Writer[Any], admitted: Admitted, generation: Generation) -> None:
        self._writer = writer
        self._generation = generation
        self._kv_cache: KVCacheChoice | UnsetType = make_kv_cache_choice(admitted)  # in the first chunk only
        self._text_surroundings: dict[int, tuple[bytes, bytes]] = {}  # the text, by choice

    def encode(self, pieces: Sequence[OutputDelta]) -> list[bytes]:
        chunks: list[bytes] = []
        for piece in pieces:
            if self._writer.is_text_only(piece):
                chunks.append(self._encode_text(piece))
            else:
                chunks += map(self._encode_chunk, self._writer.split_delta(piece))
        return chunks

    def _encode_text(self, piece: OutputDelta) -> bytes:
        if piece.choice not in self._text_surroundings:
            before, _, behind = self._encode_chunk(piece._replace(text=TEXT_PLACEHOLDER)).partition(
                ENCODER.encode(TEXT_PLACEHOLDER)
            )
            self._text_surroundings[piece.choice] = before, behind
        before, behind = self._text_surroundings[piece.choice]
        return before + ENCODER.encode(piece.text) + behind

    def _encode_chunk(self, piece: OutputDelta) -> bytes:
        chunk = self._writer.make_chunk(piece, self._generation)
        if self._writer.body.include_usage:
            chunk.usage = compute_usage_so_far(self._generation, piece) if self._writer.body.continuous_usage else None
        chunk.kv_cache, self._kv_cache = self._kv_cache, UNSET
        return ENCODER.encode(chunk)


def make_output_texts(writer: Writer[Any]) -> list[OutputText]:
    """Return the output text of each choice, which begins after its prompt."""
    body = writer.body
    return [
        OutputText(
            Detokenizer(writer.tokenizer, submit.prompt, skip_special=body.skip_special_tokens),
            body.stop,
            include_stop=body.include_stop_str_in_output,
            min_tokens=body.min_tokens,
        )
        for submit in writer.job.submits
    ]


# ---------------------------------------------------------------- what all answers have
def compute_usage(generation: Generation) -> Usage:
    """Return the token counts of a request: each prompt once, and every choice that was generated."""
    return _make_usage(generation.prompt_tokens, generation.completion_tokens, generation.cached_tokens)


def compute_usage_so_far(generation: Generation, piece: OutputDelta) -> Usage:
    """Return the usage of one choice and its prompt, up to the end of the piece; as in vLLM."""
    prompt = len(generation.job.get_prompt(piece.choice).ids)
    return _make_usage(prompt, piece.num_tokens, generation.get_cached_tokens(piece.choice))


def _make_usage(prompt: int, completion: int, cached: int) -> Usage:
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))


def make_kv_cache_choice(admitted: Admitted) -> KVCacheChoice:
    return msgspec.convert(admitted, KVCacheChoice, from_attributes=True)
