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
from server.api.openai.generation import Generation, OutputDelta, generate, merged
from server.api.openai.generation_job import Job, RequestLimits, StrategyHints
from server.api.openai.logprobs import PromptLogprobs, prompt_logprobs
from server.api.openai.models import instance_of, name_of
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
from server.api.openai.tenants import Priorities, tenant
from server.engine.ipc.client import EngineClient
from server.engine.ipc.messages import Admitted, Hello
from server.text.detokenizer import Detokenizer
from server.text.output import OutputText
from server.text.tokenizer import TokenizerBase
from server.text.vocabulary import Vocabulary

B = TypeVar("B", bound=GenerationRequest)

ENCODER = msgspec.json.Encoder()
MARK = "\0"  # a text that is no other part of a chunk
ABOUT = ("id", "created", "model", "system_fingerprint")  # of a job, in each of its answers and chunks
MANY_SCORES = 500  # log-probabilities with their alternatives; writing more would hold up other requests for 20 ms


@dataclass(frozen=True)
class Serving:
    """The objects and settings that endpoints of generation share."""

    client: EngineClient
    tokenizer: TokenizerBase
    most: RequestLimits
    deadlines: Deadlines
    priorities: Priorities
    log_prompts: bool = False
    any_model_name: bool = False  # a name that the model does not have stands for it, too

    def asked(
        self, body: GenerationRequest, header: str | None, authorization: str | None
    ) -> tuple[Hello, StrategyHints]:
        """Return what the engine serves, and a request's header, alias and tenant. Raises EngineLost, ApiError."""
        hello = self.client.served()
        self.priorities.check(body, authorization)
        model = name_of(hello, body.model, any_name=self.any_model_name)
        return hello, StrategyHints(
            model, hello.system_fingerprint, header, instance_of(hello, model), tenant(authorization)
        )


class Writer(ABC, Generic[B]):
    """An endpoint's way to write answers; one for each request."""

    def __init__(self, tokenizer: Vocabulary, body: B, job: Job) -> None:
        self.tokenizer = tokenizer
        self.body = body
        self.job = job
        self.about: dict[str, Any] = {name: getattr(job, name) for name in ABOUT}
        told_of_tokens = body.return_token_ids or body.continuous_usage
        self._texts_only = job.submits[0].sampling.logprobs is None and not told_of_tokens
        self._begun: set[int] = set()  # choices
        self._prompts: dict[int, PromptLogprobs] = {}  # by the prompt's first choice

    @abstractmethod
    def chunk(self, piece: OutputDelta | None, generation: Generation) -> GenerationResponse:
        """Return a chunk of a stream; without a piece, one without choices."""

    def parts(self, piece: OutputDelta) -> list[OutputDelta]:
        """Return the pieces that a streamed piece is sent in, a chunk for each."""
        return [piece]

    @abstractmethod
    def whole(self, pieces: list[OutputDelta], generation: Generation) -> GenerationResponse:
        """Return the whole response, from one piece for each choice."""

    def scores_in(self, piece: OutputDelta, generation: Generation) -> int:
        """Return the number of log-probabilities of a piece, those of its prompt included."""
        of_prompt = [] if piece.choice in self._begun else generation.prompt_scores(piece.choice)
        return len(piece.scores) + len(of_prompt)

    def adds_text_only(self, piece: OutputDelta) -> bool:
        """Return whether a piece has nothing but text, as most pieces have after the first one of a choice."""
        return self._texts_only and piece.finish_reason is None and piece.choice in self._begun

    def _tell(self, choice: Choice, piece: OutputDelta, generation: Generation) -> bool:
        """Set the fields that choices have beside their text; return whether this is a choice's first piece."""
        begins = piece.choice not in self._begun
        if begins:
            self._begun.add(piece.choice)
        if self.body.return_token_ids:
            choice.token_ids = [placed.token for placed in piece.tokens]
        choice.finish_reason = piece.finish_reason
        if piece.stop_reason is not None:
            choice.stop_reason = piece.stop_reason
        if piece.record is not None:
            choice.kv_cache = msgspec.convert(piece.record, Explanation, from_attributes=True)
        return begins

    def _tell_prompt(self, where: CompletionChoice | ChatAnswer, index: int, generation: Generation) -> None:
        """Set the fields that were asked for of a choice's prompt."""
        if self.body.return_token_ids:
            where.prompt_token_ids = self.job.prompt_of(index).ids
        if (top := self.body.prompt_logprobs) is not None:
            head = self.job.first_of(index)
            if head not in self._prompts:
                self._prompts[head] = prompt_logprobs(self.tokenizer, generation.prompt_scores(head), top)
            where.prompt_logprobs = self._prompts[head]


def answering(serving: Serving, writer: Writer[Any]) -> Response:
    """Return a response that runs the writer's job as long as its client is connected."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        asked = generate(serving.client, writer.job, outputs_of(writer), keep_texts=serving.log_prompts)
        async with asked as generation:
            scope["state"]["generation"] = generation  # for the log
            with serving.deadlines.of_request(generation.fail):
                async with serving.deadlines.of_queue():
                    admitted = await generation.admission()
                headers = {"X-KV-Cache": admitted.instance}
                if writer.body.stream:
                    return await send_events(scope, send, headers, _chunks(writer, admitted, generation))
                pieces = merged([piece async for together in generation.pieces() for piece in together])

            def write() -> bytes:
                told = writer.whole(pieces, generation)
                told.usage, told.kv_cache = usage(generation), kv_cache_choice(admitted)
                return ENCODER.encode(told)

            few = sum(writer.scores_in(piece, generation) for piece in pieces) < MANY_SCORES
            content = write() if few else await asyncio.to_thread(write)
        await Response(content, headers=headers, media_type="application/json")(scope, receive, send)

    return WhileConnected(answer)


async def _chunks(writer: Writer[Any], admitted: Admitted, generation: Generation) -> AsyncIterator[list[bytes]]:
    """Yield chunks of the stream, those that arrive together in one list."""
    chunks = Chunks(writer, admitted, generation)
    async for pieces in generation.pieces():
        few = sum(writer.scores_in(piece, generation) for piece in pieces) < MANY_SCORES
        yield chunks.write(pieces) if few else await asyncio.to_thread(chunks.write, pieces)
    if writer.body.include_usage:
        chunk = writer.chunk(None, generation)
        chunk.usage = usage(generation)
        yield [ENCODER.encode(chunk)]


class Chunks:
    """The chunks of a stream. Most differ from the one before in their text alone: the rest is encoded once."""

    def __init__(self, writer: Writer[Any], admitted: Admitted, generation: Generation) -> None:
        self._writer = writer
        self._generation = generation
        self._kv_cache: KVCacheChoice | UnsetType = kv_cache_choice(admitted)  # in the first chunk only
        self._around: dict[int, tuple[bytes, bytes]] = {}  # the text, by choice

    def write(self, pieces: Sequence[OutputDelta]) -> list[bytes]:
        chunks: list[bytes] = []
        for piece in pieces:
            if self._writer.adds_text_only(piece):
                chunks.append(self._plain(piece))
            else:
                chunks += map(self._whole, self._writer.parts(piece))
        return chunks

    def _plain(self, piece: OutputDelta) -> bytes:
        if piece.choice not in self._around:
            before, _, behind = self._whole(piece._replace(text=MARK)).partition(ENCODER.encode(MARK))
            self._around[piece.choice] = before, behind
        before, behind = self._around[piece.choice]
        return before + ENCODER.encode(piece.text) + behind

    def _whole(self, piece: OutputDelta) -> bytes:
        chunk = self._writer.chunk(piece, self._generation)
        if self._writer.body.include_usage:
            chunk.usage = usage_so_far(self._generation, piece) if self._writer.body.continuous_usage else None
        chunk.kv_cache, self._kv_cache = self._kv_cache, UNSET
        return ENCODER.encode(chunk)


def outputs_of(writer: Writer[Any]) -> list[OutputText]:
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
def usage(generation: Generation) -> Usage:
    """Return the token counts of a request: each prompt once, and every choice that was generated."""
    return _usage(generation.prompt_tokens, generation.completion_tokens, generation.cached_tokens)


def usage_so_far(generation: Generation, piece: OutputDelta) -> Usage:
    """Return the usage of one choice and its prompt, up to the end of the piece; as in vLLM."""
    prompt = len(generation.job.prompt_of(piece.choice).ids)
    return _usage(prompt, piece.num_tokens, generation.cached_tokens_of(piece.choice))


def _usage(prompt: int, completion: int, cached: int) -> Usage:
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))


def kv_cache_choice(admitted: Admitted) -> KVCacheChoice:
    return msgspec.convert(admitted, KVCacheChoice, from_attributes=True)
