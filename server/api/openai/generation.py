"""The choices of one request while they run: the engine's events in, pieces of text out.

Knows text and the engine's messages; knows neither HTTP nor what the endpoint's answer looks like.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from server.api.http.errors import make_engine_error
from server.api.openai.generation_job import Job
from server.engine.ipc.client import EngineClient, Stream
from server.engine.ipc.messages import (
    Admitted,
    Explained,
    Failed,
    Preempted,
    PromptScores,
    RequestEvent,
    TokenLogprob,
    Tokens,
)
from server.records import RequestRecord
from server.text.output import OutputText, Placed


class OutputDelta(NamedTuple):
    """More text of one choice; with a finish_reason the last."""

    choice: int
    text: str
    tokens: list[Placed]
    logprobs: list[TokenLogprob]  # of each of these tokens, if log-probabilities were asked for; otherwise none
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string, or the stop token
    record: RequestRecord | None = None  # with the last piece, of requests that asked to be explained
    num_tokens: int = 0  # of its choice, up to the end of this piece


def merge_deltas(pieces: Sequence[OutputDelta]) -> list[OutputDelta]:
    """Merge pieces into one for each choice, in the order of choices."""
    parts: dict[int, list[OutputDelta]] = {}
    for piece in pieces:
        parts.setdefault(piece.choice, []).append(piece)
    return [
        part[-1]._replace(
            text="".join(piece.text for piece in part),
            tokens=[token for piece in part for token in piece.tokens],
            logprobs=[score for piece in part for score in piece.logprobs],
        )
        for _, part in sorted(parts.items())
    ]


@contextlib.asynccontextmanager
async def generate(
    client: EngineClient, job: Job, outputs: list[OutputText], *, keep_texts: bool = False
) -> AsyncIterator[Generation]:
    """Run one request for each choice; those that have not ended when the block is left are cancelled.

    Raises EngineLost when there is no engine.
    """
    async with client.stream(job.submits) as stream:
        yield Generation(stream, job, outputs, keep_texts)


class Generation:
    """Made by `generate`. First `wait_for_admission`, then `iter_deltas`, both once. Times are monotonic seconds."""

    def __init__(self, stream: Stream, job: Job, outputs: list[OutputText], keep_texts: bool) -> None:
        self.job = job
        self.submit_time = time.monotonic()
        self.first_token_time: float | None = None
        self.preemptions = 0
        self.drafted_tokens = 0  # guesses that were verified,
        self.accepted_tokens = 0  # and those that came true
        self.texts: list[str] | None = [""] * len(outputs) if keep_texts else None  # all that the choices came to
        self._stream = stream
        self._choice_by_request_id = {submit.request_id: index for index, submit in enumerate(job.submits)}
        self._outputs = outputs
        self._pending_logprobs: list[deque[TokenLogprob]] = [
            deque() for _ in outputs
        ]  # of tokens whose text is not out
        self._admitted: dict[int, Admitted] = {}
        self._prompt_logprobs: dict[int, list[TokenLogprob]] = {i: [] for i in range(len(outputs))}
        self._wants_prompt_logprobs = job.submits[0].sampling.prompt_logprobs is not None  # of every prompt, or of none
        self._early_events: list[RequestEvent] = []  # read while waiting for the admission of other choices
        self._unexplained: dict[int, OutputDelta] = {}  # by choice: pieces that wait for their explanation
        self._waiting_deltas: list[OutputDelta] = []  # for log-probabilities of their prompt

    @property
    def first_admitted(self) -> Admitted | None:
        return next(iter(self._admitted.values()), None)

    @property
    def finish_reasons(self) -> list[str | None]:
        """Of each choice; None: it has not ended."""
        return [output.finish_reason for output in self._outputs]

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return sum(len(prompt.ids) for prompt in self.job.prompts)

    @property
    def completion_tokens(self) -> int:
        return sum(output.num_tokens for output in self._outputs)

    @property
    def cached_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return sum(self.get_cached_tokens(head) for head in range(0, len(self._outputs), self.job.choices_per_prompt))

    def get_cached_tokens(self, choice: int) -> int:
        """Return how many tokens of its prompt were found in the cache."""
        admitted = self._admitted.get(self.job.get_first_choice(choice))
        return 0 if admitted is None else admitted.cached_tokens

    def get_prompt_logprobs(self, choice: int) -> list[TokenLogprob]:
        """Return the log-probabilities of a choice's prompt from its second token on, once its first piece has come."""
        return self._prompt_logprobs[self.job.get_first_choice(choice)]

    def fail(self, error: Exception) -> None:
        """Raise `error` from `wait_for_admission` or `iter_deltas`, after everything that the engine has sent."""
        self._stream.fail(error)

    async def wait_for_admission(self) -> Admitted:
        """Wait until every choice is admitted, or one has a token: the others may have to wait for a place.

        Returns what was said of the choice admitted first. Raises ApiError, EngineLost.
        """
        while len(self._admitted) < len(self._outputs) and not any(isinstance(e, Tokens) for e in self._early_events):
            event = self._record_event(await anext(self._stream))
            if not isinstance(event, Admitted):
                self._early_events.append(event)
        assert self._admitted, "the engine sends Admitted before Tokens"
        return next(iter(self._admitted.values()))

    async def iter_deltas(self) -> AsyncIterator[list[OutputDelta]]:
        """Yield lists of pieces: all that have arrived, if the reader is slower. Raises ApiError, EngineLost."""
        if early := [piece for event in self._early_events for piece in self._process_event(event)]:
            yield early
        async for event in self._stream:
            pieces = self._process_event(self._record_event(event))
            try:
                while (following := self._stream.get_nowait()) is not None:
                    pieces += self._process_event(self._record_event(following))
            except Exception:
                if pieces:
                    yield pieces
                raise
            if pieces:
                yield pieces

    def _record_event(self, event: RequestEvent) -> RequestEvent:
        """Record an event, which is returned. Raises ApiError for a request that failed."""
        if isinstance(event, Failed):
            raise make_engine_error(event)
        if isinstance(event, Admitted):
            self._admitted[self._choice_by_request_id[event.request_id]] = event
        elif isinstance(event, Preempted):
            self.preemptions += 1
        elif isinstance(event, Tokens):
            self.first_token_time = self.first_token_time or time.monotonic()
            self.drafted_tokens += event.num_draft_tokens
            self.accepted_tokens += len(event.tokens) - 1 if event.num_draft_tokens else 0
        return event

    def _process_event(self, event: RequestEvent) -> list[OutputDelta]:
        """Return the pieces that can be sent after this event."""
        index = self._choice_by_request_id[event.request_id]
        if isinstance(event, Tokens):
            piece = self._make_delta(index, event)
            return [] if piece is None else self._take_ready([piece])
        if isinstance(event, PromptScores):
            self._prompt_logprobs[index] += event.logprobs
            waiting, self._waiting_deltas = self._waiting_deltas, []
            return self._take_ready(waiting)
        if isinstance(event, Explained):
            return self._take_ready([self._unexplained.pop(index)._replace(record=event.record)])
        return []

    def _take_ready(self, pieces: list[OutputDelta]) -> list[OutputDelta]:
        """Return the pieces whose prompts are scored, if that is wanted; keep the others until they are."""
        if not self._wants_prompt_logprobs:
            return pieces
        complete_pieces: list[OutputDelta] = []
        for piece in pieces:
            head = self.job.get_first_choice(piece.choice)
            complete = len(self._prompt_logprobs[head]) >= len(self.job.get_prompt(head).ids) - 1
            (complete_pieces if complete else self._waiting_deltas).append(piece)
        return complete_pieces

    def _make_delta(self, index: int, event: Tokens) -> OutputDelta | None:
        """Return the piece of new tokens; None while there is no text to show, or an explanation is still to come."""
        output, submit, scores = self._outputs[index], self.job.submits[index], self._pending_logprobs[index]
        scores.extend(event.logprobs or ())
        released = output.push(event.tokens, event.finish_reason)
        if self.texts is not None:
            self.texts[index] += released.text
        if output.finish_reason is not None:
            self._stream.cancel(event.request_id, "stop")  # a stop string is nothing the engine knows of
        elif not released.text:
            assert not released.tokens, "tokens come out with text"
            return None
        released_scores = [scores.popleft() for _ in released.tokens] if scores else []
        stop_reason: str | int | None = output.stop_reason
        if event.finish_reason == "stop" and stop_reason is None and event.tokens[-1] in submit.sampling.stop_token_ids:
            stop_reason = event.tokens[-1]
        piece = OutputDelta(
            index,
            released.text,
            released.tokens,
            released_scores,
            output.finish_reason,
            stop_reason,
            num_tokens=output.num_tokens,
        )
        if submit.explain and piece.finish_reason is not None:
            self._unexplained[index] = piece
            return None
        return piece
