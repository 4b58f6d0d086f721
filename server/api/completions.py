"""POST /v1/completions: from OpenAI's request to the engine's messages, and back. Whole or streamed."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated

import msgspec
from fastapi import APIRouter, Header, Response
from msgspec import UNSET, UnsetType
from starlette.types import Receive, Scope, Send

from server.api.body import JsonRoute
from server.api.deadlines import Deadlines
from server.api.disconnect import WhileConnected
from server.api.errors import ApiError, documented
from server.api.generation import Generation, generate
from server.api.models import instance_of, served_by
from server.api.objects import Completion, CompletionChoice, Explanation, KVCacheChoice, PromptTokensDetails, Usage
from server.api.schemas import INT64, LONGEST_NAME, CompletionRequest
from server.api.sse import send_events
from server.api.tenants import salt_of, tenant
from server.engine.client import EngineClient
from server.engine.messages import Admitted, Caching, Hello, Sampling, Submit
from server.engine.report import RequestRecord
from server.text.tokenizer import Tokenizer


def router(client: EngineClient, tokenizer: Tokenizer, deadlines: Deadlines) -> APIRouter:
    routes = APIRouter(route_class=JsonRoute, tags=["completions"], responses=documented(400, 404, 413, 429, 503))

    @routes.post("/v1/completions")
    async def create_completion(
        body: CompletionRequest,
        x_kv_cache: Annotated[str | None, Header(max_length=LONGEST_NAME)] = None,
        authorization: Annotated[str | None, Header(include_in_schema=False)] = None,
    ) -> Response:
        hello = served_by(client)
        alias = instance_of(hello, body.model)
        prompt = body.prompt if isinstance(body.prompt, list) else await tokenizer.encode(body.prompt)
        check_prompt(prompt, body.max_tokens, hello)
        job = Job.new(body, prompt, caching(body, tenant(authorization)), x_kv_cache, alias)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            async with generate(client, tokenizer, job.submits, body.stop) as generation:
                with deadlines.of_request(generation.fail):
                    async with deadlines.of_queue():
                        admitted = await generation.admission()
                    headers = {"X-KV-Cache": admitted.instance}
                    if body.stream:
                        return await send_events(send, headers, chunks(job, admitted, generation))
                    completion = await whole(job, admitted, generation)
            response = Response(msgspec.json.encode(completion), headers=headers, media_type="application/json")
            await response(scope, receive, send)

        return WhileConnected(answer)

    return routes


# ---------------------------------------------------------------- the request
@dataclass(frozen=True)
class Job:
    """A checked request: what the engine is asked for, and what all parts of the answer repeat."""

    id: str
    created: int
    body: CompletionRequest
    num_prompt_tokens: int
    submits: list[Submit]  # one for each choice

    @classmethod
    def new(
        cls, body: CompletionRequest, prompt: list[int], caching: Caching, header: str | None, alias: str | None
    ) -> Job:
        job_id = f"cmpl-{uuid.uuid4().hex}"
        seed = secrets.randbits(63) if body.seed is None else body.seed
        submits = [
            Submit(
                request_id=f"{job_id}-{index}",
                prompt=prompt,
                sampling=sampling(body, seed + index),
                kv_cache=body.kv_cache,
                header=header,
                alias=alias,
                priority=body.priority,
                caching=caching,
                explain=body.explain,
                sibling_of=f"{job_id}-0" if index else None,
            )
            for index in range(body.n)
        ]
        return cls(job_id, int(time.time()), body, len(prompt), submits)

    def part(self, choices: list[CompletionChoice]) -> Completion:
        """A whole completion, or a chunk of one."""
        return Completion(self.id, self.created, self.body.model, choices)

    def usage(self, completion_tokens: int, admitted: Admitted) -> Usage:
        prompt = self.num_prompt_tokens
        details = PromptTokensDetails(admitted.cached_tokens)
        return Usage(prompt, completion_tokens, prompt + completion_tokens, details)


def sampling(body: CompletionRequest, seed: int) -> Sampling:
    return Sampling(
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_k=max(0, body.top_k),
        top_p=body.top_p,
        min_p=body.min_p,
        seed=seed % INT64,
        ignore_eos=body.ignore_eos,
    )


def caching(body: CompletionRequest, tenant: str) -> Caching:
    return Caching(
        salt=salt_of(tenant, body.cache_salt),
        max_cached=0 if body.skip_reading_prefix_cache else None,
        priority=body.kv_cache_priority,
        ttl=body.kv_cache_ttl,
    )


def check_prompt(prompt: list[int], max_tokens: int, hello: Hello) -> None:
    """Raises ApiError for a prompt that the model has no tokens or no room for."""
    if not prompt:
        raise ApiError(400, "prompt: should have at least one token", param="prompt")
    if min(prompt) < 0 or max(prompt) >= hello.vocab_size:
        raise ApiError(400, f"prompt: token ids should be from 0 to {hello.vocab_size - 1}", param="prompt")
    if len(prompt) + max_tokens > hello.max_seq_len:
        raise ApiError(
            400,
            f"the model's context is {hello.max_seq_len} tokens long, but {len(prompt) + max_tokens} were asked for: "
            f"{len(prompt)} in the prompt and {max_tokens} in the completion; make either shorter",
            param="prompt" if len(prompt) >= hello.max_seq_len else "max_tokens",
            code="context_length_exceeded",
        )


# ---------------------------------------------------------------- the answer
def kv_cache_choice(admitted: Admitted) -> KVCacheChoice:
    return KVCacheChoice(admitted.instance, admitted.reason, admitted.cached_tokens)


def explanation(record: RequestRecord | None) -> Explanation | UnsetType:
    if record is None:
        return UNSET
    return Explanation(
        record.instance,
        record.reason,
        record.cached_tokens,
        record.miss,
        record.kv_bytes,
        record.preemptions,
        record.queue_seconds,
        record.prefill_seconds,
        record.decode_seconds,
    )


async def whole(job: Job, admitted: Admitted, generation: Generation) -> Completion:
    choices = [CompletionChoice(index, "", None) for index in range(job.body.n)]
    async for piece in generation.pieces():
        choices[piece.choice].text += piece.text
        choices[piece.choice].finish_reason = piece.finish_reason
        choices[piece.choice].kv_cache = explanation(piece.record)
    completion = job.part(choices)
    completion.usage = job.usage(generation.completion_tokens, admitted)
    completion.kv_cache = kv_cache_choice(admitted)
    return completion


async def chunks(job: Job, admitted: Admitted, generation: Generation) -> AsyncIterator[bytes]:
    include_usage = job.body.include_usage
    kv_cache: KVCacheChoice | UnsetType = kv_cache_choice(admitted)  # in the first chunk only
    async for piece in generation.pieces():
        choice = CompletionChoice(piece.choice, piece.text, piece.finish_reason, kv_cache=explanation(piece.record))
        chunk = job.part([choice])
        chunk.usage = None if include_usage else UNSET
        chunk.kv_cache, kv_cache = kv_cache, UNSET
        yield msgspec.json.encode(chunk)
    if include_usage:
        chunk = job.part([])
        chunk.usage = job.usage(generation.completion_tokens, admitted)
        yield msgspec.json.encode(chunk)
