"""Sends a generation to its client, whole or streamed, as long as the client is connected.

An endpoint gives a `Format`: two pure functions that make its response. Knows no field that only one endpoint has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple

import msgspec
from fastapi import Response
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.http.errors import ApiError, to_api_error
from server.api.openai.generation import COMPARED_COLUMNS, Generation, OutputDelta
from server.api.openai.generation_job import B
from server.api.openai.logprobs import make_prompt_logprobs
from server.api.openai.response_models import (
    ChatAnswer,
    Choice,
    CompletionChunkChoice,
    CompletionTokensDetails,
    Explanation,
    GenerationResponse,
    KVCacheChoice,
    PromptProgress,
    PromptTokensDetails,
    ShadowFidelity,
    Timings,
    TokenComparison,
    Usage,
)
from server.engine.ipc.messages import Compared, Progress
from server.records import RequestRecord
from server.text.tool_parsers.calls import ToolCall, merge_calls
from server.text.tool_parsers.message_parser import join_parts

ENCODER = msgspec.json.Encoder()
TEXT_PLACEHOLDER = "\0"  # stands for a chunk's text; occurs nowhere else in a chunk
# Chunks with fewer log-probabilities are encoded on the event loop; others in a thread, as they could take 20 ms
MAX_INLINE_LOGPROBS = 500
EVENT_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would collect events
}


class Format(NamedTuple, Generic[B]):
    """How an endpoint writes its response, streamed or whole: two pure functions of deltas and their generation."""

    # Returns the chunks of a streamed delta; for None, the last chunk, with the usage and without choices
    make_chunks: Callable[[OutputDelta | None, Generation[B]], Sequence[GenerationResponse | dict[str, Any]]]
    # Returns the whole response, made of one delta for each choice
    make_response: Callable[[Sequence[OutputDelta], Generation[B]], GenerationResponse | dict[str, Any]]
    encode: Callable[[Any], bytes] = ENCODER.encode  # encodes a chunk
    has_state: bool = False  # whether a chunk depends on those before it
    # Returns the error with the endpoint's name of the field that the engine has refused, if that is another one
    rename_field: Callable[[ApiError], ApiError] = lambda error: error


def respond(generation: Generation[B], format: Format[B]) -> Response:
    """Return a response that runs the generation while its client is connected, and writes it in this format."""

    async def send_generation(scope: Scope, receive: Receive, send: Send) -> None:
        async with generation.running():
            scope["state"]["generation"] = generation  # for the log
            try:
                admitted = await generation.wait_for_admission()
            except ApiError as error:
                raise format.rename_field(error) from None
            headers = {"X-KV-Cache": admitted.instance}
            if generation.job.body.stream:
                return await send_events(scope, send, headers, _iter_chunks(generation, format))
            deltas = _merge_deltas([delta async for together in generation.iter_deltas() for delta in together])

        def write() -> bytes:
            return ENCODER.encode(format.make_response(deltas, generation))

        content = write() if _are_quick(deltas, generation) else await asyncio.to_thread(write)
        await Response(content, headers=headers, media_type="application/json")(scope, receive, send)

    return WhileConnected(send_generation)


def _merge_deltas(deltas: Sequence[OutputDelta]) -> list[OutputDelta]:
    """Merge deltas into one for each choice, in the order of choices."""
    by_choice: dict[int, list[OutputDelta]] = {}
    for delta in deltas:
        by_choice.setdefault(delta.choice, []).append(delta)
    return [
        parts[-1]._replace(
            text="".join(part.text for part in parts),
            reasoning="".join(part.reasoning for part in parts),
            tool_calls=_merge_calls_of(parts),
            parts=join_parts(each for part in parts for each in part.parts),
            tokens=[token for part in parts for token in part.tokens],
            logprobs=[score for part in parts for score in part.logprobs],
            comparison=_merge_comparisons([part.comparison for part in parts if part.comparison is not None]),
            is_first=parts[0].is_first,
            is_first_of_all=parts[0].is_first_of_all,
        )
        for _, parts in sorted(by_choice.items())
    ]


def _merge_calls_of(deltas: Sequence[OutputDelta]) -> tuple[ToolCall, ...]:
    calls = [call for delta in deltas for call in delta.tool_calls]
    return merge_calls(calls) if calls else ()


def _merge_comparisons(parts: Sequence[Compared]) -> Compared | None:
    """Return one event with the tokens of all events of a choice; None if there is none."""
    if len(parts) < 2:
        return parts[0] if parts else None
    columns = {name: [value for part in parts for value in getattr(part, name)] for name in COMPARED_COLUMNS}
    return msgspec.structs.replace(parts[-1], **columns)


async def _iter_chunks(generation: Generation[B], format: Format[B]) -> AsyncIterator[list[bytes]]:
    """Yield the encoded chunks of a stream as lists: chunks of deltas that arrive together are in one list."""
    encoder = ChunkEncoder(generation, format)
    async for deltas in generation.iter_deltas():
        quick = _are_quick(deltas, generation)
        yield encoder.encode(deltas) if quick else await asyncio.to_thread(encoder.encode, deltas)
    if generation.job.body.include_usage:
        yield [format.encode(chunk) for chunk in format.make_chunks(None, generation)]


def _are_quick(deltas: Sequence[OutputDelta], generation: Generation[B]) -> bool:
    """Return whether deltas, with their prompts, have few log-probabilities and so are quick to encode."""
    count = 0
    for delta in deltas:
        count += len(delta.logprobs)
        if delta.is_first:
            count += len(generation.get_prompt_logprobs(delta.choice))
    return count < MAX_INLINE_LOGPROBS


class ChunkEncoder(Generic[B]):
    """Encodes the chunks of a stream. Most differ from the chunk before only in the text: the rest is encoded once."""

    def __init__(self, generation: Generation[B], format: Format[B]) -> None:
        self._generation = generation
        self._format = format
        body, sampling = generation.job.body, generation.job.submits[0].sampling
        has_more = body.return_token_ids or body.continuous_usage or body.kv_cache_reference is not None
        has_more |= body.timings_per_token or body.return_progress
        self._wants_text_only = sampling.logprobs is None and not (has_more or format.has_state)
        self._text_surroundings: dict[int, tuple[bytes, bytes]] = {}  # by choice: JSON before and after the text

    def encode(self, deltas: Sequence[OutputDelta]) -> list[bytes]:
        """Return the encoded chunks of these deltas, in order."""
        chunks: list[bytes] = []
        for delta in deltas:
            has_text_only = delta.finish_reason is None and not (delta.is_first or delta.reasoning or delta.tool_calls)
            if self._wants_text_only and has_text_only:
                chunks.append(self._encode_text(delta))
            else:
                chunks += map(self._format.encode, self._format.make_chunks(delta, self._generation))
        return chunks

    def _encode_text(self, delta: OutputDelta) -> bytes:
        """Return the encoded chunk of a delta that has a text and no other changing field."""
        if delta.choice not in self._text_surroundings:
            (chunk,) = self._format.make_chunks(delta._replace(text=TEXT_PLACEHOLDER), self._generation)
            before, _, after = ENCODER.encode(chunk).partition(ENCODER.encode(TEXT_PLACEHOLDER))
            self._text_surroundings[delta.choice] = before, after
        before, after = self._text_surroundings[delta.choice]
        return before + ENCODER.encode(delta.text) + after


# ---------------------------------------------------------------- fields that responses of all endpoints have
def make_response_fields(generation: Generation[B]) -> dict[str, Any]:
    """Return the fields of a whole response except its choices."""
    kv_cache = _make_kv_cache_choice(generation)
    usage = _compute_usage(generation)
    fields = {**generation.job.common_fields, "usage": usage, "kv_cache": kv_cache}
    return fields | ({"timings": _compute_timings(generation, usage)} if generation.job.body.timings_per_token else {})


def make_chunk_fields(delta: OutputDelta | None, generation: Generation[B]) -> dict[str, Any]:
    """Return the fields of a delta's chunk except choices; for None, those of the last chunk, which has the usage."""
    if delta is None:
        return {**generation.job.common_fields, "usage": _compute_usage(generation)}
    fields = dict(generation.job.common_fields)
    if generation.job.body.include_usage:
        continuous = generation.job.body.continuous_usage
        fields["usage"] = _compute_usage_so_far(delta, generation) if continuous else None
    if delta.is_first_of_all:
        fields["kv_cache"] = _make_kv_cache_choice(generation)
    if generation.job.body.timings_per_token:
        fields["timings"] = _compute_timings(generation, _compute_usage_so_far(delta, generation))
    if delta.progress is not None:
        fields["prompt_progress"] = _make_progress(delta.progress, delta.choice, generation)
    return fields


def _compute_usage(generation: Generation[B]) -> Usage:
    """Return the usage of all prompts and choices, up to now."""
    tokens = generation.prompt_tokens, generation.completion_tokens, generation.cached_tokens
    return _make_usage(generation, range(len(generation.job.submits)), *tokens)


def _compute_usage_so_far(delta: OutputDelta, generation: Generation[B]) -> Usage:
    """Return the usage of one choice and its prompt, up to the end of the delta; as in vLLM."""
    prompt, cached = len(generation.job.get_prompt(delta.choice).ids), generation.get_cached_tokens(delta.choice)
    return _make_usage(generation, [delta.choice], prompt, delta.num_tokens, cached)


def _make_usage(generation: Generation[B], choices: Iterable[int], prompt: int, completion: int, cached: int) -> Usage:
    usage = Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))
    if generation.job.parsing is not None and generation.job.parsing.format.reasoning is not None:
        usage.completion_tokens_details = CompletionTokensDetails(sum(map(generation.get_reasoning_tokens, choices)))
    return usage


def _compute_timings(generation: Generation[B], usage: Usage) -> Timings:
    """Return the speed of a generation up to now: of its prompt from its admission to its first token, and after it."""
    cached = usage.prompt_tokens_details.cached_tokens
    prompt, now = usage.prompt_tokens - cached, time.monotonic()
    first = generation.first_token_time or now
    prompt_ms, predicted_ms = 1000 * (first - generation.start_time), 1000 * (now - first)
    rates = [(prompt, prompt_ms), (usage.completion_tokens, predicted_ms)]
    (prompt_each, prompt_rate), (each, rate) = ((ms / n if n else 0.0, 1000 * n / ms if ms else 0.0) for n, ms in rates)
    return Timings(
        cached, prompt, prompt_ms, prompt_each, prompt_rate, usage.completion_tokens, predicted_ms, each, rate
    )


def _make_progress(progress: Progress, choice: int, generation: Generation[B]) -> PromptProgress:
    total = len(generation.job.get_prompt(choice).ids)
    time_ms = round(1000 * (time.monotonic() - generation.start_time))
    return PromptProgress(total, generation.get_cached_tokens(choice), progress.num_tokens, time_ms)


def _make_kv_cache_choice(generation: Generation[B]) -> KVCacheChoice:
    return msgspec.convert(generation.first_admitted, KVCacheChoice, from_attributes=True)


def set_choice_fields(choice: Choice, delta: OutputDelta, generation: Generation[B]) -> None:
    """Set the fields that choices of all endpoints have, except their text."""
    if generation.job.body.return_token_ids:
        choice.token_ids = [placed.token for placed in delta.tokens]
    choice.finish_reason = delta.finish_reason
    if delta.stop_reason is not None:
        choice.stop_reason = delta.stop_reason
    if delta.record is not None:
        choice.kv_cache = make_explanation(delta.record)
    if delta.comparison is not None:
        choice.kv_cache_comparison = make_token_comparison(delta.comparison)


def make_explanation(record: RequestRecord) -> Explanation:
    """Return what a choice tells of its record, with `explain: true`."""
    explanation = msgspec.convert(record, Explanation, from_attributes=True)
    if record.fidelity_tokens:
        explanation.fidelity = ShadowFidelity(record.fidelity_tokens, record.fidelity_kl, record.fidelity_top1)
    if record.routing is not None:
        explanation.routed = record.routing
    return explanation


def make_token_comparison(compared: Compared) -> TokenComparison:
    """Return a choice's `kv_cache_comparison`: how far its tokens are from what the reference instance predicts."""
    comparison = TokenComparison(compared.indexes, compared.kl, compared.agreed, compared.rank)
    if compared.ended_early is not None:
        comparison.ended_early = compared.ended_early
    return comparison


def set_prompt_fields(target: CompletionChunkChoice | ChatAnswer, choice: int, generation: Generation[B]) -> None:
    """Set the token ids and log-probabilities of a choice's prompt in `target`, if the request has these options."""
    job = generation.job
    if job.body.return_token_ids:
        target.prompt_token_ids = job.get_prompt(choice).ids
    if (top := job.body.prompt_logprobs) is not None:
        scores = generation.get_prompt_logprobs(choice)
        target.prompt_logprobs = generation.share(
            "prompt_logprobs", choice, lambda: make_prompt_logprobs(generation.tokenizer, scores, top)
        )


# ---------------------------------------------------------------- sending
class WhileConnected(Response):
    """A response made by an ASGI app that is cancelled when the client disconnects; its `finally` blocks clean up.

    The request's body must have been read. Exceptions of the app are raised, so that they get their error response.
    """

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._app(scope, receive, send))
        gone = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_events(scope: Scope, send: Send, headers: Mapping[str, str], events: AsyncIterator[list[bytes]]) -> None:
    """Send a response of server-sent events: `data: ` and an empty line for each, at the end `data: [DONE]`.

    Events that are yielded in one list are sent in one part. An exception of `events` is sent as one more event, as the
    status 200 was sent before.
    """
    raw = MutableHeaders({**EVENT_STREAM_HEADERS, **headers}).raw
    await send({"type": "http.response.start", "status": 200, "headers": raw})
    try:
        async for together in events:
            # A step of the engine wakes all streams. With this pause, all write their events before the first is sent:
            # as the same code stays in the CPU's caches, this takes half the time.
            await asyncio.sleep(0)
            await send(_make_body_message(together))
    except Exception as error:
        api_error = scope["state"]["error"] = to_api_error(error)  # for the log, too
        await send(_make_body_message([api_error.encode()]))
    await send(_make_body_message([b"[DONE]"]))
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _make_body_message(events: Sequence[bytes]) -> Message:
    return {"type": "http.response.body", "body": b"data: %b\n\n" % b"\n\ndata: ".join(events), "more_body": True}
