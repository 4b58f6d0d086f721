"""Runs a job: receives the engine's events, and yields deltas (pieces of text) of the choices.

Knows text and the engine's messages; knows neither HTTP nor what an endpoint's response looks like.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from server.api.http.errors import ApiError, make_engine_error
from server.api.openai.generation_job import B, Job, Serving
from server.api.openai.tools.message_format import MessageSplitter
from server.engine.ipc.client import Stream
from server.engine.ipc.messages import (
    Admitted,
    Compared,
    Explained,
    Failed,
    Preempted,
    Progress,
    PromptScores,
    RequestEvent,
    TokenLogprob,
    Tokens,
)
from server.records import RequestRecord
from server.text.output import Detokenizer, OutputText, OutputToken
from server.text.tokenizer import TokenizerBase
from server.text.tool_parsers.calls import ToolCall
from server.text.tool_parsers.message_parser import MessagePart

T = TypeVar("T")

COMPARED_COLUMNS = ("indexes", "kl", "agreed", "rank")  # the lists of an event Compared


class OutputDelta(NamedTuple):
    """More text of one choice; only the last delta of a choice has a finish_reason.

    If texts are split, `parts` are its text, reasoning and calls in the order in which the model writes them.
    """

    choice: int
    text: str
    tokens: list[OutputToken]
    logprobs: list[TokenLogprob]  # one for each of `tokens`; empty if the request has no logprobs
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()  # or parts of them; at most one of each call
    parts: tuple[MessagePart, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the stop string, or the stop token's id, that ended the text
    record: RequestRecord | None = None  # only in a choice's last delta, if the request has `explain`
    # How far tokens of this delta, or of earlier ones, are from the reference, if the request has one
    comparison: Compared | None = None
    progress: Progress | None = None  # how much of the prompt is computed; then the delta has nothing else
    num_tokens: int = 0  # number of its choice's tokens up to the end of this delta
    is_first: bool = False  # whether it is its choice's first delta
    is_first_of_all: bool = False  # whether it is the first delta of all choices


def cut_comparison(event: Compared, num_tokens: int) -> Compared:
    """Return an event with only the tokens among the first `num_tokens`."""
    count = sum(index < num_tokens for index in event.indexes)
    return msgspec.structs.replace(event, **{name: getattr(event, name)[:count] for name in COMPARED_COLUMNS})


class Generation(Generic[B]):
    """A job that the engine runs. Within `async with running()`, call `wait_for_admission` and `iter_deltas` once.

    Times are monotonic seconds.
    """

    def __init__(self, serving: Serving, job: Job[B]) -> None:
        self.job = job
        self.tokenizer: TokenizerBase = serving.tokenizer
        self.submit_time = 0.0
        self.first_token_time: float | None = None
        self.preemptions = 0
        self.drafted_tokens = 0  # number of draft tokens that were verified, of all choices
        self.accepted_tokens = 0  # number of verified draft tokens that were accepted, of all choices
        num_choices = len(job.submits)
        self.texts: list[str] | None = [""] * num_choices if serving.log_prompts else None  # each choice's text
        self._client = serving.client
        self._deadlines = serving.deadlines
        self._stream: Stream
        self._outputs: list[OutputText] = []
        self._splitters: list[MessageSplitter] = []  # by choice; empty if the texts are not split
        self._held_deltas: dict[int, OutputDelta] = {}  # by choice: tokens of which a parser has shown nothing yet
        self._choice_by_request_id = {submit.request_id: index for index, submit in enumerate(job.submits)}
        # By choice: log-probabilities of tokens whose text was not returned yet.
        self._pending_logprobs: list[deque[TokenLogprob]] = [deque() for _ in job.submits]
        self._admitted: dict[int, Admitted] = {}
        self._prompt_logprobs: dict[int, list[TokenLogprob]] = {i: [] for i in range(num_choices)}
        self._wants_prompt_logprobs = job.submits[0].sampling.prompt_logprobs is not None  # the same for all
        self._shared: dict[tuple[str, int], Any] = {}  # what `share` has computed
        self._early_events: list[RequestEvent] = []  # events read while waiting for the admission of other choices
        # By choice: the last delta, kept until the events that come after the last tokens
        self._last_deltas: dict[int, OutputDelta] = {}
        # The choices whose last event Compared has not come
        self._uncompared = {i for i, submit in enumerate(job.submits) if submit.reference is not None}
        self._waiting_deltas: list[OutputDelta] = []  # deltas that wait for log-probabilities of their prompt
        self._started_choices: set[int] = set()  # choices of which a delta was yielded

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run one request for each choice; those that have not ended when the block is left are cancelled.

        Raises EngineLost when there is no engine.
        """
        async with self._client.stream(self.job.submits) as self._stream:
            self.submit_time = time.monotonic()
            self._outputs = self._make_output_texts()
            if (parsing := self.job.parsing) is not None:
                prompts = map(self.job.get_prompt, range(len(self.job.submits)))
                self._splitters = [parsing.make_splitter(prompt.text) for prompt in prompts]
            with self._limit_time():
                yield

    def _make_output_texts(self) -> list[OutputText]:
        """Return for each choice an OutputText, which continues the choice's prompt."""
        body, parsing = self.job.body, self.job.parsing
        vocabulary = self.tokenizer if parsing is None else parsing.vocabulary
        return [
            OutputText(
                Detokenizer(vocabulary, submit.prompt, skip_special=body.skip_special_tokens),
                body.stop,
                include_stop=body.include_stop_str_in_output,
                min_tokens=body.min_tokens,
            )
            for submit in self.job.submits
        ]

    @contextlib.contextmanager
    def _limit_time(self) -> Iterator[None]:
        """Fail the requests if the block takes longer than the request timeout, so that a stream ends with an error."""
        seconds = self._deadlines.request_timeout
        if seconds is None:
            yield
            return
        message = f"the request took longer than {seconds:g} seconds; ask for fewer tokens"
        timer = asyncio.get_running_loop().call_later(
            seconds, self._stream.fail, ApiError(504, message, code="request_timeout")
        )
        try:
            yield
        finally:
            timer.cancel()

    # ------------------------------------------------------------ properties of the generation so far
    @property
    def first_admitted(self) -> Admitted | None:
        """Return the engine's event Admitted of the choice that was admitted first; None before any was admitted."""
        return next(iter(self._admitted.values()), None)

    @property
    def finish_reasons(self) -> list[str | None]:
        """Return the finish reason of each choice; None for one that has not ended."""
        return [output.finish_reason for output in self._outputs]

    @property
    def prompt_tokens(self) -> int:
        """Return the number of tokens of all prompts, each prompt counted once."""
        return sum(len(prompt.ids) for prompt in self.job.prompts)

    @property
    def completion_tokens(self) -> int:
        return sum(output.num_tokens for output in self._outputs)

    @property
    def start_time(self) -> float:
        """Return when the first request left the queue; before it has, when it entered it."""
        admitted = self.first_admitted
        return self.submit_time + (0 if admitted is None else admitted.queue_seconds)

    def get_reasoning_tokens(self, choice: int) -> int:
        """Return how many tokens of a choice so far were reasoning."""
        return self._splitters[choice].num_reasoning_tokens if self._splitters else 0

    @property
    def cached_tokens(self) -> int:
        """Return how many tokens of the prompts were found in the cache, each prompt counted once."""
        return sum(self.get_cached_tokens(head) for head in range(0, len(self._outputs), self.job.choices_per_prompt))

    def get_cached_tokens(self, choice: int) -> int:
        """Return how many tokens of a choice's prompt were found in the cache."""
        admitted = self._admitted.get(self.job.get_first_choice(choice))
        return 0 if admitted is None else admitted.cached_tokens

    def get_prompt_logprobs(self, choice: int) -> list[TokenLogprob]:
        """Return the log-probabilities of a choice's prompt from its second token on; complete at its first delta."""
        return self._prompt_logprobs[self.job.get_first_choice(choice)]

    def share(self, name: str, choice: int, compute: Callable[[], T]) -> T:
        """Return `compute()`, called only once for each name and prompt: all choices of a prompt share the result."""
        key = name, self.job.get_first_choice(choice)
        if key not in self._shared:
            self._shared[key] = compute()
        shared: T = self._shared[key]
        return shared

    # ------------------------------------------------------------ its events
    async def wait_for_admission(self) -> Admitted:
        """Wait until every choice is admitted, or one has a token: the others may have to wait for a seat.

        Returns the event Admitted of the choice admitted first. Raises ApiError if a request fails or the queue timeout
        passes, EngineLost if the engine is gone.
        """
        seconds = self._deadlines.queue_timeout
        try:
            async with asyncio.timeout(seconds):
                while len(self._admitted) < len(self._outputs) and not any(
                    isinstance(event, Tokens) for event in self._early_events
                ):
                    event = self._record_event(await anext(self._stream))
                    if not isinstance(event, Admitted):
                        self._early_events.append(event)
        except TimeoutError:
            message = f"the request did not get its place within {seconds:g} seconds; try again later"
            raise ApiError(503, message, code="queue_timeout") from None
        assert self.first_admitted is not None, "the engine sends Admitted before Tokens"
        return self.first_admitted

    async def iter_deltas(self) -> AsyncIterator[list[OutputDelta]]:
        """Yield lists of deltas; each list has all deltas that arrived since the list before was yielded.

        Raises ApiError if a request fails, EngineLost if the engine is gone.
        """
        if early := [delta for event in self._early_events for delta in self._process_event(event)]:
            yield self._mark_first(early)
        async for event in self._stream:
            deltas = self._process_event(self._record_event(event))
            try:
                while (following := self._stream.get_nowait()) is not None:
                    deltas += self._process_event(self._record_event(following))
            except Exception:
                if deltas:
                    yield self._mark_first(deltas)
                raise
            if deltas:
                yield self._mark_first(deltas)

    def _mark_first(self, deltas: list[OutputDelta]) -> list[OutputDelta]:
        """Return deltas that are about to be yielded with `is_first` and `is_first_of_all` set."""
        if len(self._started_choices) == len(self._outputs):
            return deltas
        marked = []
        for delta in deltas:
            if delta.choice not in self._started_choices:
                delta = delta._replace(is_first=True, is_first_of_all=not self._started_choices)
                self._started_choices.add(delta.choice)
            marked.append(delta)
        return marked

    def _record_event(self, event: RequestEvent) -> RequestEvent:
        """Note times and counts of an engine event, and return the event. Raises ApiError for the event Failed."""
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
        """Return the deltas that can be sent after this event."""
        index = self._choice_by_request_id[event.request_id]
        if isinstance(event, Tokens):
            delta = self._make_delta(index, event)
            if delta is not None and delta.finish_reason is not None:
                self._last_deltas[index] = delta
                return self._take_last(index)
            return [] if delta is None else self._take_ready([delta])
        if isinstance(event, Progress):
            return self._take_ready([OutputDelta(index, "", [], [], progress=event)])
        if isinstance(event, PromptScores):
            self._prompt_logprobs[index] += event.logprobs
            waiting, self._waiting_deltas = self._waiting_deltas, []
            return self._take_ready(waiting)
        if isinstance(event, Explained):
            self._last_deltas[index] = self._last_deltas[index]._replace(record=event.record)
            return self._take_last(index)
        if isinstance(event, Compared):
            return self._take_compared(index, event)
        return []

    def _take_compared(self, index: int, event: Compared) -> list[OutputDelta]:
        """Return the deltas that can be sent after a comparison of tokens of a choice."""
        output = self._outputs[index]
        if output.finish_reason is not None:  # a stop string may have ended the text before the engine's last tokens
            event = cut_comparison(event, output.num_tokens)
        compared = OutputDelta(index, "", [], [], comparison=event, num_tokens=output.num_tokens)
        deltas = self._take_ready([compared]) if event.indexes or event.ended_early else []
        if event.is_last:
            self._uncompared.discard(index)
            deltas += self._take_last(index)
        return deltas

    def _take_last(self, index: int) -> list[OutputDelta]:
        """Return a choice's last delta in a list; an empty list while its comparison or explanation is to come."""
        delta = self._last_deltas.get(index)
        if delta is None or index in self._uncompared or (self.job.submits[index].explain and delta.record is None):
            return []
        return self._take_ready([self._last_deltas.pop(index)])

    def _take_ready(self, deltas: list[OutputDelta]) -> list[OutputDelta]:
        """Return the deltas whose prompts' log-probabilities are complete, or not requested; keep the others."""
        if not self._wants_prompt_logprobs:
            return deltas
        ready: list[OutputDelta] = []
        for delta in deltas:
            head = self.job.get_first_choice(delta.choice)
            complete = len(self._prompt_logprobs[head]) >= len(self.job.get_prompt(head).ids) - 1
            (ready if complete else self._waiting_deltas).append(delta)
        return ready

    def _make_delta(self, index: int, event: Tokens) -> OutputDelta | None:
        """Return the delta of new tokens; None without text to show yet."""
        output, submit, scores = self._outputs[index], self.job.submits[index], self._pending_logprobs[index]
        scores.extend(event.logprobs or ())
        released = output.push(event.tokens, event.finish_reason, ends_with_text=event.completes_grammar)
        if self.texts is not None:
            self.texts[index] += released.text
        if output.finish_reason is not None:
            self._stream.cancel(event.request_id, "stop")  # ends the request: the engine knows no stop strings
        elif not released.text:
            assert not released.tokens, "tokens come out with text"
            return None
        released_scores = [scores.popleft() for _ in released.tokens] if scores else []
        stop_reason: str | int | None = output.stop_reason
        if event.finish_reason == "stop" and stop_reason is None and event.tokens[-1] in submit.sampling.stop_token_ids:
            stop_reason = event.tokens[-1]
        return self._split(
            OutputDelta(
                index,
                released.text,
                released.tokens,
                released_scores,
                finish_reason=output.finish_reason,
                stop_reason=stop_reason,
                num_tokens=output.num_tokens,
            )
        )

    def _split(self, delta: OutputDelta) -> OutputDelta | None:
        """Return a delta whose text is split into content, reasoning and tool calls; None if there is nothing to show.

        The tokens of a delta that shows nothing come with the next one.
        """
        if self.job.parsing is None:
            return delta
        splitter, ends = self._splitters[delta.choice], delta.finish_reason is not None
        part = splitter.push(delta.text, delta.tokens, ends=ends)
        if (held := self._held_deltas.pop(delta.choice, None)) is not None:
            held.tokens.extend(delta.tokens)
            held.logprobs.extend(delta.logprobs)
            delta = delta._replace(tokens=held.tokens, logprobs=held.logprobs)
        delta = delta._replace(
            text=part.content,
            reasoning=part.reasoning,
            tool_calls=part.tool_calls,
            parts=part.parts,
            finish_reason="tool_calls" if delta.finish_reason == "stop" and splitter.has_calls else delta.finish_reason,
        )
        if ends or delta.text or delta.reasoning or delta.tool_calls:
            return delta
        self._held_deltas[delta.choice] = delta
        return None
