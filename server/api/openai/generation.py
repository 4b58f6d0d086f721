"""The choices of one request while they run: the engine's events in, pieces of text out.

Knows text and the engine's messages; knows neither HTTP nor what the endpoint's answer looks like.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from server.api.http.errors import from_engine
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
from server.engine.records import RequestRecord
from server.text.output import OutputText, Placed


class OutputDelta(NamedTuple):
    """More text of one choice; with a finish_reason the last."""

    choice: int
    text: str
    tokens: list[Placed]
    scores: list[TokenLogprob]  # of each of these tokens, if log-probabilities were asked for; otherwise none
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string, or the stop token
    record: RequestRecord | None = None  # with the last piece, of requests that asked to be explained
    num_tokens: int = 0  # of its choice, up to the end of this piece


def merged(pieces: Sequence[OutputDelta]) -> list[OutputDelta]:
    """Merge pieces into one for each choice, in the order of choices."""
    parts: dict[int, list[OutputDelta]] = {}
    for piece in pieces:
        parts.setdefault(piece.choice, []).append(piece)
    return [
        part[-1]._replace(
            text="".join(piece.text for piece in part),
            tokens=[token for piece in part for token in piece.tokens],
            scores=[score for piece in part for score in piece.scores],
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
    """Made by `generate`. First `admission`, then `pieces`, both once. Times are monotonic seconds."""

    def __init__(self, stream: Stream, job: Job, outputs: list[OutputText], keep_texts: bool) -> None:
        self.job = job
        self.submitted = time.monotonic()
        self.first_token: float | None = None
        self.preemptions = 0
        self.drafted_tokens = 0  # guesses that were verified,
        self.accepted_tokens = 0  # and those that came true
        self.texts: list[str] | None = [""] * len(outputs) if keep_texts else None  # all that the choices came to
        self._stream = stream
        self._index = {submit.request_id: index for index, submit in enumerate(job.submits)}
        self._outputs = outputs
        self._scores: list[deque[TokenLogprob]] = [deque() for _ in outputs]  # of tokens whose text is not out
        self._admitted: dict[int, Admitted] = {}
        self._prompt_scores: dict[int, list[TokenLogprob]] = {i: [] for i in range(len(outputs))}
        self._prompts_scored = job.submits[0].sampling.prompt_logprobs is not None  # of every prompt, or of none
        self._early: list[RequestEvent] = []  # read while waiting for the admission of other choices
        self._last: dict[int, OutputDelta] = {}  # by choice: pieces that wait for their explanation
        self._waiting: list[OutputDelta] = []  # for log-probabilities of their prompt

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
        return sum(self.cached_tokens_of(head) for head in range(0, len(self._outputs), self.job.choices))

    def cached_tokens_of(self, choice: int) -> int:
        """Return how many tokens of its prompt were found in the cache."""
        admitted = self._admitted.get(self.job.first_of(choice))
        return 0 if admitted is None else admitted.cached_tokens

    def prompt_scores(self, choice: int) -> list[TokenLogprob]:
        """Return the log-probabilities of a choice's prompt from its second token on, once its first piece has come."""
        return self._prompt_scores[self.job.first_of(choice)]

    def fail(self, error: Exception) -> None:
        """Raise `error` from `admission` or `pieces`, after everything that the engine has sent."""
        self._stream.fail(error)

    async def admission(self) -> Admitted:
        """Wait until every choice is admitted, or one has a token: the others may have to wait for a place.

        Returns what was said of the choice admitted first. Raises ApiError, EngineLost.
        """
        while len(self._admitted) < len(self._outputs) and not any(isinstance(e, Tokens) for e in self._early):
            event = self._seen(await anext(self._stream))
            if not isinstance(event, Admitted):
                self._early.append(event)
        assert self._admitted, "the engine sends Admitted before Tokens"
        return next(iter(self._admitted.values()))

    async def pieces(self) -> AsyncIterator[list[OutputDelta]]:
        """Yield lists of pieces: all that have arrived, if the reader is slower. Raises ApiError, EngineLost."""
        if early := [piece for event in self._early for piece in self._pieces(event)]:
            yield early
        async for event in self._stream:
            pieces = self._pieces(self._seen(event))
            try:
                while (following := self._stream.arrived()) is not None:
                    pieces += self._pieces(self._seen(following))
            except Exception:
                if pieces:
                    yield pieces
                raise
            if pieces:
                yield pieces

    def _seen(self, event: RequestEvent) -> RequestEvent:
        """Record an event, which is returned. Raises ApiError for a request that failed."""
        if isinstance(event, Failed):
            raise from_engine(event)
        if isinstance(event, Admitted):
            self._admitted[self._index[event.request_id]] = event
        elif isinstance(event, Preempted):
            self.preemptions += 1
        elif isinstance(event, Tokens):
            self.first_token = self.first_token or time.monotonic()
            self.drafted_tokens += event.drafted
            self.accepted_tokens += len(event.tokens) - 1 if event.drafted else 0
        return event

    def _pieces(self, event: RequestEvent) -> list[OutputDelta]:
        """Return the pieces that can be sent after this event."""
        index = self._index[event.request_id]
        if isinstance(event, Tokens):
            piece = self._piece(index, event)
            return [] if piece is None else self._in_turn([piece])
        if isinstance(event, PromptScores):
            self._prompt_scores[index] += event.scores
            waiting, self._waiting = self._waiting, []
            return self._in_turn(waiting)
        if isinstance(event, Explained):
            return self._in_turn([self._last.pop(index)._replace(record=event.record)])
        return []

    def _in_turn(self, pieces: list[OutputDelta]) -> list[OutputDelta]:
        """Return the pieces whose prompts are scored, if that is wanted; keep the others until they are."""
        if not self._prompts_scored:
            return pieces
        complete_pieces: list[OutputDelta] = []
        for piece in pieces:
            head = self.job.first_of(piece.choice)
            complete = len(self._prompt_scores[head]) >= len(self.job.prompt_of(head).ids) - 1
            (complete_pieces if complete else self._waiting).append(piece)
        return complete_pieces

    def _piece(self, index: int, event: Tokens) -> OutputDelta | None:
        """Return the piece of new tokens; None while there is no text to show, or an explanation is still to come."""
        output, submit, scores = self._outputs[index], self.job.submits[index], self._scores[index]
        scores.extend(event.scores or ())
        released = output.push(event.tokens, event.finish_reason)
        if self.texts is not None:
            self.texts[index] += released.text
        if output.finish_reason is not None:
            self._stream.cancel(event.request_id, "stop")  # a stop string is nothing the engine knows of
        elif not released.text:
            assert not released.tokens, "tokens come out with text"
            return None
        released_scores = [scores.popleft() for _ in released.tokens] if scores else []
        stop_reason: str | int | None = output.stopped_by
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
            self._last[index] = piece
            return None
        return piece
