"""How a job is answered, whole or streamed, whatever the endpoint. Knows no field of any endpoint's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from fastapi import Response
from msgspec import UNSET, UnsetType
from starlette.types import Receive, Scope, Send

from server.api.deadlines import Deadlines
from server.api.disconnect import WhileConnected
from server.api.generation import Generation, Piece, generate, whole
from server.api.jobs import Job, Most
from server.api.logprobs import prompt_logprobs
from server.api.objects import Answer, Choice, Explanation, KVCacheChoice, PromptTokensDetails, Usage
from server.api.schemas import GenerationRequest
from server.api.sse import send_events
from server.engine.client import EngineClient
from server.engine.messages import Admitted
from server.engine.report import RequestRecord
from server.text.detokenizer import Detokenizer
from server.text.output import OutputText
from server.text.tokenizer import Tokenizer

B = TypeVar("B", bound=GenerationRequest)


@dataclass(frozen=True)
class Serving:
    """What an endpoint of generation is given."""

    client: EngineClient
    tokenizer: Tokenizer
    most: Most
    deadlines: Deadlines


class Writer(ABC, Generic[B]):
    """An endpoint's way to write answers; one for each request."""

    def __init__(self, tokenizer: Tokenizer, body: B, job: Job) -> None:
        self._tokenizer = tokenizer
        self._body = body
        self._job = job
        self._begun: set[int] = set()  # choices

    @abstractmethod
    def chunk(self, piece: Piece | None, generation: Generation) -> Answer:
        """Of a stream; without a piece, one without choices."""

    @abstractmethod
    def whole(self, pieces: list[Piece], generation: Generation) -> Answer:
        """One piece for each choice."""

    def _tell(self, choice: Choice, piece: Piece, generation: Generation) -> bool:
        """What choices of all endpoints have beside their text; whether this is the first piece of its choice."""
        begins = piece.choice not in self._begun
        if begins:
            self._begun.add(piece.choice)
            self._tell_prompt(choice, piece.choice, generation)
        if self._body.return_token_ids:
            choice.token_ids = [told.token for told in piece.tokens]
        choice.finish_reason = piece.finish_reason
        choice.stop_reason = UNSET if piece.stop_reason is None else piece.stop_reason
        choice.kv_cache = explanation(piece.record)
        return begins

    def _tell_prompt(self, choice: Choice, index: int, generation: Generation) -> None:
        if self._body.return_token_ids:
            choice.prompt_token_ids = self._job.prompt_of(index).ids
        if (top := self._body.prompt_logprobs) is not None:
            choice.prompt_logprobs = prompt_logprobs(self._tokenizer, generation.prompt_scores(index), top)


def answering(serving: Serving, body: GenerationRequest, job: Job, writer: Writer[Any]) -> Response:
    """Runs the job while its client is there."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        outputs = outputs_of(serving.tokenizer, body, job)
        async with generate(serving.client, job, outputs) as generation:
            with serving.deadlines.of_request(generation.fail):
                async with serving.deadlines.of_queue():
                    admitted = await generation.admission()
                headers = {"X-KV-Cache": admitted.instance}
                if body.stream:
                    return await send_events(send, headers, _chunks(body, job, admitted, generation, writer))
                told = writer.whole(whole([piece async for piece in generation.pieces()]), generation)
            told.usage, told.kv_cache = usage(job, generation), kv_cache_choice(admitted)
        response = Response(msgspec.json.encode(told), headers=headers, media_type="application/json")
        await response(scope, receive, send)

    return WhileConnected(answer)


async def _chunks(
    body: GenerationRequest, job: Job, admitted: Admitted, generation: Generation, writer: Writer[Any]
) -> AsyncIterator[bytes]:
    kv_cache: KVCacheChoice | UnsetType = kv_cache_choice(admitted)  # in the first chunk only
    async for piece in generation.pieces():
        chunk = writer.chunk(piece, generation)
        chunk.usage = None if body.include_usage else UNSET
        chunk.kv_cache, kv_cache = kv_cache, UNSET
        yield msgspec.json.encode(chunk)
    if body.include_usage:
        chunk = writer.chunk(None, generation)
        chunk.usage = usage(job, generation)
        yield msgspec.json.encode(chunk)


def outputs_of(tokenizer: Tokenizer, body: GenerationRequest, job: Job) -> list[OutputText]:
    """The text of each choice, which begins after its prompt's."""
    return [
        OutputText(
            Detokenizer(tokenizer, submit.prompt, skip_special=body.skip_special_tokens),
            body.stop,
            include_stop=body.include_stop_str_in_output,
        )
        for submit in job.submits
    ]


# ---------------------------------------------------------------- what all answers have
def usage(job: Job, generation: Generation) -> Usage:
    """A prompt counts once, however many choices it has; every choice that was written counts."""
    prompt, completion = sum(len(prompt.ids) for prompt in job.prompts), generation.completion_tokens
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(generation.cached_tokens))


def kv_cache_choice(admitted: Admitted) -> KVCacheChoice:
    return KVCacheChoice(admitted.instance, admitted.reason, admitted.cached_tokens)


def explanation(record: RequestRecord | None) -> Explanation | UnsetType:
    if record is None:
        return UNSET
    return Explanation(
        instance=record.instance,
        reason=record.reason,
        cached_tokens=record.cached_tokens,
        miss_reason=record.miss,
        peak_kv_bytes=record.kv_bytes,
        preemptions=record.preemptions,
        queue_seconds=record.queue_seconds,
        prefill_seconds=record.prefill_seconds,
        decode_seconds=record.decode_seconds,
    )
